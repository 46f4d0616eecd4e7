"""Choose between PyTorch and Triton kernels, and copy small tensors to their device."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]

# Looked up once, not in every forward pass: torch.compile traces `use_triton`.
HAS_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Host memory that captured CUDA graphs read again at every replay.
_CAPTURED: list[Tensor] = []


def use_triton(backend: Backend, device: torch.device, unsupported: str | None = None) -> bool:
    """Return whether to run Triton kernels.

    Raise if backend='triton' cannot run: no silent fallback. `auto` means Triton on a CUDA device
    and PyTorch elsewhere, or if the kernels do not support these tensors: `unsupported` says why.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; choose from {', '.join(get_args(Backend))}")
    if not HAS_TRITON:
        unsupported = "the package triton is not installed"
    elif unsupported is None and device.type != "cuda" and not _INTERPRETED:
        unsupported = f"the tensors are on {device.type}, not on a CUDA device"
    if backend == "triton" and unsupported is not None:
        raise ValueError(f"backend='triton' cannot run here: {unsupported}; use 'torch' or 'auto'")
    return backend == "triton" or (
        backend == "auto" and device.type == "cuda" and unsupported is None
    )


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, during which the host must not wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host without a synchronization."""
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for all work queued on the device.
    pinned = tensor.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(pinned)
    return pinned.to(device, non_blocking=True)
