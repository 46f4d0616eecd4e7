"""The operations of Newton-Schulz: division by the norm, and products known to be symmetric.

The Gram matrix of X is symmetric, and so is the product of two polynomials of it. The Triton kernel
computes one triangle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learnable_multipliers.kernels._backend import Backend, use_triton

_MIN_SIZE = 512
"""Smallest product for the kernel. Below, torch is as fast: benchmarks/newton_schulz.py."""
_ALIGNMENT = 8
"""In elements: rows of 16-bit numbers start at multiples of 16 bytes."""


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that matrices are orthogonalized in.

    float16 instead of bfloat16: as fast, with three more bits. Matrices of norm 1 do not need the
    range of bfloat16.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


def divided_by_norm(batch: Tensor, margin: float, eps: float, backend: Backend) -> Tensor:
    """Return matrices over their Frobenius norm times a margin, in `result_dtype`."""
    is_served = batch.device.type == "cuda" and batch.dtype == torch.bfloat16
    if not is_served or not use_triton(backend, batch.device):
        return divided_by_norm_reference(batch, margin, eps)
    from learnable_multipliers.kernels import _newton_schulz_kernels

    return _newton_schulz_kernels.divided_by_norm(batch, margin, eps)


def divided_by_norm_reference(batch: Tensor, margin: float, eps: float) -> Tensor:
    """Return the same, computed by PyTorch operators."""
    wide = torch.promote_types(batch.dtype, torch.float32)
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True, dtype=wide)
    return (batch.to(wide) / (norm * margin).clamp(min=eps)).to(result_dtype(batch.dtype))


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    add: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    backend: Backend,
) -> Tensor:
    """Return alpha a b^T + beta add + diagonal I for each pair of a batch; must be symmetric."""
    if not _is_faster(a) or not use_triton(backend, a.device):
        return symmetric_product_reference(a, b, add, alpha, beta, diagonal)
    from learnable_multipliers.kernels import _newton_schulz_kernels

    return _newton_schulz_kernels.symmetric_product(a, b, add, alpha, beta, diagonal)


def symmetric_product_reference(
    a: Tensor, b: Tensor, add: Tensor | None, alpha: float, beta: float, diagonal: float
) -> Tensor:
    """Return the same, computed by PyTorch operators."""
    if add is None:
        product = torch.bmm(a, b.mT)
        if alpha != 1:
            product *= alpha
    else:
        product = torch.baddbmm(add, a, b.mT, beta=beta, alpha=alpha)
    if diagonal:
        product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product


def _is_faster(a: Tensor) -> bool:
    """Return whether the kernel beats torch's products; only measured on Hopper."""
    return (
        a.device.type == "cuda"
        and a.dtype == torch.float16
        and a.shape[-2] >= _MIN_SIZE
        and a.shape[-2] % _ALIGNMENT == a.shape[-1] % _ALIGNMENT == 0
        and torch.cuda.get_device_capability(a.device)[0] == 9
    )
