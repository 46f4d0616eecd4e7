"""Find an optimizer inside a framework's wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a framework's wrapper, of whatever class it is.

    Accelerate, Lightning, Fabric and schedulers hold it as `optimizer`, torchtitan's container in
    a list `optimizers`.
    """
    current = optimizer
    # The wrappers of Lightning and Fabric subclass the optimizer, so isinstance does not help.
    while True:
        several = getattr(current, "optimizers", None)
        if isinstance(several, Sequence) and len(several) > 1:
            raise ValueError(
                f"{type(current).__name__} holds {len(several)} optimizers, one for each part of "
                "the model: give one of them"
            )
        inner = several[0] if isinstance(several, Sequence) and several else None
        inner = getattr(current, "optimizer", None) if inner is None else inner
        if inner is None or inner is current:
            break
        current = inner
    return current
