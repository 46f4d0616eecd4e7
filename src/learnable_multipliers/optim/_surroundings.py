"""Keeps what a caller has set for the model out of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Compute as outside of `torch.autocast` and `torch.set_default_device`.

    Autocast would round the products that sum a gradient to 16 bits, and small tensors that belong
    on the host would be made on another device.
    """
    with ExitStack() as left:
        if torch.is_autocast_enabled(device.type):
            left.enter_context(torch.autocast(device.type, enabled=False))
        if torch.get_default_device().type != "cpu":
            left.enter_context(torch.device("cpu"))
        yield
