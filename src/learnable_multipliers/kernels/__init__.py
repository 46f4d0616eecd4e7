"""Choose the kernels of the optimizers: PyTorch or Triton."""

from __future__ import annotations

from typing import Any

import torch

from learnable_multipliers.kernels import _reference as reference
from learnable_multipliers.kernels._backend import Backend, use_triton


def choose_kernels(backend: Backend, device: torch.device, dtypes: set[torch.dtype]) -> Any:
    """Return the module with the kernels for raw weights of these dtypes.

    `auto` means PyTorch for other dtypes than float32; `triton` raises for these.
    """
    if not use_triton(backend, device) or (backend == "auto" and dtypes - {torch.float32}):
        return reference
    from learnable_multipliers.kernels import _triton_launch

    return _triton_launch
