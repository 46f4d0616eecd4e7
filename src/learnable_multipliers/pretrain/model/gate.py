"""The gate of an MLP: what is between its two projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, takes_triton
from learnable_multipliers.pretrain.model.projections import scaled

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import gate_kernels as kernels
else:
    kernels = None

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def gated(joined: Tensor, mup_gate: float, backend: Backend = "auto") -> Tensor:
    """Return up * silu(mup_gate * gate) of gate and up side by side.

    Chooses between PyTorch and Triton, by device and by the `backend` asked for.
    """
    dtype = joined.dtype
    obstacle = None if dtype in _KERNEL_TYPES else f"the kernels do not take {dtype}"
    if not takes_triton(backend, joined.device, obstacle) or kernels is None:
        return gated_reference(joined, mup_gate)
    return kernels.gate(joined, mup_gate)


def gated_reference(joined: Tensor, mup_gate: float) -> Tensor:
    """Return the same by PyTorch's own operators."""
    gate, up = joined.chunk(2, -1)
    return up * F.silu(scaled(gate, mup_gate))
