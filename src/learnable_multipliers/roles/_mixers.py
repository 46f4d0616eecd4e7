"""Recognize sequence mixers: attention (separate, fused or latent q, k, v) and Mamba-2."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from learnable_multipliers._names import children, class_of
from learnable_multipliers.roles._fused import QKV, known_layout
from learnable_multipliers.roles._norms import CROSS_ATTENTION, Norms, inner_norms, norms_around
from learnable_multipliers.roles._tree import (
    SSM_ROLES,
    UNKNOWN,
    ParameterRole,
    Part,
    Site,
    features,
    is_norm,
)

# Names by role. A name counts only if the rest of its group is there.
_NAMES = {
    "query": (
        *("q_proj", "wq", "Wq", "to_q", "q", "query"),
        *("q_lin", "query_proj", "project_q", "c_q"),
    ),
    "key": (
        *("k_proj", "wk", "Wk", "to_k", "k", "key"),
        *("k_lin", "key_proj", "project_k", "c_k"),
    ),
    "value": (
        *("v_proj", "wv", "Wv", "to_v", "v", "value"),
        *("v_lin", "value_proj", "project_v", "c_v"),
    ),
}
_OUT = (
    *("o_proj", "wo", "Wo", "to_out", "out_proj", "c_proj"),
    *("dense", "o", "out_lin", "attention_out", "out", "proj"),
)
_NORMS = {
    "query": ("q_norm", "q_layernorm", "query_norm", "query_layernorm", "norm_q", "q_ln", "ln_q"),
    "key": ("k_norm", "k_layernorm", "key_norm", "key_layernorm", "norm_k", "k_ln", "ln_k"),
    "value": ("v_norm", "value_norm", "norm_v", "ln_v"),
}
_SHARED_NORM = ("qk_norm", "qk_layernorm")
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
# torchtitan keeps the projections in a module of their own, beside `wo`.
_PROJECTIONS = ("QKVLinear", "FusedQKVLinear")
_OUT_NORMS = ("attn_sub_norm", "inner_attn_ln", "sub_norm", "inner_norm", "o_norm", "out_norm")
QK_NORM = (
    "query and key norms follow their projections, so that their weights scale those rows and no "
    "scale of Q or K itself reaches the attention logits"
)
FIXED_QK_NORM = (
    "norms without a trained weight follow queries, keys or values, so that rows of K do not pair "
    "with rows of Q, nor rows of V with attention-out, and no scale of a whole head passes the norm"
)
FUNCTIONAL_QK_NORM = (
    "no function normalizes what c_q and c_k return; nanochat does, and there only "
    "`derive=True` finds that rows of K do not pair with rows of Q"
)


def attention(site: Site) -> Iterator[ParameterRole]:
    """Read an attention block: its projections, then its output matrix."""
    if not _is_softmax_attention(site):
        return
    out = _only(site.linears, _OUT)
    norms = norms_around(site.tree, site.name, "mixer")
    inputs = [*_separate(site, norms, out), *_fused(site, norms, out), *_latent(site, norms)]
    yield from inputs
    if out is None or not inputs:
        return
    _note_unrecognized(site, {role.name for role in inputs} | {site.path(f"{out}.weight")})
    inner = (*_OUT_NORMS, *inner_norms(site.module))
    yield site.whole(out, "attention-out", norms.after, column_norm=site.norm(*inner))


def torch_attention(site: Site) -> Iterator[ParameterRole]:
    """Read `torch.nn.MultiheadAttention`, whose fused layout is torch's own contract."""
    module = site.module
    if not isinstance(module, nn.MultiheadAttention):
        return
    norms = norms_around(site.tree, site.name, "mixer")
    width = module.embed_dim
    fused = module.in_proj_weight is not None
    groups = {"in_proj_weight": QKV} if fused else {f"{r[0]}_proj_weight": (r,) for r in QKV}
    for leaf, roles in groups.items():
        # In cross-attention, no norm of this layer feeds the keys and values.
        cross = _is_cross_attention(site) and roles != ("query",)
        yield ParameterRole(
            name=site.path(leaf),
            shape=tuple(module.get_parameter(leaf).shape),
            parts=tuple(Part(role, width, head_dim=module.head_dim) for role in roles),
            column_norm="" if cross else norms.before,
            note="torch.nn.MultiheadAttention",
        )
    yield site.whole("out_proj", "attention-out", norms.after)


def bert_layer(site: Site) -> Iterator[ParameterRole]:
    """Read the layer of BERT and its descendants: dense layers in modules of their own."""
    roles = {
        "attention.output.dense": "attention-out",
        "intermediate.dense": "ungated-up",
        "output.dense": "down",
    }
    if not all(site.path(path) in site.tree.modules for path in ("attention.self.query", *roles)):
        return
    intermediate = Site(site.path("intermediate"), site.child("intermediate"), site.tree)
    for path, role in roles.items():
        # Pre-norm descendants keep the MLP's norm in `intermediate`, ESM in the layer.
        norm = intermediate.norm("LayerNorm") or site.norm("LayerNorm")
        norm = norm if role == "ungated-up" else ""
        yield site.whole(path, role, column_norm=norm)


