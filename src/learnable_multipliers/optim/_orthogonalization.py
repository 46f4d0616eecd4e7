"""Orthogonalize matrices by Newton-Schulz: coefficients, and two forms of the iteration.

The result, the nearest semi-orthogonal matrix, takes only matrix products. Each iteration
multiplies X by a polynomial of its Gram matrix R = X X^T. Two forms give the same result up to
rounding. The standard form multiplies X every time. The Gram form multiplies the polynomials first,
Q_k = P_k Q_(k-1) and R_k = P_k R_(k-1) P_k, and X by Q at the end: its products are as small as the
shorter side of X, so it is faster for matrices far from square.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._newton_schulz import divided_by_norm, symmetric_product

Polynomial = tuple[float, float, float]
"""(a, b, c) of X <- a X + b (X X^T) X + c (X X^T)^2 X."""
Product = Callable[..., Tensor]
"""A function like `symmetric_product`."""

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
"""Factor on the Frobenius norm before a matrix is divided by it."""
_EPS = 1e-7
"""Floor of the norm, as in torch.optim.Muon."""
_GRAM_ASPECT = 1.5
"""Smallest ratio of the sides at which the Gram form has fewer multiplications."""
_RESTART = 2
"""Iterations until the Gram form recomputes X and R: rounding moves R away from X X^T."""


def orthogonalize(batch: Tensor, coefficients: Coefficients, backend: Backend = "auto") -> Tensor:
    """Return U V^T of each matrix U S V^T in a batch (batch, rows, cols).

    The result of bfloat16 matrices is float16, the dtype they are computed in: `result_dtype`.
    """
    short, long = sorted(batch.shape[-2:])
    form = gram_form if long >= _GRAM_ASPECT * short else standard_form
    # The Frobenius norm bounds the largest singular value.
    x = divided_by_norm(batch, MARGIN[coefficients], _EPS, backend)
    return form(x, COEFFICIENTS[coefficients], partial(symmetric_product, backend=backend))


def standard_form(x: Tensor, polynomials: tuple[Polynomial, ...], product: Product) -> Tensor:
    """Multiply X by one polynomial after the other."""
    wide = x.shape[-2] <= x.shape[-1]
    for a, b, c in polynomials:
        gram = _gram(x, product)
        # The linear term goes onto the diagonal: one product less to add.
        poly = product(gram, gram, add=gram, alpha=c, beta=b, diagonal=a)
        # A tall matrix takes the polynomial of its smaller Gram matrix from the right.
        x = torch.bmm(poly, x) if wide else torch.bmm(x, poly)
    return x


def gram_form(x: Tensor, polynomials: tuple[Polynomial, ...], product: Product) -> Tensor:
    """Multiply the polynomials first, then X by their product."""
    wide = x.shape[-2] <= x.shape[-1]
    parts = polynomials[:_RESTART], polynomials[_RESTART:]
    for part in parts:
        gram, joined = _gram(x, product), None
        for step, (a, b, c) in enumerate(part):
            poly = product(gram, gram, add=gram, alpha=c, beta=b, diagonal=a)
            # Polynomials of one matrix commute, so their products are symmetric.
            joined = poly if joined is None else product(poly, joined)
            if step + 1 < len(part):
                gram = product(product(poly, gram), poly)
        if joined is not None:
            x = torch.bmm(joined, x) if wide else torch.bmm(x, joined)
    return x


def _gram(x: Tensor, product: Product) -> Tensor:
    """Return the smaller of the two Gram matrices."""
    return product(x, x) if x.shape[-2] <= x.shape[-1] else product(x.mT, x.mT)
