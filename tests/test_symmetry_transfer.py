"""Symmetries found through a small proxy are those found on the model itself."""

import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.symmetry._proxy import make_proxy
from learnable_multipliers.symmetry._transfer import Pattern, describe, resized_patterns
from test_symmetry import canonical, families_of

# Patterns


@st.composite
def patterns(draw) -> Pattern:
    """A pattern as `describe` writes it: no dimension of size 1, neighbours of different uses."""
    sizes, uses = [], []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(2, 5))
        places = [str(place) for place in range(size)] if size <= 4 else []
        choices = [
            use for use in ("member", "free", *places) if use.isdigit() or use not in uses[-1:]
        ]
        sizes.append(size)
        uses.append(draw(st.sampled_from(choices)))
    return Pattern(tuple(sizes), tuple(uses))


@given(patterns())
def test_a_pattern_is_found_again_from_its_members(pattern):
    description = describe(pattern.members())
    assert description is not None
    assert torch.equal(description.members(), pattern.members())
    # Never told in a longer way than it was made.
    assert len(description.sizes) <= len(pattern.sizes)


@given(patterns())
def test_a_pattern_at_its_own_length_is_among_those_it_can_have(pattern):
    members = pattern.members()
    fitted = [p.members() for (p,) in resized_patterns([pattern], [len(members)])]
    assert any(torch.equal(members, other) for other in fitted)


def test_what_is_no_pattern_is_not_described():
    for members in ([0, 1, 1, 0], [0, 0, 1], [0, 1, -1, -1, 2]):
        assert describe(torch.tensor(members)) is None


def rotary_pairs(heads: int, shared: int, head_dim: int) -> tuple[list[int], list[int]]:
    """Members of the rows of queries and keys: channels i and i + head_dim / 2 of a key head."""
    half = head_dim // 2
    keys = [head * half + i % half for head in range(heads) for i in range(head_dim)]
    queries = [
        head // shared * half + i % half for head in range(heads * shared) for i in range(head_dim)
    ]
    return queries, keys


def grouped_values(heads: int, shared: int, head_dim: int) -> tuple[list[int], list[int]]:
    """Members of the columns of attention-out and the rows of values."""
    columns = [
        head // shared * head_dim + i for head in range(heads * shared) for i in range(head_dim)
    ]
    return columns, list(range(heads * head_dim))


