"""Public functions on an optimizer; each looks inside a framework's wrapper first."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._reparametrize import explicit_multipliers
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._unwrap import innermost


def multipliers(source: Optimizer | nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the multipliers by the name of their matrix: {"row": ..., "col": ..., "scalar": ...}.

    Takes an optimizer of this library, a framework's wrapper around one, or a reparametrized model.
    Values are the multipliers themselves, on the log scale too, as full tensors; `row` spans all
    rows, with 1 for blocks that carry none.
    """
    if isinstance(source, nn.Module):
        return explicit_multipliers(source)
    return unwrap(source).multipliers()


def clip_grad_norm_(
    optimizer: Optimizer, max_norm: float, *, clip_multipliers: bool | None = None
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm.

    The norm is over the gradients of raw weights and of parameters without multipliers. Gradients
    of multipliers are left out (paper sec. 4.3), but scaled too; `clip_multipliers` includes them,
    and is the optimizer's own by default. `torch.nn.utils.clip_grad_norm_` would use the gradients
    of effective weights instead.
    """
    return unwrap(optimizer).clip_grad_norm_(max_norm, clip_multipliers)


def raw_weights(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the raw weights by name; of a parameter without multipliers, the parameter itself."""
    return unwrap(optimizer).raw_weights()


def unwrap(optimizer: Any) -> MultiplierOptimizer:
    """Return the optimizer of this library inside a framework's wrapper."""
    inner = innermost(optimizer)
    if not isinstance(inner, MultiplierOptimizer):
        raise TypeError(
            f"expected an optimizer of this library, got {type(optimizer).__name__}; make one "
            "with lrm.AdamW.from_model(model), or wrap it: lrm.LearnableMultipliers(optimizer, "
            "model, plan)"
        )
    return inner
