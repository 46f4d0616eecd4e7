"""Finds an optimizer inside what a framework has put around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside what a framework has put around it, whichever it is.

    Accelerate, Lightning, Fabric and schedulers hold it as `optimizer`, torchtitan's container in
    a list `optimizers`.
    """
    found = optimizer
    # What Lightning and Fabric put around an optimizer passes for one of its class.
    while True:
        several = getattr(found, "optimizers", None)
        if isinstance(several, Sequence) and len(several) > 1:
            raise ValueError(
                f"{type(found).__name__} holds {len(several)} optimizers, one for each part of the "
                "model: give one of them"
            )
        inner = several[0] if isinstance(several, Sequence) and several else None
        inner = getattr(found, "optimizer", None) if inner is None else inner
        if inner is None or inner is found:
            break
        found = inner
    return found