def third(place: int, width: int) -> list[int]:
    """Members of one of three fused matrices."""
    return [i - place * width if i // width == place else -1 for i in range(3 * width)]


def fused_queries_and_keys(width: int, _: int, __: int) -> tuple[list[int], ...]:
    return third(0, width), third(1, width)


def ups_of_experts(experts: int, _: int, hidden: int) -> tuple[list[int], list[int]]:
    """Members of the rows of gate and up in one stack, and of the columns of down."""
    rows = [
        expert * hidden + i - hidden if i >= hidden else -1
        for expert in range(experts)
        for i in range(2 * hidden)
    ]
    return rows, list(range(experts * hidden))


def interleaved_values(heads: int, _: int, head_dim: int) -> tuple[list[int], list[int]]:
    """Members of the rows of query, key and value head by head, and of what reads the values."""
    rows = [
        head * head_dim + i if part == 2 else -1
        for head in range(heads)
        for part in range(3)
        for i in range(head_dim)
    ]
    return rows, list(range(heads * head_dim))


@pytest.mark.parametrize(
    ("layout", "small", "large"),
    [
        (rotary_pairs, (2, 3, 6), (4, 2, 16)),
        (rotary_pairs, (3, 1, 6), (8, 1, 32)),
        (rotary_pairs, (2, 3, 6), (2, 8, 64)),
        (grouped_values, (2, 3, 6), (4, 2, 16)),
        (grouped_values, (2, 3, 6), (8, 4, 32)),
        (fused_queries_and_keys, (18, 0, 0), (64, 0, 0)),
        (ups_of_experts, (3, 0, 7), (8, 0, 24)),
        (interleaved_values, (3, 0, 6), (8, 0, 16)),
    ],
)
def test_a_pattern_at_another_size_is_among_those_guessed(layout, small, large):
    known = [describe(torch.tensor(members)) for members in layout(*small)]
    assert None not in known
    wanted = [torch.tensor(members) for members in layout(*large)]
    guesses = list(resized_patterns(known, [len(members) for members in wanted]))
    right = [
        guess
        for guess in guesses
        if all(torch.equal(p.members(), w) for p, w in zip(guess, wanted, strict=True))
    ]
    assert right
    # Few enough to try each.
    assert len(guesses) < 200
    for guess in guesses:
        assert len({math.prod(pattern.member_sizes) for pattern in guess}) == 1


# The same symmetries through a proxy as without

OURS = ModelConfig(
    vocab_size=19,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=10,
)
HYBRID = replace(
    OURS, num_layers=2, ssm_size=18, ssm_head_dim=6, ssm_state_size=6, ssm_chunk_size=8
)
CONFIGS = {
    "our llama": OURS,
    "our tied llama": replace(OURS, tie_embeddings=True, num_kv_heads=4),
    "our hybrid": HYBRID,
    "our mamba in groups": replace(
        HYBRID, num_heads=0, intermediate_size=0, ssm_size=24, ssm_groups=2, ssm_norm=True
    ),
    "our mamba": replace(HYBRID, num_heads=0, intermediate_size=0, num_layers=3, ssm_norm=True),
}
_HF = {
    "vocab_size": 19,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_TWO = {**_HF, "num_hidden_layers": 2}
FAMILIES = {
    "llama": _HF,
    "qwen3": _TWO,
    "gemma2": _TWO,
    "mixtral": {**_TWO, "num_local_experts": 5},
    "falcon-h1": {
        **_TWO,
        "num_hidden_layers": 1,
        "mamba_d_ssm": 24,
        "mamba_n_heads": 4,
        "mamba_d_head": 6,
        "mamba_d_state": 6,
    },
    "gpt2": {
        "vocab_size": 19,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 10,
        "n_positions": 18,
    },
}


def build(architecture: str) -> nn.Module:
    if architecture in CONFIGS:
        return HybridLM(CONFIGS[architecture])
    pytest.importorskip("transformers")
    import families

    return families.build(architecture, **FAMILIES[architecture])


def planned(model: nn.Module, placement: str | None) -> lrm.Plan | None:
    return None if placement is None else lrm.plan(model, placement)


CASES = [
    ("our llama", None),
    ("our llama", "full"),
    ("our llama", "symmetry-aware"),
    ("our tied llama", "full"),
    ("our hybrid", "full"),
    ("our mamba", "symmetry-aware"),
    ("our mamba in groups", "full"),
    ("llama", "symmetry-aware"),
    ("qwen3", None),
    ("gemma2", "symmetry-aware"),
    ("mixtral", "symmetry-aware"),
    ("falcon-h1", "symmetry-aware"),
    ("gpt2", None),
    ("gpt2", "symmetry-aware"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "placement"), CASES)
def test_a_proxy_gives_the_symmetries_of_the_model_itself(architecture, placement):
    model = build(architecture)
    proxy = make_proxy(model)
    sizes, small = dict(model.named_parameters()), dict(proxy.named_parameters())
    assert any(sizes[name].shape != small[name].shape for name in sizes.keys() & small.keys())
    plan = planned(model, placement)
    through = lrm.find_symmetries(model, plan, proxy=proxy)
    itself = lrm.find_symmetries(model, plan, proxy=None)
    assert canonical(families_of(through)) == canonical(families_of(itself))
    assert through.nullity == itself.nullity
    assert through.unconfirmed == ()


@pytest.mark.slow
def test_a_proxy_is_used_by_default_where_the_model_is_large():
    large = HybridLM(replace(OURS, vocab_size=3000, hidden_size=24, num_layers=1))
    symmetries = lrm.find_symmetries(large, lrm.plan(large, "symmetry-aware"), proxy="auto")
    # Exchanges of embedding, attention-out and down; two norms; the residual stream.
    assert symmetries.nullity == len(symmetries) == 6
    assert symmetries.unconfirmed == ()


# What a proxy cannot show


class Attention(nn.Module):
    """Attention without softmax, with or without norms on queries and keys."""

    def __init__(self, width: int, norms: bool):
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 3, bias=False)
        self.norms = norms
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if self.norms:
            q, k = (nn.functional.rms_norm(y, y.shape[-1:]) for y in (q, k))
        return self.out(torch.tanh(q @ k.mT) @ (x * self.scale))


class Tokens(nn.Module):
    def __init__(self, width: int, norms: bool):
        super().__init__()
        self.tokens = nn.Embedding(9, width)
        self.attention = Attention(width, norms)

    def forward(self, ids):
        return self.attention(self.tokens(ids))


def test_a_wrong_proxy_confirms_nothing_wrong_and_lists_what_is_open():
    model, wrong = Tokens(6, norms=False), Tokens(4, norms=True)
    through = lrm.find_symmetries(model, None, proxy=wrong)
    itself = canonical(families_of(lrm.find_symmetries(model, None, proxy=None)))
    assert canonical(families_of(through)) <= itself
    # With norms, queries and keys have no scale of their own; without, only their product has.
    for leaf in "qk":
        words = f"rows of attention.{leaf}, as a whole (normalization)"
        assert words in through.unconfirmed
        assert words in str(through)
    assert "the list may be incomplete" in str(through)

    right = lrm.find_symmetries(model, None, proxy=Tokens(4, norms=False))
    assert canonical(families_of(right)) == itself
    assert right.unconfirmed == ()
    assert "incomplete" not in str(right)


def test_a_proxy_with_norms_on_queries_and_keys_misleads_no_llama():
    pytest.importorskip("transformers")
    import families

    sizes = {**_HF, "num_hidden_layers": 1}
    model = families.build("llama", **sizes)
    wrong = families.build("qwen3", **{**sizes, "hidden_size": 8, "head_dim": 4, "vocab_size": 13})
    plan = lrm.plan(model, "full")
    through = lrm.find_symmetries(model, plan, proxy=wrong)
    itself = canonical(families_of(lrm.find_symmetries(model, plan, proxy=None)))
    assert canonical(families_of(through)) < itself
    q = "model.layers.0.self_attn.q_proj"
    assert any(words.startswith(f"rows of {q}, in 4 sets of 4") for words in through.unconfirmed)


def test_a_proxy_has_no_part_that_its_model_leaves_out():
    for architecture, config in CONFIGS.items():
        proxy = make_proxy(HybridLM(config)).config
        for part in ("has_attention", "has_ssm", "has_mlp", "tie_embeddings", "ssm_norm"):
            assert getattr(proxy, part) == getattr(config, part), architecture
        assert proxy.num_layers == 2
        assert (proxy.num_heads == proxy.num_kv_heads) == (config.num_heads == config.num_kv_heads)
    assert make_proxy(HybridLM(replace(OURS, num_layers=1))).config.num_layers == 1


def test_a_model_without_config_raises_with_a_remedy():
    with pytest.raises(ValueError, match="Tokens has no config") as error:
        make_proxy(Tokens(4, norms=False))
    assert "make a small model of the same architecture yourself" in str(error.value)
    assert "proxy=None" in str(error.value)
    # Large, and so searched through a proxy: refused, not searched for hours.
    with pytest.raises(ValueError, match="has no config"):
        lrm.find_symmetries(nn.Embedding(5000, 8), None, torch.arange(9))


class Stubborn(nn.Linear):
    def __init__(self, config: ModelConfig):
        if config.hidden_size < 64:
            raise RuntimeError("too narrow for this")
        super().__init__(config.hidden_size, config.hidden_size)
        self.config = config


def test_a_model_that_cannot_be_small_raises_with_the_reason():
    with pytest.raises(ValueError, match="RuntimeError: too narrow for this.*proxy=None"):
        make_proxy(Stubborn(ModelConfig()))


@pytest.mark.slow
def test_finding_the_symmetries_of_the_tiny_preset_takes_half_a_minute_at_most():
    model = HybridLM(PRESETS["tiny"])
    plan = lrm.plan(model, "full")
    start = time.process_time()
    symmetries = lrm.find_symmetries(model, plan)
    assert time.process_time() - start < 30
    assert symmetries.unconfirmed == ()
    # By layer: gate, up, down, in_proj, ssm-out, q, k, v and attention-out trade rows for columns
    # (9); two norms feed columns (2 * 128); up-down (320), q-k in pairs (2 * 16), v-out (2 * 32),
    # and conv1d against x, B and C (192 + 16 + 16). With the embedding and the residual stream:
    layer = 9 + 2 * 128 + 320 + 32 + 64 + 224
    extra = symmetries.nullity - 2 * layer - 2
    assert extra == 0, str(symmetries)
