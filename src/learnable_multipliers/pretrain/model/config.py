"""The shape of a model: one description for hybrids, Llamas and pure state-space models."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

MAX_LAYERS = 1000
"""Maximum layers of a model, since the plan treats each layer separately."""
_MAX_PARAMETERS = 10**15
_TINY = 2.0**-126
"""Smallest normal number of float32."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Falcon-H1 hybrid; without its state-space half a Llama, without attention a Mamba-2.

    The `mup_*` factors are fixed numbers in the forward pass (muP), never learned; all 1 for a
    Llama.
    """

    vocab_size: int = 4096
    """Tokens in the vocabulary; 0 is that of the data's tokenizer, up to a multiple of 64."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 2
    """Layers of mixers and MLP."""
    max_length: int = 2048
    """Longest sequence the model is meant for, in tokens; goes into exported configs."""
    num_heads: int = 4
    """Query heads; 0 leaves attention out."""
    num_kv_heads: int = 2
    """Key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = 32
    """Features of a head; its product with num_heads need not be hidden_size."""
    rope_theta: float = 1e4
    """Base of the rotary frequencies (Falcon-H1: 1e11)."""
    intermediate_size: int = 384
    """Width of the gated MLP; 0 leaves it out."""
    ssm_size: int = 0
    """Width inside the Mamba-2 mixer (d_ssm); 0 leaves the mixer out."""
    ssm_head_dim: int = 32
    """Features of a state-space head."""
    ssm_state_size: int = 16
    """States per feature (d_state)."""
    ssm_groups: int = 1
    """Groups of heads that share B and C."""
    ssm_conv_size: int = 4
    """Taps of the causal convolution over x, B and C."""
    ssm_chunk_size: int = 128
    """Tokens in a chunk of the scan. Affects speed only."""
    ssm_norm: bool = False
    """Put the gated RMSNorm on the mixer's output, before its projection."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    freeze_norms: bool = False
    """Keep the weights of the norms in the blocks at 1 (as the paper's width and MLP runs do)."""
    freeze_final_norm: bool = False
    """Keep the weight of the norm in front of the head at 1; with the rule
    '. only=head kind=scalar' it is one learned number."""
    tie_embeddings: bool = False
    """Use one matrix as embedding and head."""
    init_std: float = 0.02
    """Standard deviation of matrices at the start."""
    embedding_std: float = 0.0
    """Standard deviation of the embedding at the start, also of the head where the two are tied; 0
    is init_std."""
    mup_embedding: float = 1.0
    """Factor on the embedding's output."""
    mup_head: float = 1.0
    """Factor on the logits."""
    mup_attention_in: float = 1.0
    """Factor on what goes into attention."""
    mup_key: float = 1.0
    """Factor on the keys."""
    mup_attention_out: float = 1.0
    """Factor on what comes out of attention."""
    mup_ssm_in: float = 1.0
    """Factor on what goes into the state-space mixer."""
    mup_z: float = 1.0
    """Factor on the gate of the state-space mixer."""
    mup_x: float = 1.0
    """Factor on the values of the state-space mixer."""
    mup_B: float = 1.0  # noqa: N815 - the paper's name
    """Factor on what writes to the mixer's state."""
    mup_C: float = 1.0  # noqa: N815 - the paper's name
    """Factor on what reads the mixer's state."""
    mup_dt: float = 1.0
    """Factor on the mixer's time steps."""
    mup_ssm_out: float = 1.0
    """Factor on what comes out of the state-space mixer."""
    mup_gate: float = 1.0
    """Factor on the MLP's gate."""
    mup_down: float = 1.0
    """Factor on the MLP's output."""

    @property
    def has_attention(self) -> bool:
        """Whether layers attend."""
        return self.num_heads > 0

    @property
    def has_ssm(self) -> bool:
        """Whether layers hold a state-space mixer."""
        return self.ssm_size > 0

    @property
    def has_mlp(self) -> bool:
        """Whether layers hold an MLP."""
        return self.intermediate_size > 0

    @property
    def num_ssm_heads(self) -> int:
        """Heads of the state-space mixer."""
        return self.ssm_size // self.ssm_head_dim

    @property
    def ssm_block_sizes(self) -> tuple[int, int, int, int, int]:
        """Rows of z, x, B, C and dt in the mixer's input projection."""
        states = self.ssm_groups * self.ssm_state_size
        return self.ssm_size, self.ssm_size, states, states, self.num_ssm_heads

    @property
    def mup_factors(self) -> dict[str, float]:
        """The fixed factors by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("mup_")}

    @property
    def num_parameters(self) -> int:
        """Parameters of such a model, each once; known before it is built."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        layer = hidden
        if self.has_attention:
            layer += 2 * hidden * (heads + self.num_kv_heads * self.head_dim)
        if self.has_ssm:
            channels = sum(self.ssm_block_sizes[1:4])
            layer += hidden * (sum(self.ssm_block_sizes) + self.ssm_size)
            layer += channels * (self.ssm_conv_size + 1) + 3 * self.num_ssm_heads
            layer += self.ssm_size if self.ssm_norm else 0
        if self.has_mlp:
            layer += hidden * (3 * self.intermediate_size + 1)
        embeddings = 1 if self.tie_embeddings else 2
        return embeddings * self.vocab_size * hidden + self.num_layers * layer + hidden

    def check(self) -> None:
        """Raise a ValueError for a shape that cannot be built."""
        least = dict.fromkeys(("vocab_size", "hidden_size", "num_layers", "max_length"), 1)
        least |= dict.fromkeys(("num_heads", "intermediate_size", "ssm_size"), 0)
        if self.has_attention:
            least |= {"num_kv_heads": 1, "head_dim": 2}
        if self.has_ssm:
            least |= dict.fromkeys(("ssm_head_dim", "ssm_groups", "ssm_state_size"), 1)
            least |= dict.fromkeys(("ssm_conv_size", "ssm_chunk_size"), 1)
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(
                    f"model.{name} must be at least {minimum}, got {getattr(self, name)}"
                )
        if self.num_layers > MAX_LAYERS:
            raise ValueError(
                f"model.num_layers must be at most {MAX_LAYERS:,}, got {self.num_layers:,}: the "
                "plan looks at every layer by itself"
            )
        for name in ("rope_theta", "norm_eps", "init_std"):
            # Smaller ones are 0 in float32.
            if not _TINY <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"model.{name} must be a positive number, got {getattr(self, name):g}"
                )
        if self.embedding_std and not _TINY <= self.embedding_std < math.inf:
            raise ValueError(
                "model.embedding_std must be a positive number, or 0 for that of model.init_std, "
                f"got {self.embedding_std:g}"
            )
        for name, value in self.mup_factors.items():
            if not math.isfinite(value):
                raise ValueError(f"model.{name} must be a finite number, got {value:g}")
        if not self.has_attention and not self.has_ssm:
            raise ValueError(
                "a model needs attention or a state-space mixer: set model.num_heads or "
                "model.ssm_size above 0"
            )
        if self.has_attention and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly: "
                "model.num_kv_heads must divide model.num_heads"
            )
        if self.has_attention and self.head_dim % 2:
            raise ValueError(
                f"model.head_dim is {self.head_dim}: rotary embeddings rotate pairs of features, "
                "so it must be even"
            )
        if self.has_ssm and self.ssm_size % self.ssm_head_dim:
            raise ValueError(
                f"a state-space mixer of width {self.ssm_size} cannot be cut into heads of "
                f"{self.ssm_head_dim}: model.ssm_head_dim must divide model.ssm_size"
            )
        if self.has_ssm and self.num_ssm_heads % self.ssm_groups:
            raise ValueError(
                f"{self.num_ssm_heads} state-space heads cannot be shared out to {self.ssm_groups} "
                "groups: model.ssm_groups must divide model.ssm_size / model.ssm_head_dim"
            )
        if self.num_parameters > _MAX_PARAMETERS:
            raise ValueError(
                f"a model of this shape has {self.num_parameters:.1e} parameters, and "
                f"{_MAX_PARAMETERS:.0e} are the most: look for a size with a digit too many"
            )
