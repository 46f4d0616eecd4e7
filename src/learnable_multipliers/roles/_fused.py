"""Row layouts of fused matrices that are known exactly, by the class that reads them.

A weight's shape does not show whether `qkv` is [q | k | v] or interleaved by head, and both are in
use. A class is listed here after reading its forward pass; a fused matrix of any other
class is reported as unknown, and a rule with `split=` describes it. A class whose name many use
for layouts of their own is listed with the Python module that defines it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from learnable_multipliers._names import children, class_of
from learnable_multipliers.roles._tree import class_path, features

QKV = ("query", "key", "value")


@dataclass(frozen=True)
class FusedLayout:
    """Roles and sizes of the blocks in one repeat of the row pattern."""

    parts: tuple[tuple[str, int], ...]
    repeats: int = 1

    @property
    def num_rows(self) -> int:
        """Rows the layout covers."""
        return self.repeats * sum(size for _, size in self.parts)


Reader = Callable[[Any, int], FusedLayout | None]
"""From the module that owns a fused matrix, and its number of rows, to the layout of the rows."""


def known_layout(owner: nn.Module, leaf: str) -> FusedLayout | None:
    """Return the layout of `owner`'s fused matrix `leaf`, None where it is not known."""
    names = (class_path(owner), class_of(owner).__name__)
    read = next((KNOWN[name, leaf] for name in names if (name, leaf) in KNOWN), None)
    return None if read is None else read(owner, features(children(owner)[leaf])[0])


def _evenly(*roles: str) -> Reader:
    """Whole blocks of one size, one after the other."""
    return lambda _, rows: FusedLayout(tuple((role, rows // len(roles)) for role in roles))


def _qkv(query: int, key_value: int, repeats: int = 1) -> FusedLayout:
    return FusedLayout((("query", query), ("key", key_value), ("value", key_value)), repeats)


def _by_head(owner: Any, rows: int) -> FusedLayout:
    """[head, (q, k, v), head_dim]: Bloom, Persimmon."""
    num_heads = getattr(owner, "num_heads", None) or owner.num_attention_heads
    head_dim = rows // (3 * num_heads)
    return _qkv(head_dim, head_dim, num_heads)


def _neox(owner: Any, rows: int) -> FusedLayout:
    return _qkv(owner.head_size, owner.head_size, rows // (3 * owner.head_size))


def _phi3(owner: Any, rows: int) -> FusedLayout:
    key_value = owner.num_key_value_heads * owner.head_dim
    return _qkv(rows - 2 * key_value, key_value)


def _falcon(owner: Any, _: int) -> FusedLayout:
    if owner.new_decoder_architecture:
        groups = owner.num_kv_heads
        return _qkv(owner.num_heads // groups * owner.head_dim, owner.head_dim, groups)
    if owner.multi_query:
        return _qkv(owner.num_heads * owner.head_dim, owner.head_dim)
    return _qkv(owner.head_dim, owner.head_dim, owner.num_heads)


def _gpt2(owner: Any, rows: int) -> FusedLayout | None:
    # Cross-attention keeps queries apart, in `q_attn`.
    roles = QKV[1:] if owner.is_cross_attention else QKV
    return _evenly(*roles)(owner, rows)


def _bigcode(owner: Any, _: int) -> FusedLayout | None:
    if owner.is_cross_attention:
        return None
    if owner.multi_query:
        return _qkv(owner.embed_dim, owner.kv_dim)
    return _qkv(owner.head_dim, owner.head_dim, owner.num_heads)


def _codegen(_: Any, rows: int) -> FusedLayout:
    # Rows keep the order of the four tensor-parallel shards the model was trained on.
    part = rows // 12
    return FusedLayout((("query", part), ("value", part), ("key", part)), repeats=4)


def _litgpt(owner: Any, _: int) -> FusedLayout | None:
    sizes = _sizes(getattr(owner, "config", None), "n_head", "n_query_groups", "head_size")
    if sizes is None:
        return None
    num_heads, groups, head_dim = sizes
    return _qkv(num_heads * head_dim, groups * head_dim)


def _torchtitan(owner: Any, rows: int) -> FusedLayout | None:
    """[key head, (its q heads, k, v), head_dim]."""
    sizes = _sizes(owner, "heads_per_kv", "head_dim")
    if sizes is None:
        return None
    heads_per_key, head_dim = sizes
    return _qkv(heads_per_key * head_dim, head_dim, rows // ((heads_per_key + 2) * head_dim))


def _timm(owner: Any, _: int) -> FusedLayout | None:
    """[(q, k, v), head, head_dim]."""
    sizes = _sizes(owner, "num_heads", "head_dim")
    return None if sizes is None else _qkv(sizes[0] * sizes[1], sizes[0] * sizes[1])


def _timm_gated(owner: Any, rows: int) -> FusedLayout | None:
    last = getattr(owner, "gate_last", None)
    if not isinstance(last, bool):
        return None
    return _evenly(*(("up", "gate") if last else ("gate", "up")))(owner, rows)


def _sizes(holder: Any, *names: str) -> list[int] | None:
    """Return the sizes an object keeps under `names`; None if one is missing or not a size."""
    values = [getattr(holder, name, None) for name in names]
    sizes = [size for size in values if isinstance(size, int) and size > 0]
    return sizes if len(sizes) == len(names) else None


_GATE_UP = _evenly("gate", "up")

KNOWN: dict[tuple[str, str], Reader] = {
    ("BloomAttention", "query_key_value"): _by_head,
    ("CodeGenAttention", "qkv_proj"): _codegen,
    # nanoGPT's.
    ("CausalSelfAttention", "c_attn"): _evenly(*QKV),
    ("CausalSelfAttention", "qkv"): _litgpt,
    ("FalconAttention", "query_key_value"): _falcon,
    ("FusedQKVLinear", "wqkv"): _torchtitan,
    ("GPT2Attention", "c_attn"): _gpt2,
    ("GPTBigCodeAttention", "c_attn"): _bigcode,
    ("GPTNeoXAttention", "query_key_value"): _neox,
    ("GPTNeoXJapaneseAttention", "query_key_value"): _neox,
    ("MptAttention", "Wqkv"): _evenly(*QKV),
    ("PersimmonAttention", "query_key_value"): _by_head,
    ("Phi3Attention", "qkv_proj"): _phi3,
    ("Phi4MultimodalAttention", "qkv_proj"): _phi3,
    ("Glm4MLP", "gate_up_proj"): _GATE_UP,
    ("GlmMLP", "gate_up_proj"): _GATE_UP,
    ("GraniteMoeSWAMLP", "input_linear"): _GATE_UP,
    ("GraniteMoeSharedMLP", "input_linear"): _GATE_UP,
    ("GraniteMoeHybridMLP", "input_linear"): _GATE_UP,
    ("ModernBertDecoderMLP", "Wi"): _GATE_UP,
    ("Phi3MLP", "gate_up_proj"): _GATE_UP,
    ("Phi4MultimodalMLP", "gate_up_proj"): _GATE_UP,
    ("timm.layers.attention.Attention", "qkv"): _timm,
    ("timm.layers.attention.AttentionRope", "qkv"): _timm,
    # Where timm kept its attention before.
    ("timm.models.vision_transformer.Attention", "qkv"): _timm,
    ("timm.layers.mlp.GluMlp", "fc1"): _timm_gated,
}