def _separate(site: Site, norms: Norms, out: str | None) -> Iterator[ParameterRole]:
    linears = _projections(site)
    leaves = {role: leaf for role, names in _NAMES.items() if (leaf := _only(linears, names))}
    if leaves.keys() != _NAMES.keys():
        # Latent attention with a full-rank query has no k and v beside it.
        if "query" in leaves and "kv_b_proj" in site.linears:
            yield site.whole(
                leaves["query"],
                "query",
                _row_norm(site, "query"),
                normalized=_is_normalized(site, "query"),
                head_dim=_head_dim(site, "query", site.rows(leaves["query"])),
                column_norm=norms.before,
            )
        return
    queries = site.rows(leaves["query"])
    normed = _row_norm(site, "query") or _is_normalized(site, "query")
    if leaves["query"] == "c_q" and not normed:
        site.tree.assume(FUNCTIONAL_QK_NORM)
    for role, leaf in leaves.items():
        column_norm = "" if role != "query" and _is_cross_attention(site) else norms.before
        rows, read = site.rows(leaf), out and features(site.linears[out])[1]
        if role == "query" and out is not None and rows != read:
            note = f"{rows} rows, but {out} reads {read}: queries may be fused with more"
            yield site.whole(leaf, UNKNOWN, column_norm=column_norm, note=note)
        else:
            yield site.whole(
                leaf,
                role,
                _row_norm(site, role),
                normalized=_is_normalized(site, role),
                head_dim=_head_dim(site, role, queries, rows),
                column_norm=column_norm,
            )


def _fused(site: Site, norms: Norms, out: str | None) -> Iterator[ParameterRole]:
    for leaf in _projections(site):
        owner, _, own_leaf = leaf.rpartition(".")
        layout = known_layout(site.child(owner), own_leaf)
        if layout is None or layout.parts[0][0] not in QKV:
            continue
        column_norm = "" if _is_cross_attention(site) else norms.before
        queries = layout.repeats * dict(layout.parts).get("query", 0)
        unread = queries and out and features(site.linears[out])[1] != queries
        if layout.num_rows != (rows := site.rows(leaf)) or unread:
            name = class_of(site.child(owner)).__name__
            note = f"{rows} rows do not fit the layout known for {name}"
            yield site.whole(leaf, UNKNOWN, column_norm=column_norm, note=note)
            continue
        apart = leaf == "c_attn" and "q_attn" in site.linears
        queries = site.rows("q_attn") if apart else queries
        parts = (
            Part(
                role,
                size,
                _row_norm(site, role),
                _is_normalized(site, role),
                _head_dim(site, role, queries, size),
            )
            for role, size in layout.parts
        )
        yield site.linear(leaf, *parts, column_norm=column_norm, repeats=layout.repeats)
        if apart:
            # GPT-2's cross-attention has its queries in another matrix.
            head_dim = _head_dim(site, "query", queries)
            yield site.whole("q_attn", "query", head_dim=head_dim, column_norm=norms.before)


