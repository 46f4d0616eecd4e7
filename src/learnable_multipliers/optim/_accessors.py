"""What users ask of an optimizer by a function, also where a framework has wrapped it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._reparametrize import explicit_multipliers
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._unwrap import innermost


def multipliers(source: Optimizer | nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the multipliers by the name of their matrix: {"row": ..., "col": ..., "scalar": ...}.

    Takes an optimizer of this library, also inside a framework's, or a reparametrized model. Values
    are the multipliers themselves on either scale, full tensors; `row` spans all rows, with 1 where
    a block carries none.
    """
    if isinstance(source, nn.Module):
        return explicit_multipliers(source)
    return unwrap(source).multipliers()


def clip_grad_norm_(
    optimizer: Optimizer, max_norm: float, *, clip_multipliers: bool | None = None
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm.

    The norm is that of the raw weights' gradients and of every parameter without multipliers.
    Multipliers are left out of it (paper sec. 4.3), but scaled with the rest; `clip_multipliers`
    counts them, as an optimizer made with it does unless told otherwise here.
    `torch.nn.utils.clip_grad_norm_` would take the effective weights' gradients instead.
    """
    return unwrap(optimizer).clip_grad_norm_(max_norm, clip_multipliers)


def raw_weights(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what each parameter trains by name: the raw weight, the parameter where it is one."""
    return unwrap(optimizer).raw_weights()


def unwrap(optimizer: Any) -> MultiplierOptimizer:
    """Return the optimizer of this library inside what a framework has put around it."""
    found = innermost(optimizer)
    if not isinstance(found, MultiplierOptimizer):
        raise TypeError(
            f"expected an optimizer of this library, got {type(optimizer).__name__}; make one "
            "with lrm.AdamW.from_model(model), or wrap it: lrm.LearnableMultipliers(optimizer, "
            "model, plan)"
        )
    return found
