"""Who computes: PyTorch or Triton, by device and by wish."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal, get_args

import torch

Backend = Literal["auto", "torch", "triton"]

# Looked up once, not in every forward pass: torch.compile traces `takes_triton`.
HAS_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def takes_triton(backend: Backend, device: torch.device, obstacle: str | None = None) -> bool:
    """Whether Triton's kernels do the work; never another than was asked for.

    `auto` takes Triton on a CUDA device and PyTorch elsewhere, or where there is an `obstacle`:
    why the kernels do not serve these tensors. `triton` raises where they cannot run.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; choose from {', '.join(get_args(Backend))}")
    if not HAS_TRITON:
        obstacle = "the package triton is not installed"
    elif obstacle is None and device.type != "cuda" and not _INTERPRETED:
        obstacle = f"the tensors are on {device.type}, not on a CUDA device"
    if backend == "triton" and obstacle is not None:
        raise ValueError(f"backend='triton' cannot run here: {obstacle}; use 'torch' or 'auto'")
    return backend == "triton" or (backend == "auto" and device.type == "cuda" and obstacle is None)
