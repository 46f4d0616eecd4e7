"""Small tensors on their way to a device that must not wait for them."""

from __future__ import annotations

import torch
from torch import Tensor

_REPLAYED: list[Tensor] = []
"""Host memory that captured copies read again at every replay."""


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a small tensor from the host; neither side waits for the other."""
    if device.type != "cuda":
        return tensor.to(device)
    # From ordinary memory a copy would wait until the device has done all it was given before.
    pinned = tensor.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _REPLAYED.append(pinned)
    return pinned.to(device, non_blocking=True)
