"""Which matrices each fixed factor of the forward pass acts on."""

from __future__ import annotations

from learnable_multipliers._forward_multipliers import SSM_ROLES
from learnable_multipliers.pretrain.model.config import ModelConfig

_IN_LAYERS: dict[str, tuple[tuple[str, str], ...]] = {
    "mup_attention_in": (
        ("self_attn.q_proj", "query"),
        ("self_attn.k_proj", "key"),
        ("self_attn.v_proj", "value"),
    ),
    "mup_key": (("self_attn.k_proj", "key"),),
    "mup_attention_out": (("self_attn.o_proj", "attention-out"),),
    "mup_ssm_in": tuple(("mamba.in_proj", role) for role in SSM_ROLES),
    **{f"mup_{role.removeprefix('ssm-')}": (("mamba.in_proj", role),) for role in SSM_ROLES},
    "mup_ssm_out": (("mamba.out_proj", "ssm-out"),),
    "mup_gate": (("feed_forward.gate_proj", "gate"),),
    "mup_down": (("feed_forward.down_proj", "down"),),
}
_ELSEWHERE = {
    "mup_embedding": (("model.embed_tokens.weight", "embedding"),),
    "mup_head": (("lm_head.weight", "head"),),
}
_PRESENT = {"self_attn": "has_attention", "mamba": "has_ssm", "feed_forward": "has_mlp"}


def targets(field: str, config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Return the matrices that a factor scales: (parameter name, role)."""
    if field in _ELSEWHERE:
        return _ELSEWHERE[field]
    return tuple(
        (f"model.layers.{layer}.{path}.weight", role)
        for layer in range(config.num_layers)
        for path, role in _IN_LAYERS[field]
        if getattr(config, _PRESENT[path.partition(".")[0]])
    )