def _latent(site: Site, norms: Norms) -> Iterator[ParameterRole]:
    """Read multi-head latent attention, by DeepSeek's names and attributes."""
    linears = site.linears
    if not {"kv_a_proj_with_mqa", "kv_b_proj"} <= linears.keys():
        return
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent, rope, nope, value = (getattr(site.module, size, 0) for size in sizes)
    rows_up = site.rows("kv_b_proj")
    if site.rows("kv_a_proj_with_mqa") != latent + rope or nope + value == 0:
        return
    if rows_up % (nope + value):
        return
    norm = site.norm("kv_a_layernorm")
    parts = (Part("kv-latent", latent, row_norm=norm), Part("key", rope, head_dim=rope))
    yield site.linear("kv_a_proj_with_mqa", *parts, column_norm=norms.before)
    parts = (Part("key", nope, head_dim=nope), Part("value", value, head_dim=value))
    yield site.linear("kv_b_proj", *parts, column_norm=norm, repeats=rows_up // (nope + value))
    if {"q_a_proj", "q_b_proj"} <= linears.keys():
        norm = site.norm("q_a_layernorm")
        yield site.whole("q_a_proj", "query-latent", norm, column_norm=norms.before)
        head_dim = _head_dim(site, "query", site.rows("q_b_proj"))
        yield site.whole("q_b_proj", "query", head_dim=head_dim, column_norm=norm)


def _is_softmax_attention(site: Site) -> bool:
    module = site.module
    if isinstance(module, nn.MultiheadAttention):
        return False
    # In a list of blocks, the name of the list counts.
    path = [part for part in site.name.split(".") if not part.isdigit()]
    label = f"{path[-1] if path else ''} {class_of(module).__name__}"
    if not re.search(r"att(entio)?n|mha", label, re.IGNORECASE):
        return False
    # Linear attention convolves and decays q, k, v: other symmetries hold there.
    decays = any(re.search(r"A_log|dt_bias", name) for name, _ in module.named_parameters())
    convolves = any(isinstance(child, nn.Conv1d) for child in children(module).values())
    return not decays and not convolves


def _is_cross_attention(site: Site) -> bool:
    """Return whether keys and values come from another sequence (cross-attention)."""
    if isinstance(cross := getattr(site.module, "is_cross_attention", None), bool):
        return cross
    label = f"{site.name.rpartition('.')[2]} {class_of(site.module).__name__}".lower()
    return CROSS_ATTENTION.search(label) is not None


def _projections(site: Site) -> dict[str, nn.Module]:
    """Return the linear layers of an attention block, by their names inside it."""
    linears = site.linears
    for name, child in children(site.module).items():
        if class_of(child).__name__ in _PROJECTIONS:
            inner = Site(site.path(name), child, site.tree).linears
            linears |= {f"{name}.{leaf}": linear for leaf, linear in inner.items()}
    return linears


def _only(linears: dict[str, nn.Module], names: tuple[str, ...]) -> str | None:
    present = [leaf for leaf in linears if leaf.rpartition(".")[2] in names]
    return present[0] if len(present) == 1 else None


def _norm_names(role: str) -> tuple[str, ...]:
    return _NORMS[role] if role == "value" else (*_NORMS[role], *_SHARED_NORM)


def _is_normalized(site: Site, role: str) -> bool:
    """Return whether queries, keys or values pass a norm without a trained weight."""
    fixed = site.has_fixed_norm(*_norm_names(role))
    if fixed:
        site.tree.assume(FIXED_QK_NORM)
    return fixed


def _row_norm(site: Site, role: str) -> str:
    norm = site.norm(*_norm_names(role))
    if norm and role != "value":
        site.tree.assume(QK_NORM)
    return norm


def _head_dim(site: Site, role: str, queries: int, rows: int | None = None) -> int | None:
    """Return the rows of one head of a query, key or value; None if the module does not show it.

    Args:
        queries: Rows of all queries together.
        rows: Rows of the block in one repeat of its matrix, if it is not the query's.
    """
    holders = (site.module, getattr(site.module, "config", None))

    def size(*names: str) -> int:
        values = (getattr(holder, name, None) for holder in holders for name in names)
        return next((n for n in values if isinstance(n, int) and n > 0), 0)

    num_heads = size(*_HEAD_COUNTS)
    head_dim = queries // num_heads if num_heads and queries % num_heads == 0 else size(*_HEAD_DIMS)
    if role == "value":
        head_dim = size("v_head_dim") or head_dim
    return head_dim if head_dim and (rows or queries) % head_dim == 0 else None


def _note_unrecognized(site: Site, known: set[str]) -> None:
    """Record the assumption implied by further matrices and norms of an attention block."""
    named = {*sum(_NORMS.values(), ()), *_SHARED_NORM, *_OUT_NORMS, *_LATENT_NORMS}
    more = [leaf for leaf in site.linears if site.path(f"{leaf}.weight") not in known]
    more += [n for n, m in children(site.module).items() if is_norm(m) and n not in named]
    if more:
        holder = class_of(site.module).__name__
        site.tree.assume(
            f"{holder} holds {', '.join(more)} as well, and the pairs Q and K, V and attention-out "
            "still scale against each other there"
        )


SSM_VECTORS = ("A_log", "D", "dt_bias")
"""Per-head parameters of a mixer; some models store them with two axes."""


def mamba2(site: Site) -> Iterator[ParameterRole]:
    """Read a Mamba-2 mixer: the rows of in_proj are z, x, B, C, dt, and conv1d runs over x, B, C.

    Every size follows from the shapes, and they must add up.
    """
    linears = site.linears
    own = dict(site.module.named_parameters(recurse=False))
    convolution = children(site.module).get("conv1d")
    if not isinstance(convolution, nn.Conv1d) or not set(SSM_VECTORS) <= own.keys():
        return
    if not {"in_proj", "out_proj"} <= linears.keys():
        return
    inner = features(linears["out_proj"])[1]
    heads = own["dt_bias"].numel()
    states, odd = divmod(convolution.out_channels - inner, 2)
    if odd or states <= 0 or site.rows("in_proj") != 2 * inner + 2 * states + heads:
        return
    norms = norms_around(site.tree, site.name, "mixer")
    sizes = (inner, inner, states, states, heads)
    parts = (Part(role, size) for role, size in zip(SSM_ROLES, sizes, strict=True))
    yield site.linear("in_proj", *parts, column_norm=norms.before)
    # The gated norm on the mixer's output, which Falcon-H1 can switch off.
    yield site.whole("out_proj", "ssm-out", norms.after, column_norm=site.norm("norm"))
