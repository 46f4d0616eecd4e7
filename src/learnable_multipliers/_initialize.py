"""Apply a plan's initial values to the model's weights, before the first forward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from learnable_multipliers._forward_multipliers import FixedMultiplier, fixed_multipliers
from learnable_multipliers._multiplier import Matrix, effective, initial_values, output_factor
from learnable_multipliers._names import owner_of
from learnable_multipliers._plan import Plan


@torch.no_grad()
def initialize_(model: nn.Module, plan: Plan) -> Plan:
    """Multiply the weights by the initial values that are pending; return the plan without them.

    Where the values are the model's own fixed multipliers (`init="fold"`), those become 1 and
    the function stays as it is. Where they are numbers with `init_keeps="raw"`, the function
    changes, on purpose. Everything else is left alone.
    """
    parameters = plan.resolve(model)
    fixed = {multiplier.field: multiplier for multiplier in fixed_multipliers(model)}
    for field, value in plan.folds:
        if field not in fixed or fixed[field].value != value:
            found = fixed[field].value if field in fixed else 1.0
            raise ValueError(
                f"the plan folds {field} = {value:g}, but the model has {found:g}: was it folded "
                "already? Use the plan that initialize_ returned, or make a new one."
            )
    for entry in plan.entries:
        if entry.init_pending and entry.matrix is not None:
            weight = parameters[entry.name]
            values = initial_values(entry.matrix, dtype=torch.float64, device=weight.device)
            weight.copy_(effective(entry.matrix, weight.double(), values))
    for field, _ in plan.folds:
        _scale_biases(model, plan, fixed[field])
        fixed[field].reset()
    entries = tuple(replace(entry, init_pending=False) for entry in plan.entries)
    return replace(plan, entries=entries, folds=())


def _scale_biases(model: nn.Module, plan: Plan, multiplier: FixedMultiplier) -> None:
    """Multiply the biases behind a folded output multiplier, which it scaled as well."""
    if not multiplier.scales_bias:
        return
    for name, role in multiplier.targets:
        owner, _ = owner_of(model, name)
        bias = getattr(owner, "bias", None)
        matrix = plan[name].matrix
        if not isinstance(bias, nn.Parameter) or matrix is None:
            continue
        factor = output_factor(*_rows_at(matrix, role, multiplier.value))
        assert factor is not None
        bias.mul_(factor.to(bias))


def _rows_at(matrix: Matrix, role: str, value: float) -> tuple[Matrix, dict[str, torch.Tensor]]:
    """Return a matrix that carries `value` on the rows of one role and 1 on the others."""
    blocks = tuple(
        replace(block, row=True, scalar=False, init=value if block.role == role else 1.0)
        for block in matrix.blocks
    )
    rows_only = replace(matrix, blocks=blocks, col=False, scale="linear")
    return rows_only, initial_values(rows_only, dtype=torch.float64)
