"""Head and loss: the kernels against the reference, whatever the chunks."""

import os

import pytest
import torch

from learnable_multipliers.pretrain.model.loss import head_loss, head_loss_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# batch, length, features, vocabulary
SHAPES = [(2, 5, 8, 100), (1, 3, 4, 1), (3, 100, 8, 257)]
Z_LOSS = 0.01


def drawn(shape, dtype, device="cpu"):
    batch, length, width, vocab = shape
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(batch, length, width, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (batch, length), generator=generator)
    return features.to(device, dtype), head.to(device, dtype), targets.to(device)


def with_gradients(function, features, head, targets, factor):
    features, head = (t.detach().clone().requires_grad_() for t in (features, head))
    losses = function(features, head, factor, targets, Z_LOSS)
    # As for one micro-batch of several.
    (losses.total * 0.25).backward()
    return losses.total.detach(), losses.cross_entropy, features.grad, head.grad


def fast(*given):
    return head_loss(*given, backend="triton")


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("factor", [1.0, 0.3, -2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(shape, factor, monkeypatch):
    from learnable_multipliers.pretrain.model import loss, loss_kernels

    # Several chunks of positions, the last one smaller, and several blocks of the vocabulary.
    monkeypatch.setattr(loss, "CHUNK_BYTES", 0)
    monkeypatch.setattr(loss_kernels, "_BLOCK", 64)
    given = drawn(shape, torch.float32)
    found = with_gradients(fast, *given, factor)
    truth = with_gradients(head_loss_reference, *(_wide(t) for t in given), factor)
    for value, true in zip(found, truth, strict=True):
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_the_loss_without_gradients_is_the_same():
    features, head, targets = drawn(SHAPES[2], torch.float32)
    with torch.no_grad():
        found = fast(features, head, 1.0, targets, Z_LOSS)
    truth = with_gradients(fast, features, head, targets, 1.0)
    assert found.total == truth[0]
    assert found.cross_entropy == truth[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [*SHAPES, (16, 1024, 320, 16448), (2, 1000, 1024, 32784)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 1e-2)])
def test_kernels_equal_the_reference_on_a_gpu(shape, dtype, limit):
    given = drawn(shape, dtype, "cuda")
    found = with_gradients(torch.compile(fast), *given, 0.1)
    truth = with_gradients(head_loss_reference, *(_wide(t) for t in given), 0.1)
    for value, true in zip(found, truth, strict=True):
        assert (value.double() - true).norm() <= limit * true.norm()


def _wide(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor
