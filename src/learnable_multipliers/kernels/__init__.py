"""The only door to the kernels: PyTorch or Triton, by device and by wish."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch

from learnable_multipliers.kernels import reference

Backend = Literal["auto", "torch", "triton"]


def choose_kernels(backend: Backend, device: torch.device, dtypes: set[torch.dtype]) -> Any:
    """Return what does the work; never another than was asked for.

    `auto` takes Triton on a CUDA device for raw weights in float32, and PyTorch elsewhere.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; choose from {', '.join(get_args(Backend))}")
    has_triton = find_spec("triton") is not None
    if backend == "triton" and not has_triton:
        raise ValueError("backend='triton' needs the package triton; install it, or use 'auto'")
    suits = has_triton and device.type == "cuda" and dtypes <= {torch.float32}
    if backend == "torch" or (backend == "auto" and not suits):
        return reference
    from learnable_multipliers.kernels.triton_launch import TritonKernels

    return TritonKernels()
