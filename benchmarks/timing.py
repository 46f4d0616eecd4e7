"""What benchmarks on a GPU share: times by device events, and a description of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton


def machine() -> dict[str, str]:
    """Return the GPU, the versions and the date that figures are from."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "date": time.strftime("%Y-%m-%d"),
    }


def without_host(step: Callable[[], Any]) -> Callable[[], None]:
    """Return a step as the replay of a CUDA graph: it takes the device's time, not the host's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step: Callable[[], Any], repeats: int, warmup: int = 5) -> float:
    """Return the median time of a step, by device events."""
    for _ in range(warmup):
        step()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)
