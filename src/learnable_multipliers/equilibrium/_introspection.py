"""Every tensor that an optimizer trains, with its moments, rate and decay: to look at only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix, carried_rows, initial_values
from learnable_multipliers.kernels._parameter import ParameterState
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._binding import MEAN_SQUARE
from learnable_multipliers.optim._muon import Muon, is_hidden
from learnable_multipliers.optim._packed_multipliers import NAMES
from learnable_multipliers.optim._sharding import full
from learnable_multipliers.optim._wrapper import LearnableMultipliers

Part = Literal["weight", "row", "col", "scalar"]
UpdateRule = Literal["adamw", "muon", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One tensor in training: a raw weight, a vector, or the multipliers of a matrix."""

    name: str
    """Of the parameter."""
    part: Part
    """`weight`: the parameter itself, or the raw weight behind it; or which multiplier."""
    kind: Literal["matrix", "multiplier", "vector"]
    matrix: Matrix | None
    """What the plan says of the parameter."""
    value: Tensor
    """As trained: the stored value of a multiplier, its logarithm on the log scale."""
    start_rms: float | None
    """RMS before the first step, where that can be known now: of multipliers."""
    rule: UpdateRule
    lr_scale: float
    """The tensor's learning rate over that of the first parameter group."""
    weight_decay: float
    steps: int
    """Steps in which it had a gradient."""
    first: Tensor | None
    """Average of the gradient with beta1; None where the optimizer keeps none that is known."""
    second: Tensor | None
    """Average of the squared gradient with beta2: number by number, or one for all."""
    beta1: float
    beta2: float
    """0 where the average needs no correction for its start."""

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all others: name and part."""
        return self.name, self.part


@torch.no_grad()
def trained_tensors(optimizer: MultiplierOptimizer) -> Iterator[Trained]:
    """Yield everything an optimizer trains; sharded tensors are gathered, so on all ranks alike."""
    base = float(optimizer.param_groups[0]["lr"])
    for parameter in optimizer.parameter_states():
        # Groups mostly share one rate; those of a wrapped optimizer may not.
        rate = float(parameter.group["lr"])
        yield from _tensors_of(optimizer, parameter, rate / base if rate and base else 1.0)


def _tensors_of(
    optimizer: MultiplierOptimizer, parameter: ParameterState, share: float
) -> Iterator[Trained]:
    group, matrix = parameter.group, parameter.matrix
    state = optimizer.state[parameter.parameter]
    adamw_betas = optimizer.adamw_settings(group)[:2]
    rule = _rule(optimizer, group, matrix)
    moments = optimizer.moments_of(parameter)
    if isinstance(optimizer, Muon) and rule == "muon":
        names, betas = ("momentum_buffer", MEAN_SQUARE), (optimizer.momentum, 0.0)
    else:
        wrapped = isinstance(optimizer, LearnableMultipliers)
        names = ("exp_avg", "exp_avg_sq")
        betas = group.get("betas", adamw_betas) if wrapped else adamw_betas
    first, second = (full(moments[key]) if key in moments else None for key in names)
    is_matrix = matrix is not None or group["kind"] == "matrix"
    shared: dict[str, Any] = {"name": parameter.name, "matrix": matrix, "steps": int(state["step"])}
    yield Trained(
        part="weight",
        kind="matrix" if is_matrix else "vector",
        value=full(state.get("raw", parameter.parameter.detach())),
        start_rms=None,
        rule=rule,
        lr_scale=share * optimizer.raw_lr({**group, "lr": 1.0}, matrix),
        weight_decay=float(group.get("weight_decay", 0.0)),
        first=first,
        second=second,
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        **shared,
    )
    if matrix is None or not matrix.carries:
        return
    start = initial_values(matrix)
    for part in NAMES:
        if part not in state:
            continue

        def carried(value: Tensor, part: str = part) -> Tensor:
            return carried_rows(matrix, full(value)) if part == "row" else full(value)

        yield Trained(
            part=part,
            kind="multiplier",
            value=carried(state[part]),
            start_rms=carried(start[part]).square().mean().sqrt().item(),
            rule="adamw",
            lr_scale=share * group["multiplier_lr_scale"],
            weight_decay=float(group["multiplier_weight_decay"]),
            first=carried(state[f"{part}_exp_avg"]),
            second=carried(state[f"{part}_exp_avg_sq"]),
            beta1=adamw_betas[0],
            beta2=adamw_betas[1],
            **shared,
        )


def _rule(
    optimizer: MultiplierOptimizer, group: dict[str, Any], matrix: Matrix | None
) -> UpdateRule:
    """Tell how a raw weight is updated."""
    if isinstance(optimizer, Muon):
        return "muon" if is_hidden(matrix) else "adamw"
    if not isinstance(optimizer, LearnableMultipliers):
        return "adamw"
    inner = optimizer.inner
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return "unknown"
    # Adam's own decay goes through the second moment, and is another thing.
    apart = isinstance(inner, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
    return "adamw" if apart or not group.get("weight_decay") else "unknown"
