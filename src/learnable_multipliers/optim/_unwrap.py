"""Find an optimizer inside a framework's wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a framework's wrapper, of whatever class it is.

    Accelerate, Lightning, Fabric and schedulers hold it as `optimizer`, torchtitan's container in
    a list `optimizers`.
    """
    found = optimizer
    # The wrappers of Lightning and Fabric subclass the optimizer: isinstance does not tell.
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
