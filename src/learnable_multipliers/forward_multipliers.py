"""Fixed forward multipliers that a model brings along: muP factors in its forward pass.

Falcon-H1 multiplies activations by constants from its config. Learned multipliers can start at
those values and the constants become 1; this module knows where the constants live, which
matrices each acts on, and how to reset it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from learnable_multipliers.names import canonical_name, unwrap

SSM_ROLES = ("ssm-z", "ssm-x", "ssm-B", "ssm-C", "ssm-dt")


@dataclass(frozen=True)
class FixedMultiplier:
    """One constant of a model's forward pass."""

    field: str
    """Its name in the model's config."""
    value: float
    targets: tuple[tuple[str, str], ...]
    """The logical matrices it scales: (parameter name, role)."""
    scales_bias: bool
    """True on a matrix's output; a constant on its input leaves the bias alone."""
    reset: Callable[[], None]
    """Set the constant to 1, in the modules and in the config."""


def fixed_multipliers(model: nn.Module) -> tuple[FixedMultiplier, ...]:
    """Return the constants of `model` that are known and not 1."""
    found = []
    for name, module in unwrap(model).named_modules():
        if type(module).__name__ == "FalconH1ForCausalLM":
            found += _falcon_h1(canonical_name(name), module)
    return tuple(multiplier for multiplier in found if multiplier.value != 1.0)


def _falcon_h1(name: str, model: Any) -> Iterator[FixedMultiplier]:
    """Read a Hugging Face `FalconH1ForCausalLM`."""
    config, decoder = model.config, model.model
    root = f"{name}." if name else ""
    layers = [(f"{root}model.layers.{i}", layer) for i, layer in enumerate(decoder.layers)]

    def fixed(
        field: str, holders: list[tuple[Any, str]], targets: list[tuple[str, str]], bias: bool
    ) -> FixedMultiplier:
        def reset() -> None:
            for holder, attribute in holders:
                setattr(holder, attribute, 1.0)
            setattr(config, field, 1.0)

        value = float(getattr(config, field))
        return FixedMultiplier(field, value, tuple(targets), bias, reset)

    def in_layers(path: str, role: str) -> list[tuple[str, str]]:
        return [(f"{layer}.{path}.weight", role) for layer, _ in layers]

    yield fixed(
        "embedding_multiplier",
        [(decoder, "embedding_multiplier")],
        [(f"{root}model.embed_tokens.weight", "embedding")],
        False,
    )
    yield fixed(
        "lm_head_multiplier",
        [(decoder, "lm_head_multiplier")],
        [(f"{root}lm_head.weight", "head")],
        True,
    )
    yield fixed(
        "attention_in_multiplier",
        [(layer, "attention_in_multiplier") for _, layer in layers],
        [
            *in_layers("self_attn.q_proj", "query"),
            *in_layers("self_attn.k_proj", "key"),
            *in_layers("self_attn.v_proj", "value"),
        ],
        False,
    )
    yield fixed(
        "key_multiplier",
        [(layer.self_attn, "key_multiplier") for _, layer in layers],
        in_layers("self_attn.k_proj", "key"),
        True,
    )
    yield fixed(
        "attention_out_multiplier",
        [(layer, "attn_out_multiplier") for _, layer in layers],
        in_layers("self_attn.o_proj", "attention-out"),
        True,
    )
    yield fixed(
        "ssm_in_multiplier",
        [(layer.mamba, "ssm_in_multiplier") for _, layer in layers],
        [target for role in SSM_ROLES for target in in_layers("mamba.in_proj", role)],
        False,
    )
    yield fixed(
        "ssm_out_multiplier",
        [(layer, "ssm_out_multiplier") for _, layer in layers],
        in_layers("mamba.out_proj", "ssm-out"),
        True,
    )
    for index, (attribute, path, role) in enumerate(
        (
            ("gate_multiplier", "feed_forward.gate_proj", "gate"),
            ("down_multiplier", "feed_forward.down_proj", "down"),
        )
    ):
        yield FixedMultiplier(
            f"mlp_multipliers[{index}]",
            float(config.mlp_multipliers[index]),
            tuple(in_layers(path, role)),
            True,
            lambda attribute=attribute, index=index: _reset_listed(
                config,
                "mlp_multipliers",
                index,
                lambda: [setattr(layer.feed_forward, attribute, 1.0) for _, layer in layers],
            ),
        )
    for index, role in enumerate(SSM_ROLES):
        yield FixedMultiplier(
            f"ssm_multipliers[{index}]",
            float(config.ssm_multipliers[index]),
            tuple(in_layers("mamba.in_proj", role)),
            True,
            lambda index=index: _reset_listed(
                config,
                "ssm_multipliers",
                index,
                lambda: [_reset_mup_vector(layer.mamba, index) for _, layer in layers],
            ),
        )


def _reset_listed(config: Any, field: str, index: int, reset_modules: Callable[[], object]) -> None:
    reset_modules()
    values = list(getattr(config, field))
    values[index] = 1.0
    setattr(config, field, values)


def _reset_mup_vector(mixer: Any, index: int) -> None:
    """Set one block (z, x, B, C, dt) of a mixer's constants to 1."""
    inner, states = mixer.intermediate_size, mixer.groups_time_state_size
    blocks = mixer.mup_vector.split([inner, inner, states, states, mixer.num_heads], -1)
    blocks[index].fill_(1.0)
