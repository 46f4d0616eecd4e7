"""The Triton kernels of Newton-Schulz against float64.

Compiled on a CUDA device, and elsewhere in Triton's interpreter:
`TRITON_INTERPRET=1 pytest tests/test_newton_schulz_kernels.py`.
"""

import pytest
import torch

from learnable_multipliers.kernels._newton_schulz import (
    divided_by_norm_reference,
    symmetric_product_reference,
)
from paths import DEVICE, INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a CUDA device, or TRITON_INTERPRET=1 in a process of its own",
)
pytest.importorskip("triton")
if INTERPRETED or torch.cuda.is_available():
    from learnable_multipliers.kernels import _newton_schulz_kernels as kernels

    SMALL = kernels.Launch(32, 32, 4, 2)
    LAUNCHES = [SMALL] if INTERPRETED else [SMALL, kernels.PRODUCT]
else:
    LAUNCHES = [None]


def distance(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("transposed", [False, True])
# Whole tiles, parts of tiles on either side, one tile, a single row of them.
@pytest.mark.parametrize("shape", [(2, 64, 96), (3, 40, 72), (1, 136, 64), (2, 16, 200)])
def test_gram_matrices_are_symmetric_to_the_bit_and_right(shape, transposed, launch):
    x = torch.randn(shape, device=DEVICE).half()
    x = x.mT.contiguous().mT if transposed else x
    product = kernels.symmetric_product(x, x, None, 1.0, 0.0, 0.0, launch)
    expected = symmetric_product_reference(x.double(), x.double(), None, 1.0, 0.0, 0.0)
    # float16 has 11 bits.
    assert distance(product, expected) < 3e-4
    # Tiles off the diagonal are mirrored. In the interpreter those on it are products of NumPy,
    # whose rounding depends on the processor.
    tile = torch.arange(shape[1], device=DEVICE) // (launch.block if INTERPRETED else 1)
    mirrored = tile[:, None] != tile
    assert torch.equal(product * mirrored, product.mT * mirrored)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("size", [40, 64, 104])
def test_polynomials_of_a_gram_matrix(size, launch):
    x = torch.randn(2, size, 2 * size, dtype=torch.float64, device=DEVICE) / size**0.5
    gram = (x @ x.mT).half()
    exact = gram.double()
    product = kernels.symmetric_product(gram, gram, gram, 2.0, -4.5, 3.5, launch)
    expected = symmetric_product_reference(exact, exact, exact, 2.0, -4.5, 3.5)
    assert distance(product, expected) < 3e-4
    again = kernels.symmetric_product(product, gram, None, 0.5, 0.0, 0.0, launch)
    assert distance(again, 0.5 * product.double() @ exact) < 5e-4


@pytest.mark.parametrize("margin", [1.0, 1.02])
# Less than a block, several of them, more than all parts of one block each.
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 128, 96), (1, 600, 512)])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_matrices_of_any_size_are_divided_by_their_norm(shape, margin, size):
    x = (size * torch.randn(shape, device=DEVICE)).bfloat16()
    quotient = kernels.divided_by_norm(x, margin, 1e-12)
    exact = x.double()
    expected = exact / exact.norm(dim=(-2, -1), keepdim=True) / margin
    # Numbers too small for a normal float16 have fewer bits: 3e-8 of a norm of 1 each.
    assert quotient.dtype == torch.float16
    assert distance(quotient, expected) < 1e-3
    same = divided_by_norm_reference(x, margin, 1e-12)
    torch.testing.assert_close(quotient, same, rtol=2e-3, atol=1e-7)


def test_no_matrix_is_divided_by_zero_and_nan_stays_nan():
    x = torch.zeros(3, 8, 8, device=DEVICE, dtype=torch.bfloat16)
    x[1, 2, 3], x[2, 0, 0] = 1.0, float("nan")
    quotient = kernels.divided_by_norm(x, 1.0, 1e-7)
    assert quotient[0].eq(0).all()
    assert quotient[1, 2, 3] == 1
    assert quotient[2, 0, 0].isnan()
    assert kernels.divided_by_norm(x[:0], 1.0, 1e-7).shape == (0, 8, 8)
