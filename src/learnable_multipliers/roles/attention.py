"""Recognizes attention: separate or fused q, k, v, latent attention, and the output matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from learnable_multipliers.roles.fused import QKV, known_layout
from learnable_multipliers.roles.layers import features, has_inner_norm, has_learnable_norm
from learnable_multipliers.roles.reading import UNKNOWN, Part, Reading
from learnable_multipliers.roles.tree import Norms, Site

# Names by role. A name counts only beside the rest of its group.
_NAMES = {
    "query": ("q_proj", "wq", "Wq", "to_q", "q", "query", "q_lin", "query_proj", "project_q"),
    "key": ("k_proj", "wk", "Wk", "to_k", "k", "key", "k_lin", "key_proj", "project_k"),
    "value": ("v_proj", "wv", "Wv", "to_v", "v", "value", "v_lin", "value_proj", "project_v"),
}
_OUT = (
    "o_proj",
    "wo",
    "Wo",
    "to_out",
    "out_proj",
    "c_proj",
    "dense",
    "o",
    "out_lin",
    "attention_out",
    "out",
    "proj",
)
_NORMS = {
    "query": ("q_norm", "q_layernorm", "query_norm", "query_layernorm", "norm_q", "q_ln"),
    "key": ("k_norm", "k_layernorm", "key_norm", "key_layernorm", "norm_k", "k_ln"),
    "value": ("v_norm", "value_norm", "norm_v"),
}
QK_NORM = (
    "Query and key norms follow their projections: their weights scale those rows, and no scale "
    "of Q or K itself reaches the attention logits."
)


def attention(site: Site) -> Iterator[Reading]:
    """Read an attention block: its projections, then the matrix that reads the heads."""
    if not _is_softmax_attention(site):
        return
    out = _only(site, _OUT)
    norms = site.norms("attention")
    inputs = [*_separate(site, norms, out), *_fused(site, norms), *_latent(site, norms)]
    yield from inputs
    if out is None or not inputs:
        return
    inner = has_inner_norm(site.module, site.linears[out], sum(_NORMS.values(), ()))
    part = Part("attention-out", features(site.linears[out])[0], rows_normed=norms.after)
    yield site.linear(out, part, columns_normed=inner)


def torch_attention(site: Site) -> Iterator[Reading]:
    """Read `torch.nn.MultiheadAttention`, whose fused layout is torch's own contract."""
    module = site.module
    if not isinstance(module, nn.MultiheadAttention):
        return
    norms = site.norms("attention")
    width = module.embed_dim
    fused = module.in_proj_weight is not None
    groups = {"in_proj_weight": QKV} if fused else {f"{r[0]}_proj_weight": (r,) for r in QKV}
    for leaf, roles in groups.items():
        yield Reading(
            name=site.path(leaf),
            shape=tuple(module.get_parameter(leaf).shape),
            parts=tuple(Part(role, width) for role in roles),
            columns_normed=norms.before,
            note="torch.nn.MultiheadAttention",
        )
    yield site.linear("out_proj", Part("attention-out", width, rows_normed=norms.after))


def bert_layer(site: Site) -> Iterator[Reading]:
    """Read the layer BERT and its descendants share: dense layers in modules of their own."""
    inside = dict(site.module.named_modules())
    roles = {
        "attention.output.dense": "attention-out",
        "intermediate.dense": "ungated-up",
        "output.dense": "down",
    }
    if not {"attention.self.query", *roles} <= inside.keys():
        return
    for path, role in roles.items():
        part = Part(role, features(inside[path])[0])
        # Post-norm: the attention block's norm feeds the MLP.
        yield site.linear(path, part, columns_normed=role == "ungated-up")


