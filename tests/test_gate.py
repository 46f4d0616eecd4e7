"""The gate of the MLP: the kernels against the reference; that of the mixer against autograd."""

import os

import pytest
import torch

from learnable_multipliers.pretrain.model.gate import gated, gated_reference, silu_gate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [(2, 5, 96), (1, 3, 2), (3, 1, 2600)]


def with_gradient(function, joined, factor):
    joined = joined.detach().requires_grad_()
    y = function(joined, factor)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    (y.double() * weight.to(y.device)).sum().backward()
    return y.detach(), joined.grad


def drawn(shape, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("factor", [1.0, 0.3, -2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(shape, factor):
    joined = drawn(shape, torch.float32)
    found = with_gradient(lambda *given: gated(*given, backend="triton"), joined, factor)
    truth = with_gradient(gated_reference, joined.double(), factor)
    for value, true in zip(found, truth, strict=True):
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [*SHAPES, (8, 1024, 4096)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_kernels_equal_the_reference_on_a_gpu(shape, dtype, limit):
    joined = drawn(shape, dtype, "cuda")
    compiled = torch.compile(lambda *given: gated(*given, backend="triton"), fullgraph=True)
    found = with_gradient(compiled, joined, 0.7)
    truth = with_gradient(gated_reference, joined.double(), 0.7)
    for value, true in zip(found, truth, strict=True):
        assert (value.double() - true).norm() <= limit * true.norm()


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_gate_of_the_mixer_is_differentiated_as_by_autograd(factor):
    generator = torch.Generator().manual_seed(0)
    y, z = torch.randn(2, 3, 7, 5, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.equal(silu_gate(y, z, factor), y * torch.nn.functional.silu(factor * z))
    assert torch.autograd.gradcheck(silu_gate, (y, z, factor))
    low = silu_gate(y.bfloat16(), z.bfloat16(), factor)
    assert low.dtype == torch.bfloat16
    truth = silu_gate(y.bfloat16().double(), z.bfloat16().double(), factor)
    assert torch.equal(low, truth.bfloat16())
