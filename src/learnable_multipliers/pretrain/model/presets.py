"""Named model shapes."""

from __future__ import annotations

from dataclasses import replace

from learnable_multipliers.mup import FalconH1Shape, falcon_h1_multipliers
from learnable_multipliers.pretrain.model.config import ModelConfig


def with_falcon_h1_multipliers(config: ModelConfig) -> ModelConfig:
    """Return a shape with the forward multipliers that Falcon-H1's width rules give it."""
    shape = FalconH1Shape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        attention_size=config.num_heads * config.head_dim,
        head_dim=config.head_dim,
        ssm_size=config.ssm_size,
        ssm_state_size=config.ssm_state_size,
    )
    return replace(config, **falcon_h1_multipliers(shape))


_TINY = ModelConfig(
    vocab_size=1024,
    hidden_size=128,
    num_layers=2,
    max_length=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=320,
    ssm_size=192,
    ssm_head_dim=32,
    ssm_state_size=16,
    ssm_chunk_size=32,
)
# 20 M parameters; the vocabulary has room for 16k tokens and some special ones.
_20M = ModelConfig(
    vocab_size=16448,
    hidden_size=320,
    num_layers=8,
    max_length=2048,
    num_heads=5,
    num_kv_heads=1,
    head_dim=64,
    intermediate_size=640,
    ssm_size=448,
    ssm_head_dim=64,
    ssm_state_size=64,
)
# The shape of Falcon-H1-Tiny-90M, tied: facts about it are public, its vocabulary is 32,768.
_90M = ModelConfig(
    vocab_size=32768,
    hidden_size=512,
    num_layers=24,
    max_length=2048,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e11,
    intermediate_size=768,
    ssm_size=768,
    ssm_head_dim=32,
    ssm_state_size=64,
    tie_embeddings=True,
)
# Falcon-H1-0.5B: 521,411,104 parameters. All sizes have the forward multipliers of their shape.
_FALCON_H1 = ModelConfig(
    vocab_size=32784,
    hidden_size=1024,
    num_layers=36,
    max_length=16384,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e11,
    intermediate_size=2048,
    ssm_size=1536,
    ssm_head_dim=64,
    ssm_state_size=128,
)
_FALCON_H1_1_5B = replace(
    _FALCON_H1,
    vocab_size=65537,
    hidden_size=2048,
    num_layers=24,
    max_length=131072,
    head_dim=128,
    intermediate_size=4608,
    ssm_size=3072,
    ssm_state_size=256,
)
_FALCON_H1_3B = replace(
    _FALCON_H1_1_5B,
    hidden_size=2560,
    num_layers=32,
    num_heads=10,
    intermediate_size=6144,
    ssm_size=4096,
    ssm_head_dim=128,
)
# Wide and shallow like the small Llamas: less attention and fewer norms for the same parameters.
_LLAMA = ModelConfig(
    vocab_size=32784,
    hidden_size=1536,
    num_layers=16,
    max_length=16384,
    num_heads=12,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=5e5,
    intermediate_size=4096,
)

PRESETS: dict[str, ModelConfig] = {
    "tiny": _TINY,
    "tiny-llama": replace(_TINY, ssm_size=0, intermediate_size=512),
    "20m": _20M,
    "20m-llama": replace(_20M, ssm_size=0, num_kv_heads=5, intermediate_size=1024),
    "90m": _90M,
    "falcon-h1-0.5b": with_falcon_h1_multipliers(_FALCON_H1),
    "falcon-h1-1.5b": with_falcon_h1_multipliers(_FALCON_H1_1_5B),
    "falcon-h1-3b": with_falcon_h1_multipliers(_FALCON_H1_3B),
    "llama-0.5b": _LLAMA,
}
