"""The short causal convolution of Mamba-2 with its activation, one filter for each channel.

`convolve` chooses between PyTorch and Triton, by device and by the `backend` asked for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, takes_triton

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import convolution_kernels as kernels
else:
    kernels = None

KERNEL_TAPS = 4
"""The taps that the kernels are written out for; it is what every Mamba-2 has."""
_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, backend: Backend = "auto") -> Tensor:
    """Return silu(bias + weight * x), a causal convolution over time, in the dtype of x.

    x is (batch, length, channels), weight (channels, taps), bias (channels,).
    """
    if not takes_triton(backend, x.device, _obstacle(x, weight)) or kernels is None:
        return convolve_reference(x, weight, bias)
    return kernels.convolve_silu(x, weight.float(), bias.float())


def convolve_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the same, as shifted products; sums are taken in float32 or wider.

    u_t = bias + sum_k weight_k x_{t - taps + 1 + k},  y_t = u_t sigmoid(u_t)
    """
    taps = weight.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    u = bias
    for tap in range(taps):
        u = u + weight[:, tap] * padded[:, tap : tap + x.shape[1]]
    return F.silu(u).to(x.dtype)


def _obstacle(x: Tensor, weight: Tensor) -> str | None:
    """Return why the kernels cannot serve these tensors, or None if they can."""
    if x.dtype not in _KERNEL_TYPES:
        return f"the kernels do not take {x.dtype}"
    if weight.shape[1] != KERNEL_TAPS:
        return f"the kernels have {KERNEL_TAPS} taps, not {weight.shape[1]}"
    return None
