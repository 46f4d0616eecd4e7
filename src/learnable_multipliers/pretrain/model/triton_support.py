"""What the Triton kernels of the model have in common; needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """Return why the kernels do not support a dtype, or None if they do."""
    return None if dtype in DTYPES else f"the kernels do not support {dtype}"


def last_dim_contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous; the kernels take all other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
