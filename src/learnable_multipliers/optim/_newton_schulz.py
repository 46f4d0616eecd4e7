"""Newton-Schulz: the nearest semi-orthogonal matrix, by matrix products alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]
"""(a, b, c) of X <- a X + b (X X^T) X + c (X X^T)^2 X."""

Coefficients = Literal["quintic", "polar-express"]
COEFFICIENTS: dict[Coefficients, tuple[Polynomial, ...]] = {
    # One polynomial five times: singular values end between about 0.7 and 1.2.
    "quintic": ((3.4445, -4.7750, 2.0315),) * 5,
    # Polar Express (arXiv 2505.16932): a polynomial per iteration, with a safety margin of 2%.
    "polar-express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
}
MARGIN: dict[Coefficients, float] = {"quintic": 1.0, "polar-express": 1.02}
"""What the Frobenius norm is multiplied by before a matrix is divided by it."""


def orthogonalize(batch: Tensor, coefficients: Coefficients, eps: float = 1e-7) -> Tensor:
    """Return U V^T of each matrix U S V^T in a batch (batch, rows, cols), in the batch's dtype."""
    wide = batch.shape[-2] <= batch.shape[-1]
    x = batch
    for step, (a, b, c) in enumerate(COEFFICIENTS[coefficients]):
        # The smaller of the two Gram matrices; a tall matrix takes the polynomial from the right.
        gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
        scale = None
        if step == 0:
            # The Frobenius norm bounds the largest singular value. Its square is the trace of the
            # Gram matrix, and dividing there costs less than dividing x.
            square = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=_wide_dtype(gram))
            norm = (square.sqrt() * MARGIN[coefficients]).clamp(min=eps)[:, None, None]
            scale = (1 / norm).to(gram.dtype)
            gram = gram * (1 / norm**2).to(gram.dtype)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        # The linear term goes onto the diagonal: one product less to add and a copy saved.
        gram.diagonal(dim1=-2, dim2=-1).add_(a)
        if scale is not None:
            gram *= scale
        x = torch.bmm(gram, x) if wide else torch.bmm(x, gram)
    return x


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
