"""Run optimizer code outside autocast and set_default_device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def torch_defaults(device: torch.device) -> Iterator[None]:
    """Suspend `torch.autocast` and `torch.set_default_device`.

    Autocast would round the products that sum a gradient to 16 bits, and a default device would
    move small tensors that belong on the host.
    """
    with ExitStack() as left:
        if torch.is_autocast_enabled(device.type):
            left.enter_context(torch.autocast(device.type, enabled=False))
        if torch.get_default_device().type != "cpu":
            left.enter_context(torch.device("cpu"))
        yield
