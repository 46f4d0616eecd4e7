"""The only door to the kernels of the optimizers."""

from __future__ import annotations

from typing import Any

import torch

from learnable_multipliers.kernels import _reference as reference
from learnable_multipliers.kernels._backend import Backend, takes_triton


def choose_kernels(backend: Backend, device: torch.device, dtypes: set[torch.dtype]) -> Any:
    """Return what does the work, for raw weights of these dtypes.

    Triton takes others than float32 when asked to; `auto` leaves them to PyTorch.
    """
    if not takes_triton(backend, device) or (backend == "auto" and dtypes - {torch.float32}):
        return reference
    from learnable_multipliers.kernels._triton_launch import TritonKernels

    return TritonKernels()
