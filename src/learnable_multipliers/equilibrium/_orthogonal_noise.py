"""Noise after Newton-Schulz: its rms, and the correlation of two samples.

Muon orthogonalizes momenta that share most of their gradients. Two N(0,1) matrices of
correlation r have, orthogonalized, a correlation below r, the more so the nearer the matrix is to a
square, whose smallest singular values belong to noise alone. No closed form is known. Singular
values of noise over the Frobenius norm go by the aspect ratio and 1/sqrt(short side), so a small
matrix of the same aspect, scaled to the large one's singular values, gives both numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from learnable_multipliers.optim._newton_schulz import COEFFICIENTS, MARGIN, Coefficients

_SHORT_SIDE, _LONGEST_ASPECT = 48, 8
"""Of the matrices drawn; beyond this aspect, orthogonalizing hardly does more than rescale."""
_NUMBERS = 1 << 16
"""Drawn in all: errors stay below half a percent."""
# Correlations at which pairs are drawn, denser near 1, where squares lose most.
_GRID = tuple(1 - (1 - i / 16) ** 2 for i in range(17))


def rms_after(num_out: int, num_in: int, coefficients: Coefficients) -> float:
    """Return the rms of orthogonalized noise over that of a semi-orthogonal matrix."""
    return _measured(*_proxy(num_out, num_in), coefficients)[0]


def overlap_after(
    correlation: float, num_out: int, num_in: int, coefficients: Coefficients
) -> float:
    """Return the correlation that two noises of a given one have once orthogonalized."""
    ratios = _measured(*_proxy(num_out, num_in), coefficients)[1]
    place = 16 * (1 - (1 - correlation) ** 0.5)
    below = min(int(place), 15)
    # The ratio of the two correlations is smooth; the line between two of its points will do.
    ratio = ratios[below] + (place - below) * (ratios[below + 1] - ratios[below])
    return ratio * correlation


def _proxy(num_out: int, num_in: int) -> tuple[int, int, int]:
    """Return the sides of a small matrix of the same aspect, and the short side it stands for."""
    short, long = sorted((max(num_out, 1), max(num_in, 1)))
    aspect = min(long / short, _LONGEST_ASPECT)
    drawn = min(short, _SHORT_SIDE)
    return drawn, round(drawn * aspect), short


@lru_cache(maxsize=256)
@torch.no_grad()
def _measured(
    short: int, long: int, meant: int, coefficients: Coefficients
) -> tuple[float, tuple[float, ...]]:
    """Return the rms, and correlation after over correlation before along the grid."""
    count = max(2, _NUMBERS // (short * long))
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, count, short, long, generator=generator)
    smaller = (short / meant) ** 0.5
    first = _orthogonalized(one, smaller, coefficients)
    square = first.square().mean()
    ratios = []
    for correlation in _GRID[1:-1]:
        mixed = correlation * one + (1 - correlation**2) ** 0.5 * other
        after = (first * _orthogonalized(mixed, smaller, coefficients)).mean() / square
        ratios.append(after.item() / correlation)
    rms = (square * long).sqrt().item()
    # At no correlation the ratio is a slope; its nearest neighbour stands for it.
    return rms, (ratios[0], *ratios, 1.0)


def _orthogonalized(batch: Tensor, smaller: float, coefficients: Coefficients) -> Tensor:
    """Newton-Schulz from singular values smaller than the batch's own over its norm."""
    norm = torch.linalg.matrix_norm(batch, keepdim=True) * MARGIN[coefficients]
    x = batch * (smaller / norm)
    for a, b, c in COEFFICIENTS[coefficients]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
