"""The Triton scan against float64, output and all gradients.

On a CUDA device the kernels run as compiled; elsewhere through Triton's interpreter, which must
be chosen before Triton is imported: `TRITON_INTERPRET=1 pytest tests/test_ssd_kernels.py`.
"""

import os

import pytest
import torch

from learnable_multipliers.pretrain.model.ssd import ssd, ssd_chunked

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs a CUDA device, or TRITON_INTERPRET=1 in a process of its own",
    ),
    # The interpreter computes with numpy, also in lanes whose result is never stored.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
pytest.importorskip("triton")
from learnable_multipliers.pretrain.model.ssd_launch import SETTINGS, ssd_scan  # noqa: E402

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")

NAMES = ("y", "x", "dt", "A", "B", "C", "D")
# Error of a result relative to its own size; thrice that for A, a sum that cancels.
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# batch, length, heads, head_dim, groups, state, chunk
SMALL = {
    "whole chunks": (2, 64, 4, 16, 1, 16, 16),
    "ragged end": (2, 70, 3, 16, 1, 32, 32),
    "shorter than a chunk": (1, 9, 2, 16, 1, 16, 16),
    "two groups": (1, 48, 6, 16, 2, 16, 16),
    "a group per head": (1, 33, 2, 32, 2, 16, 16),
    "many heads": (1, 32, 10, 16, 1, 16, 16),
    "wide state": (1, 64, 2, 16, 1, 128, 32),
    "widest state": (1, 40, 2, 16, 1, 256, 16),
    "widest of both": (1, 40, 2, 128, 2, 256, 32),
    "wide head": (1, 64, 2, 128, 1, 16, 32),
    "long chunk": (1, 200, 1, 32, 1, 16, 128),
}
TARGET = (8, 2048, 24, 64, 1, 128, 128)
LARGE = {
    "target": TARGET,
    "ragged end": (2, 1000, 24, 64, 1, 128, 128),
    "narrow": (2, 512, 8, 32, 2, 16, 128),
    "half chunks": (2, 512, 24, 64, 1, 64, 64),
    "square": (1, 256, 4, 128, 2, 128, 128),
    "short chunks": (1, 100, 4, 16, 1, 32, 16),
    "a group per head": (1, 300, 2, 64, 2, 32, 128),
    "a head at a time": (1, 300, 29, 16, 1, 256, 128),
    "1.5B": (2, 1000, 48, 64, 1, 256, 128),
    "3B": (1, 1000, 32, 128, 1, 256, 128),
    "34B": (1, 512, 32, 128, 2, 256, 128),
}


def inputs(shape, dtype=torch.float32, strength=1.0):
    """Return x, dt, A, B, C and D; x, B and C are slices of one tensor, as in a model."""
    batch, length, heads, head_dim, groups, state, _ = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (heads * head_dim, groups * state, groups * state)
    joint = torch.randn(batch, length, sum(sizes), generator=generator).to(DEVICE, dtype)
    x, keys, queries = joint.split(sizes, -1)
    dt = 0.001 + 0.3 * torch.rand(batch, length, heads, generator=generator)
    rates = -strength * torch.linspace(0.1, 4.0, heads)
    skip = torch.randn(heads, generator=generator)
    return [
        x.unflatten(-1, (heads, head_dim)),
        dt.to(DEVICE),
        rates.to(DEVICE),
        keys.unflatten(-1, (groups, state)),
        queries.unflatten(-1, (groups, state)),
        skip.to(DEVICE),
    ]


def output_gradient(y):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(y.shape, generator=generator).to(y.device, y.dtype)


