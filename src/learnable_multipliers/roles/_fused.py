"""Row layouts of fused matrices that are known exactly, by the class that reads them.

Nothing in a weight's shape tells whether `qkv` is [q | k | v] or interleaved by head, and both
are in use. A class is listed here after reading its forward pass; a fused matrix of any other
class is reported as unknown, and a rule with `split=` describes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Layout:
    """Roles and sizes of the blocks in one repeat of the row pattern."""

    parts: tuple[tuple[str, int], ...]
    repeats: int = 1

    @property
    def num_rows(self) -> int:
        """Rows the layout covers."""
        return self.repeats * sum(size for _, size in self.parts)


def known_layout(owner: nn.Module, leaf: str) -> Layout | None:
    """Return the layout of `owner`'s fused matrix `leaf`, None where it is not known."""
    read = KNOWN.get((type(owner).__name__, leaf))
    return None if read is None else read(owner)


def _split_evenly(roles: tuple[str, ...], leaf: str) -> Callable[[Any], Layout]:
    """Whole blocks of one size, one after the other."""

    def read(owner: Any) -> Layout:
        linear = getattr(owner, leaf)
        # Conv1D of GPT-2 keeps its width in `nf`.
        rows = linear.nf if hasattr(linear, "nf") else linear.weight.shape[0]
        return Layout(tuple((role, rows // len(roles)) for role in roles))

    return read


def _by_head(owner: Any) -> Layout:
    """[head, (q, k, v), head_dim]: GPT-NeoX, Bloom, Persimmon."""
    num_heads = getattr(owner, "num_heads", None) or owner.num_attention_heads
    head_dim = owner.query_key_value.weight.shape[0] // (3 * num_heads)
    return Layout(tuple((role, head_dim) for role in QKV), repeats=num_heads)


def _neox(owner: Any) -> Layout:
    head_size = owner.head_size
    num_heads = owner.query_key_value.weight.shape[0] // (3 * head_size)
    return Layout(tuple((role, head_size) for role in QKV), repeats=num_heads)


def _phi3(owner: Any) -> Layout:
    rows = owner.qkv_proj.weight.shape[0]
    kv = owner.num_key_value_heads * owner.head_dim
    return Layout((("query", rows - 2 * kv), ("key", kv), ("value", kv)))


def _falcon(owner: Any) -> Layout:
    head_dim = owner.head_dim
    if owner.new_decoder_architecture:
        groups = owner.num_kv_heads
        queries = owner.num_heads // groups * head_dim
        return Layout((("query", queries), ("key", head_dim), ("value", head_dim)), groups)
    if owner.multi_query:
        queries = owner.num_heads * head_dim
        return Layout((("query", queries), ("key", head_dim), ("value", head_dim)))
    return Layout(tuple((role, head_dim) for role in QKV), repeats=owner.num_heads)


def _gpt2(owner: Any) -> Layout:
    # Cross-attention keeps queries apart, in `q_attn`.
    roles = QKV[1:] if owner.is_cross_attention else QKV
    return _split_evenly(roles, "c_attn")(owner)


def _bigcode(owner: Any) -> Layout | None:
    if owner.is_cross_attention:
        return None
    if owner.multi_query:
        kv = owner.kv_dim
        return Layout((("query", owner.embed_dim), ("key", kv), ("value", kv)))
    return Layout(tuple((role, owner.head_dim) for role in QKV), repeats=owner.num_heads)


def _codegen(owner: Any) -> Layout:
    # Rows keep the order of the four tensor-parallel shards the model was trained on.
    shards = 4
    part = owner.qkv_proj.weight.shape[0] // (3 * shards)
    return Layout((("query", part), ("value", part), ("key", part)), repeats=shards)


_GATE_UP = ("gate", "up")

KNOWN: dict[tuple[str, str], Callable[[Any], Layout | None]] = {
    ("BloomAttention", "query_key_value"): _by_head,
    ("CodeGenAttention", "qkv_proj"): _codegen,
    # nanoGPT's, as copied far and wide.
    ("CausalSelfAttention", "c_attn"): _split_evenly(QKV, "c_attn"),
    ("FalconAttention", "query_key_value"): _falcon,
    ("GPT2Attention", "c_attn"): _gpt2,
    ("GPTBigCodeAttention", "c_attn"): _bigcode,
    ("GPTNeoXAttention", "query_key_value"): _neox,
    ("GPTNeoXJapaneseAttention", "query_key_value"): _neox,
    ("MptAttention", "Wqkv"): _split_evenly(QKV, "Wqkv"),
    ("PersimmonAttention", "query_key_value"): _by_head,
    ("Phi3Attention", "qkv_proj"): _phi3,
    ("Phi4MultimodalAttention", "qkv_proj"): _phi3,
    ("Glm4MLP", "gate_up_proj"): _split_evenly(_GATE_UP, "gate_up_proj"),
    ("GlmMLP", "gate_up_proj"): _split_evenly(_GATE_UP, "gate_up_proj"),
    ("GraniteMoeSWAMLP", "input_linear"): _split_evenly(_GATE_UP, "input_linear"),
    ("GraniteMoeSharedMLP", "input_linear"): _split_evenly(_GATE_UP, "input_linear"),
    ("GraniteMoeHybridMLP", "input_linear"): _split_evenly(_GATE_UP, "input_linear"),
    ("ModernBertDecoderMLP", "Wi"): _split_evenly(_GATE_UP, "Wi"),
    ("Phi3MLP", "gate_up_proj"): _split_evenly(_GATE_UP, "gate_up_proj"),
    ("Phi4MultimodalMLP", "gate_up_proj"): _split_evenly(_GATE_UP, "gate_up_proj"),
}
