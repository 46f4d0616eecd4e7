"""The chunked scan against the plain recurrence, forward and backward."""

import pytest
import torch

from learnable_multipliers.pretrain.model.ssd import ssd, ssd_chunked, ssd_recurrence

NAMES = ("x", "dt", "A", "B", "C", "D")
# batch, length, heads, head_dim, groups, state, chunk
SHAPES = {
    "whole chunks": (2, 32, 4, 8, 1, 16, 8),
    "ragged end": (2, 37, 4, 8, 1, 16, 8),
    "shorter than a chunk": (1, 5, 2, 4, 1, 8, 16),
    "two groups": (2, 24, 6, 4, 2, 8, 8),
    "a group per head": (1, 19, 3, 4, 3, 8, 8),
    "one step": (3, 1, 2, 4, 1, 8, 8),
    "chunks of one": (1, 9, 2, 4, 2, 8, 1),
    "odd sizes": (1, 23, 3, 5, 1, 7, 6),
}


def inputs(shape, dtype=torch.float64, strength=1.0):
    """Return x, dt, A, B, C and D; dt * A goes down to about -strength."""
    batch, length, heads, head_dim, groups, state, _ = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x = normal(batch, length, heads, head_dim)
    dt = torch.rand(batch, length, heads, generator=generator, dtype=torch.float64)
    rates = -strength * torch.linspace(0.1, 1.0, heads, dtype=torch.float64)
    keys, queries = (normal(batch, length, groups, state) for _ in range(2))
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = (dtype, wide, wide, dtype, dtype, wide)
    tensors = (x, dt, rates, keys, queries, normal(heads))
    return [t.to(d).requires_grad_() for t, d in zip(tensors, dtypes, strict=True)]


def with_gradients(scan, tensors, *args, **settings):
    """Return the output and all six gradients, from the same gradient of the output."""
    y = scan(*tensors, *args, **settings)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def exact(tensors):
    """Return the same numbers in float64, with their gradients by the recurrence."""
    return with_gradients(ssd_recurrence, [t.detach().double().requires_grad_() for t in tensors])


def relative_errors(results, truth):
    """Return the error of the output and of each gradient, relative to its own size."""
    pairs = zip(("y", *NAMES), results, truth, strict=True)
    return {name: float((r.double() - t).norm() / t.norm()) for name, r, t in pairs}


@pytest.mark.parametrize("strength", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_chunked_scan_equals_the_recurrence(shape, strength):
    tensors = inputs(shape, strength=strength)
    chunked = with_gradients(ssd_chunked, tensors, shape[-1])
    for name, got, truth in zip(("y", *NAMES), chunked, exact(tensors), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(
            got, truth, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_chunk_size_does_not_change_the_result():
    shape = (2, 50, 4, 8, 2, 16, None)
    tensors = inputs(shape)
    truth = with_gradients(ssd_chunked, tensors, 50)
    for chunk_size in (1, 7, 16, 128):
        for got, expected in zip(
            with_gradients(ssd_chunked, tensors, chunk_size), truth, strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, 1.5e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_narrow_inputs_stay_near_the_truth(dtype, limit, strength):
    tensors = inputs((2, 100, 4, 16, 2, 32, 32), dtype, strength)
    results = with_gradients(ssd_chunked, tensors, 32)
    assert [r.dtype for r in results[1:]] == [t.dtype for t in tensors]
    errors = relative_errors(results, exact(tensors))
    assert max(errors.values()) < limit, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strong_decays_give_finite_gradients(dtype):
    tensors = inputs((1, 64, 4, 8, 1, 16, 64), dtype, strength=50.0)
    results = with_gradients(ssd_chunked, tensors, 64)
    assert all(r.isfinite().all() for r in results)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    errors = relative_errors(results, exact(tensors))
    assert max(errors.values()) < limit, errors


def test_a_scan_is_causal():
    tensors = inputs((1, 40, 2, 8, 1, 16, 16))
    changed = [t.detach().clone() for t in tensors]
    for i in (0, 1, 3, 4):
        changed[i][:, 25:] += 1.0
    before = ssd_chunked(*tensors, 16)
    after = ssd_chunked(*changed, 16)
    assert torch.equal(after[:, :25], before[:, :25])
    assert (after[:, 25:] - before[:, 25:]).abs().amin((0, 2, 3)).min() > 1e-6


def test_auto_on_a_cpu_is_the_chunked_scan():
    tensors = inputs((1, 20, 2, 16, 1, 16, 16), torch.float32)
    assert torch.equal(ssd(*tensors, chunk_size=16), ssd_chunked(*tensors, 16))


def test_asking_for_triton_in_vain_raises_and_says_why():
    tensors = inputs((1, 20, 2, 16, 1, 16, 16), torch.float64)
    with pytest.raises(ValueError, match="cannot run here: .*(CUDA|float64|not installed)"):
        ssd(*tensors, chunk_size=16, backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        ssd(*tensors, backend="cuda")


@pytest.mark.parametrize(
    ("index", "message"),
    [(1, "dt must have shape"), (2, "A must have"), (4, "C must have"), (5, "D must have")],
)
def test_a_wrong_shape_is_named(index, message):
    tensors = inputs((1, 20, 2, 16, 1, 16, 16))
    tensors[index] = tensors[index][:1] if index in (2, 5) else tensors[index][:, :-1]
    with pytest.raises(ValueError, match=message):
        ssd(*tensors)
    with pytest.raises(ValueError, match="3 heads cannot be divided evenly over 2 groups"):
        ssd(*inputs((1, 4, 3, 4, 2, 8, 4)))