def with_gradients(scan, tensors, chunk_size, **settings):
    """Return the output and all six gradients."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    y = scan(*tensors, chunk_size, **settings)
    return [y.detach(), *torch.autograd.grad(y, tensors, output_gradient(y))]


def exact(tensors, chunk_size, dtype):
    """Return output and gradients in float64, from the same numbers and the same dy."""
    tensors = [t.detach().double().requires_grad_() for t in tensors]
    y = ssd_chunked(*tensors, chunk_size)
    dy = output_gradient(torch.empty(y.shape, dtype=dtype, device=y.device)).double()
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def relative_errors(results, truth):
    pairs = zip(NAMES, results, truth, strict=True)
    return {name: float((r.double() - t).norm() / t.norm()) for name, r, t in pairs}


def check(shape, dtype, strength=1.0, limit=None):
    tensors = inputs(shape, dtype, strength)
    results = with_gradients(ssd, tensors, shape[-1], backend="triton")
    assert [r.dtype for r in results[1:]] == [t.dtype for t in tensors]
    errors = relative_errors(results, exact(tensors, shape[-1], dtype))
    limit = limit or LIMIT[dtype]
    assert all(error < limit * (3 if n == "A" else 1) for n, error in errors.items()), errors


# The interpreter cannot multiply bfloat16: float16 stands for it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL.keys())
def test_triton_equals_float64(shape, dtype):
    check(shape, dtype)


@pytest.mark.parametrize("strength", [1e-3, 40.0])
def test_triton_under_weak_and_strong_decays(strength):
    # Differences of sums of hundreds have fewer digits than float32.
    check((1, 70, 4, 16, 1, 16, 32), torch.float32, strength, limit=5e-5)


def test_any_split_of_the_work_gives_the_same_numbers(monkeypatch):
    small = {"NUM_HEADS": 1, "BLOCK_ROWS": 16, "BLOCK_COLS": 16, "BLOCK_DIM": 16, "BLOCK_STATE": 16}
    for name, settings in SETTINGS.items():
        smaller = {key: small.get(key, value) for key, value in settings[4].items()}
        monkeypatch.setitem(SETTINGS, name, {**settings, 4: smaller})
    check((1, 70, 4, 32, 2, 32, 32), torch.float32)


def test_the_operators_are_as_declared():
    shape = (1, 40, 2, 16, 1, 16, 16)
    tensors = [t.detach().requires_grad_() for t in inputs(shape)]
    torch.library.opcheck(ssd_scan, (*tensors, 16))


def test_a_traced_block_has_one_graph_and_the_same_numbers():
    compare_compiled(SMALL["ragged end"], torch.float32, backend="aot_eager")


def test_a_broadcast_gradient_of_the_output_is_as_good_as_any():
    tensors = [t.detach().requires_grad_() for t in inputs(SMALL["ragged end"])]
    summed = torch.autograd.grad(ssd(*tensors, 32, backend="triton").sum(), tensors)
    y = ssd(*tensors, 32, backend="triton")
    for got, truth in zip(summed, torch.autograd.grad(y, tensors, torch.ones_like(y)), strict=True):
        assert torch.equal(got, truth)


def test_shapes_out_of_reach_are_named():
    tensors = inputs((1, 16, 2, 24, 1, 16, 16))
    with pytest.raises(ValueError, match="head_dim is 24, not one of 16, 32, 64, 128"):
        ssd(*tensors, 16, backend="triton")
    with pytest.raises(ValueError, match="state is 512, not one of 16, 32, 64, 128, 256"):
        ssd(*inputs((1, 16, 2, 16, 1, 512, 16)), 16, backend="triton")


@pytest.mark.parametrize(
    ("chunk_size", "dtype", "taken"),
    [
        (256, torch.float16, 128),
        (256, torch.float32, 64),
        (100, torch.float16, 64),
        (24, torch.float32, 16),
        (5, torch.float16, 16),
    ],
)
def test_any_chunk_is_served_by_the_nearest_one(chunk_size, dtype, taken):
    tensors = inputs((1, 300, 2, 16, 1, 16, chunk_size), dtype)
    found = with_gradients(ssd, tensors, chunk_size, backend="triton")
    nearest = with_gradients(ssd, tensors, taken, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, nearest, strict=True))
    errors = relative_errors(found, exact(tensors, chunk_size, dtype))
    assert max(errors.values()) < 3 * LIMIT[dtype], errors


def test_a_chunk_of_nothing_is_refused():
    for backend in ("triton", "torch"):
        with pytest.raises(ValueError, match="chunk_size is 0; it must be at least 1"):
            ssd(*inputs(SMALL["two groups"]), 0, backend=backend)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())
def test_triton_equals_float64_on_the_device(shape, dtype):
    check(shape, dtype)


@pytest.mark.gpu
@needs_gpu
def test_auto_takes_triton_on_the_device():
    tensors = inputs(LARGE["half chunks"], torch.bfloat16)
    auto = with_gradients(ssd, tensors, 64)
    triton = with_gradients(ssd, tensors, 64, backend="triton")
    assert all(torch.equal(a, t) for a, t in zip(auto, triton, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_results_repeat_bit_for_bit():
    tensors = inputs(TARGET, torch.bfloat16)
    first = with_gradients(ssd, tensors, 128, backend="triton")
    for _ in range(3):
        again = with_gradients(ssd, tensors, 128, backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [TARGET, LARGE["ragged end"]], ids=["target", "ragged end"])
def test_a_compiled_block_has_one_graph_and_the_same_numbers(shape):
    compare_compiled(shape, torch.bfloat16)


def compare_compiled(shape, dtype, **settings):
    _, _, heads, head_dim, groups, state, chunk_size = shape
    sizes = (heads * head_dim, groups * state, groups * state)
    x, dt, rates, keys, queries, skip = inputs(shape, dtype)
    joint = torch.cat([t.flatten(2) for t in (x, keys, queries)], -1)

    def block(joint, dt, rates, skip):
        x, keys, queries = torch.sigmoid(joint).split(sizes, -1)
        x = x.unflatten(-1, (heads, head_dim))
        keys, queries = (t.unflatten(-1, (groups, state)) for t in (keys, queries))
        y = ssd(x, dt, rates, keys, queries, skip, chunk_size, backend="triton")
        return torch.tanh(y.flatten(-2))

    def run(function):
        leaves = [t.detach().requires_grad_() for t in (joint, dt, rates, skip)]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, output_gradient(y))]

    compiled = run(torch.compile(block, fullgraph=True, **settings))
    for got, truth in zip(compiled, run(block), strict=True):
        # The compiler keeps more digits between the operations around the scan.
        error = (got.double() - truth.double()).norm() / truth.double().norm()
        assert error < LIMIT[dtype]
