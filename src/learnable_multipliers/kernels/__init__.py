"""Choose the kernels of the optimizers: PyTorch or Triton."""

from __future__ import annotations

from typing import Any

import torch

from learnable_multipliers.kernels import _reference as reference
from learnable_multipliers.kernels._backend import Backend, takes_triton


def choose_kernels(backend: Backend, device: torch.device, dtypes: set[torch.dtype]) -> Any:
    """Return the module with the kernels for raw weights of these dtypes.

    `auto` takes PyTorch for others than float32; Triton refuses them when asked to.
    """
    if not takes_triton(backend, device) or (backend == "auto" and dtypes - {torch.float32}):
        return reference
    from learnable_multipliers.kernels import _triton_launch

    return _triton_launch
