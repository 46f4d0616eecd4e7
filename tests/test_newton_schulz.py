"""Forms of Newton-Schulz against float64 and torch's own."""

from functools import partial

import pytest
import torch
from torch.optim import _muon

from learnable_multipliers.kernels._newton_schulz import symmetric_product
from learnable_multipliers.optim._orthogonalization import (
    COEFFICIENTS,
    gram_form,
    orthogonalize,
    standard_form,
)

SHAPES = [(3, 8, 20), (2, 20, 8), (1, 16, 16), (2, 16, 20), (1, 4, 96)]


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_end_near_one_and_vectors_stay(coefficients, shape):
    batch = torch.randn(shape, dtype=torch.float64)
    done = orthogonalize(batch, coefficients)
    u, _, vh = torch.linalg.svd(batch, full_matrices=False)
    values = torch.linalg.svdvals(done)
    low, high = {"quintic": (0.6, 1.25), "polar-express": (0.85, 1.15)}[coefficients]
    assert low < values.min()
    assert values.max() < high
    rotated = u.mT @ done @ vh.mT
    off = rotated - torch.diag_embed(torch.diagonal(rotated, dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-10


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_are_the_polynomials_of_the_singular_values(coefficients, shape):
    x = torch.randn(shape, dtype=torch.float64)
    x /= x.norm(dim=(-2, -1), keepdim=True)
    u, values, vh = torch.linalg.svd(x, full_matrices=False)
    for a, b, c in COEFFICIENTS[coefficients]:
        values = a * values + b * values**3 + c * values**5
    exact = (u * values[:, None]) @ vh
    for form in (standard_form, gram_form):
        result = form(x, COEFFICIENTS[coefficients], partial(symmetric_product, backend="torch"))
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-10)


def spectra(rows, cols):
    """Return matrices of several spectra: noise, falling, of low rank."""
    left, _ = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(cols, rows, dtype=torch.float64))
    index = torch.arange(1, rows + 1, dtype=torch.float64)
    falls = {
        "falling": 1 / index,
        "rank 1": 1.0 * (index <= 1),
        "rank 1/8": 1.0 * (index <= rows / 8),
    }
    made = {name: (left * values) @ right.mT for name, values in falls.items()}
    return {"noise": torch.randn(rows, cols, dtype=torch.float64), **made}


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(48, 96), (48, 48), (8, 64)])
def test_rounding_is_less_than_that_of_torch(shape, size):
    """Of 16-bit matrices, the noise of bfloat16 itself included."""
    for name, x in spectra(*shape).items():
        for matrix in (x, x.mT):
            exact = orthogonalize(matrix[None], "quintic")[0]
            ours = orthogonalize((size * matrix).bfloat16()[None], "quintic")[0].double()
            theirs = _muon._zeropower_via_newtonschulz(
                (size * matrix).bfloat16(), COEFFICIENTS["quintic"][0], 5, 1e-7
            )
            error, other = ((result - exact).norm().item() for result in (ours, theirs.double()))
            assert error < other, f"{name}: {error} against {other}"


def test_zero_matrices_stay_zero():
    batch = torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    assert orthogonalize(batch, "quintic").eq(0).all()
    assert orthogonalize(batch[:0], "quintic").shape == (0, 8, 16)
