"""Recognize MLPs: gated or not, separate or fused, and stacks of experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from learnable_multipliers._names import children, class_of
from learnable_multipliers.roles._fused import known_layout
from learnable_multipliers.roles._norms import inner_norms, norms_around
from learnable_multipliers.roles._tree import (
    UNKNOWN,
    ParameterRole,
    Part,
    Site,
    Tree,
    features,
    has_homogeneous_activation,
    is_homogeneous,
    is_linear,
    is_norm,
)

_GATED = (
    ("gate_proj", "up_proj", "down_proj"),
    # silu(w1 x) * (w3 x), then w2: the reference Llama and what followed its names.
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("w_gate", "w_up", "w_down"),
    ("gate", "up", "down"),
    ("proj_up_gate", "proj_up", "proj_down"),
    # timm: act(fc1_g x) * (fc1_x x).
    ("fc1_g", "fc1_x", "fc2"),
    # torchtitan's stacks of experts, named after their axes.
    ("w1_EFD", "w3_EFD", "w2_EDF"),
)
_UNGATED = (
    ("up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("linear1", "linear2"),
    ("lin1", "lin2"),
    ("wi", "wo"),
    ("w_in", "w_out"),
    ("up", "down"),
)
# litgpt's names do not show a gate; its classes do.
_GATED_CLASSES = {
    "LLaMAMLP": (("fc_1", "fc_2", "proj"),),
    "GemmaMLP": (("fc_1", "fc_2", "proj"),),
}
_UNGATED_CLASSES = {"GptNeoxMLP": (("fc", "proj"),)}
_DOWN_NORMS = ("ffn_sub_norm", "ffn_layernorm", "sub_norm", "inner_norm")


def mlp(site: Site) -> Iterator[ParameterRole]:
    """Read an MLP whose matrices are children of one module."""
    linears = site.linears
    homogeneous = has_homogeneous_activation(site.module)
    name = class_of(site.module).__name__
    for gate, up, down in _GATED + _GATED_CLASSES.get(name, ()):
        if {gate, up, down} <= linears.keys():
            shape = features(linears[gate])
            fits = shape == features(linears[up]) == features(linears[down])[::-1]
            # The shapes of three square matrices do not distinguish them.
            if fits and not (gate == "w1" and shape[0] == shape[1]):
                parts = {gate: [Part("gate", shape[0])], up: [Part("up", shape[0])]}
                yield from _matrices(site, parts, down, homogeneous)
            return
    for leaf in linears:
        layout = known_layout(site.module, leaf)
        others = [other for other in linears if other != leaf]
        if layout is None or layout.parts[0][0] not in ("gate", "up") or len(others) != 1:
            continue
        if layout.num_rows == features(linears[leaf])[0] == 2 * features(linears[others[0]])[1]:
            parts = {leaf: [Part(role, size) for role, size in layout.parts]}
            yield from _matrices(site, parts, others[0], homogeneous)
            return
    for up, down in _UNGATED + _UNGATED_CLASSES.get(name, ()):
        # Alone in their module: a third matrix beside them might be a gate of another name.
        if linears.keys() != {up, down}:
            continue
        hidden, width = features(linears[up])
        # An adapter goes the other way: what it calls up ends in the residual stream.
        in_order = not up.startswith("up") or list(linears) == [up, down]
        widths = site.tree.widths()
        residual = in_order and (not widths or width in widths | site.tree.norm_widths)
        if residual and features(linears[down]) == (width, hidden):
            parts = {up: [Part("ungated-up", hidden)]}
            yield from _matrices(site, parts, down, homogeneous)


def sequential_mlp(site: Site) -> Iterator[ParameterRole]:
    """Read `nn.Sequential(Linear, activation, Linear)`: its order is its computation."""
    if not isinstance(site.module, nn.Sequential):
        return
    steps = [
        (leaf, child)
        for leaf, child in children(site.module).items()
        if not isinstance(child, nn.Dropout | nn.Identity)
    ]
    if [is_linear(child) for _, child in steps] != [True, False, True]:
        return
    (up, first), (_, activation), (down, last) = steps
    pointwise = not activation._modules and not list(activation.parameters())
    mixes = is_norm(activation) or "softm" in class_of(activation).__name__.lower()
    if pointwise and not mixes and features(first)[::-1] == features(last):
        parts = {up: [Part("ungated-up", features(first)[0])]}
        yield from _matrices(site, parts, down, is_homogeneous(activation))


def experts(site: Site) -> Iterator[ParameterRole]:
    """Read stacks of experts, stored (experts, out, in) or (experts, in, out)."""
    module = site.module
    shapes = {
        leaf: tuple(parameter.shape)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }
    groups = [names for names in (*_GATED, *_UNGATED) if shapes.keys() == set(names)]
    fused = shapes.keys() == {"gate_up_proj", "down_proj"}
    if fused:
        into, down = ["gate_up_proj"], "down_proj"
    elif groups and len({shapes[leaf] for leaf in groups[0][:-1]}) == 1:
        *into, down = groups[0]
    else:
        return
    transposed = _is_transposed(shapes[into[0]], shapes[down], 2 if fused else 1, site.tree)
    if transposed is None:
        return
    hidden, width = shapes[down][-2:] if transposed else shapes[down][:-3:-1]
    norms = norms_around(site.tree, site.name, "mlp")
    note = f"of {class_of(module).__name__}"
    parts: dict[str, tuple[Part, ...]]
    if not fused:
        roles = ("gate", "up") if len(into) == 2 else ("ungated-up",)
        parts = {leaf: (Part(role, hidden),) for leaf, role in zip(into, roles, strict=True)}
    elif _gates_plainly(module):
        parts = {into[0]: (Part("gate", hidden), Part("up", hidden))}
    else:
        parts = {into[0]: (Part(UNKNOWN, 2 * hidden),)}
        note += ", which gates in a way of its own"
    # A norm after a mixture sees the sum of its experts, not the scale of each.
    parts[down] = (Part("down", width),)
    for leaf, stack in parts.items():
        yield ParameterRole(
            name=site.path(leaf),
            shape=shapes[leaf],
            parts=stack,
            transposed=transposed,
            column_norm="" if leaf == down else norms.before,
            homogeneous=has_homogeneous_activation(module),
            note=f"{leaf} {note}",
        )


def _matrices(
    site: Site, inputs: dict[str, list[Part]], down: str, homogeneous: bool
) -> Iterator[ParameterRole]:
    norms = norms_around(site.tree, site.name, "mlp")
    for leaf, parts in inputs.items():
        yield site.linear(leaf, *parts, column_norm=norms.before, homogeneous=homogeneous)
    in_mixture = any(hasattr(module, "experts") for module in site.tree.lineage(site.name))
    row_norm = "" if in_mixture else norms.after
    inner = (*_DOWN_NORMS, *inner_norms(site.module))
    yield site.whole(down, "down", row_norm, column_norm=site.norm(*inner))


def _gates_plainly(module: nn.Module) -> bool:
    """Return whether a stack is [gate | up] and used as act(gate) * up."""
    if getattr(module, "is_concatenated", False):
        # transformers marks its expert classes; some bring a gate of their own.
        apply_gate = getattr(type(module), "_apply_gate", None)
        return getattr(apply_gate, "__name__", "") == "_default_apply_gate"
    return class_of(module).__name__ == "Llama4TextExperts"


def _is_transposed(
    into: tuple[int, ...], down: tuple[int, ...], fused: int, tree: Tree
) -> bool | None:
    """Return whether a stack is stored (in, out), by its shapes; None if both orders fit."""
    stored = into[-1] == down[-2] and into[-2] == fused * down[-1]
    turned = into[-2] == down[-1] and into[-1] == fused * down[-2]
    if stored and turned:
        # The model's width, known from its embedding, is the input axis.
        stored, turned = into[-1] in tree.widths(), into[-2] in tree.widths()
    return None if stored == turned else turned
