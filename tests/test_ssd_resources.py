"""The scan kernels, compiled for Hopper: each fits the chip at every shape of Falcon-H1."""

import pytest
import torch

triton = pytest.importorskip("triton")
from hopper import SHARED_BYTES, Recorder, compiled  # noqa: E402
from learnable_multipliers.pretrain.model import ssd_launch  # noqa: E402
from learnable_multipliers.pretrain.model.ssd import _nearest_chunk_size  # noqa: E402
from paths import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

KERNELS = ("decays", "states", "rows", "scores", "bc_grad", "dt_grad", "reduce_parts")
# heads, head_dim, groups, state
SHAPES = {
    "0.5b": (24, 64, 1, 128),
    "1.5b": (48, 64, 1, 256),
    "1.5b-deep": (24, 64, 1, 256),
    "3b": (32, 128, 1, 256),
    "7b": (24, 128, 1, 256),
    "34b": (32, 128, 2, 256),
    "tiny-90m": (24, 32, 1, 64),
}


def launched(monkeypatch, shape, dtype):
    """Return the launches of both passes, by kernel."""
    heads, head_dim, groups, state = shape
    recorders = {name: Recorder(getattr(ssd_launch, f"{name}_kernel")) for name in KERNELS}
    for name, recorder in recorders.items():
        monkeypatch.setattr(ssd_launch, f"{name}_kernel", recorder)
    x = torch.zeros(1, 256, heads, head_dim, dtype=dtype, requires_grad=True)
    keys = torch.zeros(1, 256, groups, state, dtype=dtype)
    dt, rates = torch.zeros(1, 256, heads), torch.zeros(heads)
    # Not through `ssd`, which leaves tensors on a CPU to PyTorch.
    chunk = _nearest_chunk_size(128, dtype)
    ssd_launch.ssd_scan(x, dt, rates, keys, keys, rates, chunk)[0].sum().backward()
    return recorders


@pytest.mark.parametrize("size", SHAPES)
def test_every_kernel_fits_the_chip(size, monkeypatch):
    for name, recorder in launched(monkeypatch, SHAPES[size], torch.bfloat16).items():
        assert recorder.launches
        for launch in recorder.launches:
            found = compiled(recorder.kernel, *launch)
            assert found.shared_bytes <= SHARED_BYTES, name
            # Few of 255 registers: more would be written to memory and read back for every head.
            # `scores` was faster on an H200 with these than with none and twice the warps.
            assert found.stack_bytes <= (480 if name == "scores" else 160), name
