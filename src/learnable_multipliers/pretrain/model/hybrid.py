"""The language model: embedding, layers of parallel mixers and an MLP, head.

Modules and parameters have the names of Hugging Face's `FalconH1ForCausalLM`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learnable_multipliers._initialize import FixedMultiplier
from learnable_multipliers.pretrain.model.attention import Attention, RotaryTable, rotary_table
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.gate import gated
from learnable_multipliers.pretrain.model.loss import Losses, head_loss
from learnable_multipliers.pretrain.model.mamba import Mamba
from learnable_multipliers.pretrain.model.projections import (
    project,
    project_sum,
    scaled,
    weight_of,
)
from learnable_multipliers.roles import SSM_ROLES

# The matrices that each fixed factor scales, with their roles.
_FACTOR_TARGETS: dict[str, tuple[tuple[str, str], ...]] = {
    "mup_embedding": (("embed_tokens", "embedding"),),
    "mup_head": (("lm_head", "head"),),
    "mup_attention_in": (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")),
    "mup_key": (("k_proj", "key"),),
    "mup_attention_out": (("o_proj", "attention-out"),),
    "mup_ssm_in": tuple(("in_proj", role) for role in SSM_ROLES),
    **{f"mup_{role.removeprefix('ssm-')}": (("in_proj", role),) for role in SSM_ROLES},
    "mup_ssm_out": (("out_proj", "ssm-out"),),
    "mup_gate": (("gate_proj", "gate"),),
    "mup_down": (("down_proj", "down"),),
}


class MLP(nn.Module):
    """The gated MLP."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mup_gate, self.mup_down = config.mup_gate, config.mup_down
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream."""
        inner = gated(project(x, (self.gate_proj, self.up_proj)), self.mup_gate)
        return scaled(project_sum([inner], [self.down_proj]), self.mup_down)


class Layer(nn.Module):
    """Parallel mixers, then the MLP, each after a norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mamba = Mamba(config) if config.has_ssm else None
        self.self_attn = Attention(config) if config.has_attention else None
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = MLP(config) if config.has_mlp else None
        self.pre_ff_layernorm = (
            nn.RMSNorm(config.hidden_size, config.norm_eps) if config.has_mlp else None
        )
        if config.freeze_norms:
            inner = None if self.mamba is None else self.mamba.norm
            for norm in (self.input_layernorm, inner, self.pre_ff_layernorm):
                if norm is not None:
                    norm.requires_grad_(False)

    def forward(self, h: Tensor, rotary: RotaryTable) -> Tensor:
        """Return the residual stream after this layer."""
        h = h + self._mix(self.input_layernorm(h), rotary)
        if self.feed_forward is not None and self.pre_ff_layernorm is not None:
            h = h + self.feed_forward(self.pre_ff_layernorm(h))
        return h

    def _mix(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        mamba, attention = self.mamba, self.self_attn
        if attention is None:
            assert mamba is not None
            return mamba(x)
        if mamba is None:
            return attention(x, rotary)
        if not attention.joinable:
            return attention(x, rotary) + mamba(x)
        projected = project(x, (mamba.in_proj, *attention.inputs))
        sizes = [*mamba.input_sizes, attention.input_size]
        *to_mamba, to_attention = projected.split(sizes, -1)
        inner = mamba.mix(*to_mamba), attention.attend(to_attention, rotary)
        return project_sum(inner, (mamba.out_proj, attention.o_proj))


class Backbone(nn.Module):
    """Everything except the head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.mup_embedding = config.mup_embedding
        self.recomputes_layers = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        if config.freeze_final_norm:
            self.final_layernorm.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the features the head reads, (batch, length, hidden_size)."""
        config = self.config
        rotary = rotary_table(tokens.shape[1], config.head_dim, config.rope_theta, tokens.device)
        h = scaled(self.embed_tokens(tokens), self.mup_embedding)
        for layer in self.layers:
            if self.recomputes_layers:
                # Nothing in a layer is random.
                h = checkpoint(layer, h, rotary, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, rotary)
        return self.final_layernorm(h)


class HybridLM(nn.Module):
    """A language model of the shape `config`; make one with `build`, which sets its weights."""

    def __init__(self, config: ModelConfig):
        config.check()
        super().__init__()
        self.config = config
        self.mup_head = config.mup_head
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_()
        self.head_loss: Callable[..., Losses] = head_loss

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, length, vocab_size)."""
        return scaled(self.lm_head(self.model(tokens)), self.mup_head)

    def loss(self, tokens: Tensor, z_loss: float = 0.0) -> Losses:
        """Return the loss of predicting tokens[:, 1:] from tokens[:, :-1]."""
        features = self.model(tokens[:, :-1])
        head = weight_of(self.lm_head)
        return self.head_loss(features, head, self.mup_head, tokens[:, 1:], z_loss)

    def tie_(self) -> None:
        """Tie embedding and head, if configured."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def compile_layers_(self) -> None:
        """Compile layer by layer: one compilation serves all layers."""
        for layer in self.model.layers:
            layer.compile()
        self.head_loss = torch.compile(self.head_loss)

    def store_matrices_(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        """Store the matrices of the layers, and their gradients, in another precision.

        Embedding and head stay as they are, and so does the residual stream.
        """
        for module in self.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
                if grad_dtype == dtype:
                    continue
                if not hasattr(module.weight, "grad_dtype"):
                    raise ValueError(
                        f"torch {torch.__version__} cannot keep {grad_dtype} gradients of {dtype} "
                        "weights, which adding up micro-batches needs: use torch 2.10 or newer, "
                        "runtime.param_dtype=float32, or data.micro_batch_sequences=0"
                    )
                module.weight.grad_dtype = grad_dtype

    def recompute_layers_(self) -> None:
        """Save only the inputs of layers for the backward pass, which recomputes the layers.

        A compiled layer is computed again by the same code.
        """
        self.model.recomputes_layers = True

    @property
    def num_parameters(self) -> int:
        """Parameters, each once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def fixed_multipliers(self) -> tuple[FixedMultiplier, ...]:
        """Return the fixed factors of the forward pass, which multipliers may start from."""
        return tuple(
            FixedMultiplier(
                field,
                value,
                self.factor_targets(field),
                # Nothing here has a bias; conv1d and dt_bias come after the factors.
                scales_bias=False,
                reset=partial(self.set_factor_, field, 1.0),
            )
            for field, value in self.config.mup_factors.items()
        )

    def factor_targets(self, field: str) -> tuple[tuple[str, str], ...]:
        """Return the matrices that a fixed factor scales: (parameter name, role)."""
        return tuple(
            (f"{name}.weight", role)
            for name, _ in self.named_modules()
            for leaf, role in _FACTOR_TARGETS[field]
            if name.rpartition(".")[2] == leaf
        )

    def set_factor_(self, field: str, value: float) -> None:
        """Set one of the `mup_*` factors, in every layer and in the config."""
        self.config = replace(self.config, **{field: value})
        self.model.config = self.config
        for module in self.modules():
            if hasattr(module, field):
                setattr(module, field, value)


def build(config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> HybridLM:
    """Return an initialized model; the same seed gives the same weights on every device."""
    model = empty_model(config)
    initialize_weights_(model, torch.Generator().manual_seed(seed))
    return model.to(device)


def empty_model(config: ModelConfig) -> HybridLM:
    """Return a model with uninitialized weights."""
    with torch.device("meta"):
        model = HybridLM(config)
    model.to_empty(device="cpu")
    # Leaving the meta device creates new parameters, and unties tied ones.
    model.tie_()
    return model


@torch.no_grad()
def initialize_weights_(model: HybridLM, generator: torch.Generator) -> None:
    """Initialize the weights: normal distributions for matrices, else as in Mamba-2."""
    std = model.config.init_std
    embedding = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":
            parameter.uniform_(1.0, 16.0, generator=generator).log_()
        elif leaf == "dt_bias":
            # Time steps spread evenly over the decades from 1e-3 to 1e-1, through softplus.
            steps = parameter.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            parameter.copy_(steps + torch.log(-torch.expm1(-steps)))
        elif "conv1d" in name:
            bound = model.config.ssm_conv_size**-0.5
            parameter.uniform_(-bound, bound, generator=generator)
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            own = model.config.embedding_std if parameter is embedding else 0.0
            parameter.normal_(0.0, own or std, generator=generator)
