"""The causal convolution: the reference against torch's own, the kernels against the reference."""

import os

import pytest
import torch

from learnable_multipliers.pretrain.model.mamba import convolve, convolve_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# batch, length, channels of the three parts, taps
SHAPES = [
    (2, 37, (32, 8, 8), 4),
    (1, 130, (65, 3, 5), 4),
    (3, 2, (16, 16, 16), 4),
    (1, 1, (1, 1, 1), 4),
    (2, 64, (136, 24, 200), 4),
]


def drawn(shape, dtype, device="cpu"):
    batch, length, sizes, taps = shape
    channels = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(batch, length, channels + 16, generator=generator, dtype=torch.float64)
    # A view of a wider tensor, as a mixer hands it over; one of the shapes is not aligned.
    x = wide.to(device, dtype)[..., 8 : 8 + channels]
    weight = torch.randn(channels, taps, generator=generator, dtype=torch.float64)
    bias = torch.randn(channels, generator=generator, dtype=torch.float64)
    kind = dtype if dtype == torch.float64 else torch.float32
    return x, weight.to(device, kind), bias.to(device, kind)


def with_gradients(function, x, weight, bias):
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
    y = function(x, weight, bias)
    y = y if isinstance(y, torch.Tensor) else torch.cat(y, -1)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    (y * dy.to(y)).sum().backward()
    return y.detach(), x.grad, weight.grad, bias.grad


@pytest.mark.parametrize("shape", [*SHAPES, (2, 9, (5, 1, 1), 2)])
def test_reference_equals_torch_s_convolution(shape):
    x, weight, bias = drawn(shape, torch.float64)
    channels, taps = weight.shape
    expected = torch.nn.functional.conv1d(
        x.mT, weight[:, None], bias, padding=taps - 1, groups=channels
    )[..., : x.shape[1]].mT
    expected = torch.nn.functional.silu(expected)
    torch.testing.assert_close(
        convolve_reference(x, weight, bias), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(shape):
    tensors = drawn(shape, torch.float32)
    found = with_gradients(lambda *t: convolve(*t, shape[2], backend="triton"), *tensors)
    truth = with_gradients(convolve_reference, *(t.double() for t in tensors))
    for value, true in zip(found, truth, strict=True):
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [*SHAPES, (8, 2048, (1536, 128, 128), 4)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_kernels_equal_the_reference_on_a_gpu(shape, dtype, limit):
    tensors = drawn(shape, dtype, "cuda")
    compiled = torch.compile(lambda *t: convolve(*t, shape[2], backend="triton"), fullgraph=True)
    found = with_gradients(compiled, *tensors)
    again = with_gradients(compiled, *tensors)
    truth = with_gradients(convolve_reference, *(t.double() for t in tensors))
    for value, second, true in zip(found, again, truth, strict=True):
        assert (value.double() - true).norm() <= limit * true.norm()
        assert torch.equal(value, second)


def test_a_wish_that_cannot_be_met_is_refused():
    tensors = drawn(SHAPES[0], torch.float64)
    with pytest.raises(ValueError, match="do not support torch.float64"):
        convolve(*tensors, SHAPES[0][2], backend="triton")
    with pytest.raises(ValueError, match="have 4 taps, not 3"):
        convolve(*drawn((1, 9, (3, 1, 1), 3), torch.float32), (3, 1, 1), backend="triton")
    with pytest.raises(ValueError, match="unknown backend"):
        convolve(*tensors, SHAPES[0][2], backend="cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(ValueError, match="on cpu, not on a CUDA device|not installed"):
            convolve(*drawn(SHAPES[0], torch.float32), SHAPES[0][2], backend="triton")
