"""The only door to the kernels: PyTorch or Triton, by device and by wish."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Literal, get_args

import torch

from learnable_multipliers.kernels import reference

Backend = Literal["auto", "torch", "triton"]


def choose_kernels(backend: Backend, device: torch.device) -> ModuleType:
    """Return the module whose functions do the work; never another one than was asked for."""
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; choose from {', '.join(get_args(Backend))}")
    has_triton = find_spec("triton") is not None
    if backend == "triton" and not has_triton:
        raise ValueError("backend='triton' needs the package triton; install it, or use 'auto'")
    if backend == "torch" or (backend == "auto" and not (has_triton and device.type == "cuda")):
        return reference
    from learnable_multipliers.kernels import triton_kernels

    return triton_kernels
