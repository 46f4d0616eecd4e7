"""The short causal convolution of Mamba-2 with its activation, one filter for each channel.

`convolve` is the only door: PyTorch or Triton, by device and by wish.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]

# Looked for once, not in every forward pass: torch.compile traces `convolve`.
if find_spec("triton") is not None:
    from learnable_multipliers.pretrain.models import convolution_kernels as kernels
else:
    kernels = None

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, backend: Backend = "auto") -> Tensor:
    """Return silu(bias + weight * x), a causal convolution over time, in the dtype of x.

    x is (batch, length, channels), weight (channels, taps), bias (channels,).
    """
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; choose from {', '.join(get_args(Backend))}")
    obstacle = None
    if kernels is None:
        obstacle = "Triton is not installed"
    elif x.dtype not in _KERNEL_TYPES:
        obstacle = f"the kernels do not take {x.dtype}"
    elif weight.shape[1] != kernels.TAPS:
        obstacle = f"the kernels have {kernels.TAPS} taps, not {weight.shape[1]}"
    if backend == "triton" and obstacle is not None:
        raise ValueError(f"backend='triton' cannot run here: {obstacle}; use 'torch' or 'auto'")
    if backend == "torch" or obstacle is not None or (backend == "auto" and not x.is_cuda):
        return convolve_reference(x, weight, bias)
    assert kernels is not None
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
