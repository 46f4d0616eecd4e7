"""Gates: between the two projections of an MLP, and after the scan of a mixer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, use_triton
from learnable_multipliers.pretrain.model.projections import scaled
from learnable_multipliers.pretrain.model.triton_support import unsupported_dtype

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import gate_kernels as kernels
else:
    kernels = None


def gated(joined: Tensor, mup_gate: float, backend: Backend = "auto") -> Tensor:
    """Return up * silu(mup_gate * gate) of gate and up side by side.

    Uses PyTorch or Triton, by device and `backend`.
    """
    if not use_triton(backend, joined.device, unsupported_dtype(joined.dtype)) or kernels is None:
        return gated_reference(joined, mup_gate)
    return kernels.gate(joined, mup_gate)


def gated_reference(joined: Tensor, mup_gate: float) -> Tensor:
    """Return the same with PyTorch's own operators."""
    gate, up = joined.chunk(2, -1)
    return up * F.silu(scaled(gate, mup_gate))


def silu_gate(y: Tensor, z: Tensor, factor: float) -> Tensor:
    """Return y * silu(factor * z) in the dtype of y, saving only y and z for the backward pass.

    Autograd would also save `factor * z` and its silu, and the compiler `factor * z`.
    """
    return _SiluGate.apply(y, z, factor)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(y, z)
        ctx.factor = factor
        return (y * F.silu(_widened(z, factor))).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, z = ctx.saved_tensors
        u = _widened(z, ctx.factor)
        grad = grads[0].to(u.dtype)
        dz = torch.ops.aten.silu_backward(grad * y, u)
        return (grad * F.silu(u)).to(y.dtype), scaled(dz, ctx.factor).to(z.dtype), None


def _widened(z: Tensor, factor: float) -> Tensor:
    return scaled(z.to(torch.promote_types(z.dtype, torch.float32)), factor)