def _separate(site: Site, norms: Norms, out: str | None) -> Iterator[Reading]:
    leaves = {role: _only(site, names) for role, names in _NAMES.items()}
    query = leaves["query"]
    if query is None:
        return
    if leaves["key"] is None or leaves["value"] is None:
        # Latent attention with a full-rank query has no k and v beside it.
        if "kv_b_proj" in site.linears:
            part = Part("query", features(site.linears[query])[0], _normed(site, "query"))
            yield site.linear(query, part, columns_normed=norms.before)
        return
    for role, leaf in leaves.items():
        assert leaf is not None
        rows, _ = features(site.linears[leaf])
        note = None
        if role == "query" and out is not None and rows != features(site.linears[out])[1]:
            role = UNKNOWN
            read = features(site.linears[out])[1]
            note = f"{rows} rows, but {out} reads {read}: queries may be fused with more"
        part = Part(role, rows, rows_normed=_normed(site, role))
        yield site.linear(leaf, part, columns_normed=norms.before, note=note)


def _fused(site: Site, norms: Norms) -> Iterator[Reading]:
    for leaf, linear in site.linears.items():
        layout = known_layout(site.module, leaf)
        if layout is None or layout.parts[0][0] not in QKV:
            continue
        rows, _ = features(linear)
        if layout.num_rows != rows:
            note = f"{rows} rows do not fit the layout known for {type(site.module).__name__}"
            yield site.linear(leaf, Part(UNKNOWN, rows), columns_normed=norms.before, note=note)
            continue
        parts = (Part(role, size, _normed(site, role)) for role, size in layout.parts)
        yield site.linear(leaf, *parts, columns_normed=norms.before, repeats=layout.repeats)
        if leaf == "c_attn" and "q_attn" in site.linears:
            # GPT-2's cross-attention keeps its queries apart.
            part = Part("query", features(site.linears["q_attn"])[0])
            yield site.linear("q_attn", part, columns_normed=norms.before)


def _latent(site: Site, norms: Norms) -> Iterator[Reading]:
    """Read multi-head latent attention, by the names and attributes DeepSeek gave it."""
    linears = site.linears
    if not {"kv_a_proj_with_mqa", "kv_b_proj"} <= linears.keys():
        return
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent, rope, nope, value = (getattr(site.module, size, 0) for size in sizes)
    rows_down, rows_up = (
        features(linears[leaf])[0] for leaf in ("kv_a_proj_with_mqa", "kv_b_proj")
    )
    if rows_down != latent + rope or nope + value == 0 or rows_up % (nope + value):
        return
    normed = has_learnable_norm(site.module, ("kv_a_layernorm",))
    parts = (Part("kv-latent", latent, rows_normed=normed), Part("key", rope))
    yield site.linear("kv_a_proj_with_mqa", *parts, columns_normed=norms.before)
    parts = (Part("key", nope), Part("value", value))
    repeats = rows_up // (nope + value)
    yield site.linear("kv_b_proj", *parts, columns_normed=normed, repeats=repeats)
    if {"q_a_proj", "q_b_proj"} <= linears.keys():
        normed = has_learnable_norm(site.module, ("q_a_layernorm",))
        part = Part("query-latent", features(linears["q_a_proj"])[0], rows_normed=normed)
        yield site.linear("q_a_proj", part, columns_normed=norms.before)
        part = Part("query", features(linears["q_b_proj"])[0])
        yield site.linear("q_b_proj", part, columns_normed=normed)


def _is_softmax_attention(site: Site) -> bool:
    module = site.module
    if isinstance(module, nn.MultiheadAttention):
        return False
    # In a list of blocks, the list carries the telling name.
    path = [part for part in site.name.split(".") if not part.isdigit()]
    label = f"{path[-1] if path else ''} {type(module).__name__}"
    if not re.search(r"att(entio)?n|mha", label, re.IGNORECASE):
        return False
    # Linear-attention cousins convolve and decay q, k, v: other symmetries hold there.
    decays = any(re.search(r"A_log|dt_bias", name) for name, _ in module.named_parameters())
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return not decays and not convolves


def _only(site: Site, names: tuple[str, ...]) -> str | None:
    present = [name for name in names if name in site.linears]
    return present[0] if len(present) == 1 else None


def _normed(site: Site, role: str) -> bool:
    normed = role in _NORMS and has_learnable_norm(site.module, _NORMS[role])
    if normed and role != "value":
        site.tree.assume(QK_NORM)
    return normed
