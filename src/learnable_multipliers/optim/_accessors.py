"""What has been learned so far, and the weights underneath."""

from __future__ import annotations

from torch import Tensor, nn

from learnable_multipliers._reparametrize import explicit_multipliers
from learnable_multipliers.optim._base import MultiplierOptimizer


def multipliers(source: MultiplierOptimizer | nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the multipliers by the name of their matrix: {"row": ..., "col": ..., "scalar": ...}.

    Takes an optimizer of this library, or a reparametrized model. Values are the multipliers
    themselves on either scale, full tensors; `row` spans all rows, with 1 where a block carries
    none.
    """
    if isinstance(source, MultiplierOptimizer):
        return source.multipliers()
    return explicit_multipliers(source)


def raw_weights(optimizer: MultiplierOptimizer) -> dict[str, Tensor]:
    """Return what each parameter trains by name: the raw weight, the parameter where it is one."""
    return optimizer.raw_weights()
