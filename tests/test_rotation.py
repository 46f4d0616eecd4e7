"""Rotary positions: laws of the reference, and the kernels against it."""

import os

import pytest
import torch

from learnable_multipliers.pretrain.model.attention import (
    RotaryTable,
    apply_rotary,
    rotary_table,
    split_heads,
    split_heads_reference,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# batch, length, heads, key heads, head_dim
SHAPES = [(2, 37, 4, 2, 32), (1, 5, 3, 1, 16), (1, 300, 2, 2, 64)]
SCALES = (0.5, 1.5, 2.0)


def drawn(shape, dtype, device="cpu"):
    batch, length, heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    features = (heads + 2 * kv_heads) * dim
    wide = torch.randn(batch, length, features + 24, generator=generator, dtype=torch.float64)
    # A view of a wider tensor, as a hybrid layer hands it over.
    return wide.to(device, dtype)[..., 16 : 16 + features]


def with_gradient(function, projected, shape, rotary):
    _, _, heads, kv_heads, _ = shape
    projected = projected.detach().requires_grad_()
    found = function(projected, rotary, heads, kv_heads, SCALES)
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    for part in found:
        weight = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        total = total + (part.double() * weight.to(part.device)).sum()
    total.backward()
    return *(part.detach() for part in found), projected.grad


def wide(rotary):
    return RotaryTable(rotary.cos.double(), rotary.sin.double())


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    rotary = rotary_table(50, 32, 1e4, torch.device("cpu"))
    rotary = wide(rotary)
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64).expand(2, 1, 50, 1, 32)
    q_rotated, k_rotated = apply_rotary(q, rotary), apply_rotary(k, rotary)
    torch.testing.assert_close(q_rotated.norm(dim=-1), q.norm(dim=-1), rtol=1e-6, atol=0)
    scores = torch.einsum("bthd,bshd->ts", q_rotated, k_rotated)
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_the_first_position_is_not_rotated_and_angles_fall_by_theta():
    rotary = rotary_table(3, 8, 1e4, torch.device("cpu"))
    assert rotary.cos[0].eq(1).all()
    assert rotary.sin[0].eq(0).all()
    angles = torch.atan2(rotary.sin, rotary.cos)[1]
    torch.testing.assert_close(angles, torch.tensor([1.0, 0.1, 0.01, 0.001]))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(shape):
    projected = drawn(shape, torch.float32)
    rotary = rotary_table(shape[1], shape[4], 1e4, torch.device("cpu"))
    found = with_gradient(
        lambda *given: split_heads(*given, backend="triton"), projected, shape, rotary
    )
    truth = with_gradient(split_heads_reference, projected.double(), shape, wide(rotary))
    for value, true in zip(found, truth, strict=True):
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [*SHAPES, (8, 2048, 12, 4, 128), (8, 2048, 8, 2, 64)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_kernels_equal_the_reference_on_a_gpu(shape, dtype, limit):
    projected = drawn(shape, dtype, "cuda")
    rotary = rotary_table(shape[1], shape[4], 1e4, torch.device("cuda"))
    compiled = torch.compile(lambda *given: split_heads(*given, backend="triton"), fullgraph=True)
    found = with_gradient(compiled, projected, shape, rotary)
    truth = with_gradient(split_heads_reference, projected.double(), shape, wide(rotary))
    for value, true in zip(found, truth, strict=True):
        assert (value.double() - true).norm() <= limit * true.norm()


def test_a_wish_that_cannot_be_met_is_refused():
    rotary = rotary_table(5, 24, 1e4, torch.device("cpu"))
    with pytest.raises(ValueError, match="head_dim is 24, not a power of two"):
        split_heads(torch.zeros(1, 5, 72), rotary, 1, 1, backend="triton")
    with pytest.raises(ValueError, match="unknown backend"):
        split_heads(torch.zeros(1, 5, 72), rotary, 1, 1, backend="cuda")
