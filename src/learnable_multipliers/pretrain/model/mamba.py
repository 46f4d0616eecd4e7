"""The Mamba-2 mixer: gated state-space heads after a short causal convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, use_triton
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.gate import silu_gate
from learnable_multipliers.pretrain.model.projections import project, project_sum, scaled
from learnable_multipliers.pretrain.model.ssd import ssd
from learnable_multipliers.pretrain.model.triton_support import unsupported_dtype

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import convolution_kernels as kernels
else:
    kernels = None

KERNEL_TAPS = 4
"""Number of taps that the kernels support, which every Mamba-2 has."""


class GatedRMSNorm(nn.Module):
    """RMSNorm of gated features, in groups."""

    def __init__(self, size: int, groups: int, eps: float):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each group of features separately."""
        grouped = x.unflatten(-1, (self.groups, -1))
        size = grouped.shape[-1]
        return F.rms_norm(grouped, (size,), None, self.eps).flatten(-2) * self.weight


class Mamba(nn.Module):
    """The mixer; a layer with two mixers may compute their projections together."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.block_sizes = config.ssm_block_sizes
        self.head_dim, self.groups = config.ssm_head_dim, config.ssm_groups
        self.chunk_size = config.ssm_chunk_size
        self.mup_ssm_in, self.mup_ssm_out = config.mup_ssm_in, config.mup_ssm_out
        self.mup_z, self.mup_x, self.mup_dt = config.mup_z, config.mup_x, config.mup_dt
        self.mup_B, self.mup_C = config.mup_B, config.mup_C
        channels = sum(self.block_sizes[1:4])
        self.in_proj = nn.Linear(config.hidden_size, sum(self.block_sizes), bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.ssm_conv_size, groups=channels)
        self.dt_bias = nn.Parameter(torch.empty(config.num_ssm_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_ssm_heads))
        self.D = nn.Parameter(torch.ones(config.num_ssm_heads))
        self.norm = (
            GatedRMSNorm(config.ssm_size, config.ssm_groups, config.norm_eps)
            if config.ssm_norm
            else nn.Identity()
        )
        self.out_proj = nn.Linear(config.ssm_size, config.hidden_size, bias=False)

    @property
    def input_sizes(self) -> list[int]:
        """The features of what `mix` takes, in its order."""
        z, x, B, C, dt = self.block_sizes  # noqa: N806
        return [z, x + B + C, dt]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the mixer adds to the residual stream."""
        projected = project(x, [self.in_proj])
        inner = self.mix(*projected.split(self.input_sizes, -1))
        return project_sum([inner], [self.out_proj])

    def mix(self, z: Tensor, convolved: Tensor, dt: Tensor) -> Tensor:
        """Return the gated heads of the parts of an input projection, (batch, length, ssm_size)."""
        bias = self.conv1d.bias
        assert bias is not None
        x, B, C = convolve(convolved, self._taps(), bias, self.block_sizes[1:4])  # noqa: N806
        dt = scaled(dt.to(self.dt_bias.dtype), self.mup_ssm_in * self.mup_dt)
        dt = F.softplus(dt + self.dt_bias)
        y = ssd(
            x.unflatten(-1, (-1, self.head_dim)),
            dt,
            -torch.exp(self.A_log),
            B.unflatten(-1, (self.groups, -1)),
            C.unflatten(-1, (self.groups, -1)),
            self.D,
            self.chunk_size,
        ).flatten(-2)
        gated = silu_gate(y, z, self.mup_ssm_in * self.mup_z)
        return scaled(self.norm(gated), self.mup_ssm_out).to(z.dtype)

    def _taps(self) -> Tensor:
        """Return the filters of x, B and C, their fixed factors in them."""
        factors = [self.mup_ssm_in * each for each in (self.mup_x, self.mup_B, self.mup_C)]
        taps = self.conv1d.weight.squeeze(1)
        if all(factor == 1.0 for factor in factors):
            return taps
        parts = taps.split(self.block_sizes[1:4])
        return torch.cat([scaled(*each) for each in zip(parts, factors, strict=True)])


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor, sizes: Sequence[int], backend: Backend = "auto"
) -> tuple[Tensor, ...]:
    """Return silu(bias + weight * x), a causal convolution over time, in the dtype of x.

    Uses PyTorch or Triton, by device and `backend`. x is
    (batch, length, channels), weight (channels, taps), bias (channels,); what comes out is split
    into three, of `sizes` channels.
    """
    if not use_triton(backend, x.device, _unsupported_reason(x, weight)) or kernels is None:
        parts = zip(x.split(sizes, -1), weight.split(sizes), bias.split(sizes), strict=True)
        return tuple(convolve_reference(*part) for part in parts)
    return kernels.convolve_silu(x, weight.float(), bias.float(), sizes)


def convolve_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return one part of the same, as shifted products; sums are taken in float32 or wider.

    u_t = bias + sum_k weight_k x_{t - taps + 1 + k},  y_t = u_t sigmoid(u_t)
    """
    taps = weight.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    u = bias
    for tap in range(taps):
        u = u + weight[:, tap] * padded[:, tap : tap + x.shape[1]]
    return F.silu(u).to(x.dtype)


def _unsupported_reason(x: Tensor, weight: Tensor) -> str | None:
    """Return why the kernels do not support these tensors, or None if they do."""
    if weight.shape[1] != KERNEL_TAPS:
        return f"the kernels have {KERNEL_TAPS} taps, not {weight.shape[1]}"
    return unsupported_dtype(x.dtype)
