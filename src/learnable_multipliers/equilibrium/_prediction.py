"""Every tensor that an optimizer trains, and the rms that noise alone would have given it by now.

Tensors come with their moments, rate and decay, and are read only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix, carried_rows, initial_values
from learnable_multipliers.equilibrium._random_walk import (
    BrownianState,
    RandomWalk,
    adamw_walk,
    brownian_step,
    mixed_walk,
    muon_walk,
    walk_equilibrium,
)
from learnable_multipliers.kernels._parameter import ParameterState
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._binding import MEAN_SQUARE
from learnable_multipliers.optim._muon import Muon, is_hidden
from learnable_multipliers.optim._packed_multipliers import NAMES
from learnable_multipliers.optim._sharding import full
from learnable_multipliers.optim._wrapper import LearnableMultipliers

Part = Literal["weight", "row", "col", "scalar"]
UpdateRule = Literal["adamw", "muon", "unknown"]

_SPARSE = {"embedding", "tied-embedding", "position-embedding"}


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
        """Name and part: unique in an optimizer."""
        return self.name, self.part


def check_optimizer(what: str, optimizer: object) -> None:
    """Raise if an optimizer is none whose tensors can be read."""
    if not isinstance(optimizer, MultiplierOptimizer):
        raise TypeError(
            f"{what} reads lrm.AdamW, lrm.Muon and lrm.LearnableMultipliers, not "
            f"{type(optimizer).__name__}; wrap it: lrm.LearnableMultipliers(optimizer, model, plan)"
        )


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
        names, betas = ("momentum_buffer", MEAN_SQUARE), (float(group["momentum"]), 0.0)
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
    """Return how a raw weight is updated."""
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


def has_sparse_rows(matrix: Matrix | None) -> bool:
    """Return whether this is an embedding, whose rows get gradients when their tokens occur."""
    return matrix is not None and any(block.role in _SPARSE for block in matrix.blocks)


class TensorWalk(NamedTuple):
    """The random walk of a tensor relative to its run; tensors with equal ones share it."""

    walk: RandomWalk
    lr_scale: float
    """Learning rate over that of the run."""
    weight_decay: float


def tensor_walk(optimizer: MultiplierOptimizer, tensor: Trained) -> TensorWalk | None:
    """Return a tensor's random walk; None for an optimizer whose walk is not known."""
    if tensor.rule == "adamw":
        walk = adamw_walk(tensor.beta1)
    elif tensor.rule == "muon" and isinstance(optimizer, Muon):
        matrix = tensor.matrix
        assert matrix is not None
        sizes = [block.size * matrix.repeats for block in matrix.blocks]
        # Muon orthogonalizes block by block.
        walks = [
            muon_walk(
                tensor.beta1,
                optimizer.nesterov,
                adjust_lr=optimizer.adjust_lr,
                shape=(size, matrix.num_in),
                coefficients=optimizer.coefficients,
            )
            for size in sizes
        ]
        walk = mixed_walk(walks, sizes)
    else:
        return None
    return TensorWalk(walk, tensor.lr_scale, tensor.weight_decay)


@dataclass(frozen=True)
class Expectation:
    """The effect of a run on noise on a tensor, for any start."""

    spread: float
    """RMS that a tensor starting at zero would have by now."""
    kept: float
    """What decay has left of the start: the product of 1 - lr wd over all steps."""

    @property
    def settling(self) -> float:
        """2 wd sum(lr): minus the logarithm of what is left of the start's square."""
        return 2 * math.log(1 / self.kept) if self.kept > 0 else math.inf

    def rms(self, start_rms: float) -> float:
        """Return the expected rms: start and noise are independent, so their squares add up."""
        return math.hypot(self.spread, self.kept * start_rms)

    def log_error(self, start_rms: float, size: int) -> float | None:
        """Return the standard deviation of log(rms) over tensors of this many numbers.

        For mean squares of x + y z with z ~ N(0,1): sqrt(4 x^2 y^2 + 2 y^4) / (2 rms^2 sqrt(n)),
        1/sqrt(2n) once the start x is forgotten.
        """
        left, square = self.kept * start_rms, self.rms(start_rms) ** 2
        if not square or not size or math.isinf(square):
            return None
        deviation = math.sqrt(4 * (left * self.spread) ** 2 + 2 * self.spread**4)
        return deviation / (2 * square * math.sqrt(size))


class Expectations:
    """Expected random walks of the tensors of a run, step by step; equal ones are computed once."""

    def __init__(self, walks: Iterable[TensorWalk | None]):
        known = (walk for walk in walks if walk is not None)
        self._states = dict.fromkeys(known, (BrownianState(0.0), 1.0))
        self.steps = 0

    def step(self, lr: float) -> None:
        """Follow one step of a run, at its learning rate."""
        self.steps += 1
        for walk, (state, kept) in self._states.items():
            own, decay = lr * walk.lr_scale, walk.weight_decay
            state = brownian_step(state, own, decay, walk.walk)
            self._states[walk] = state, kept * abs(1 - own * decay)

    def of(self, walk: TensorWalk) -> Expectation:
        """Return what is expected by now of one of the walks."""
        state, kept = self._states[walk]
        return Expectation(state.rms, kept)


def steady_expectation(walk: RandomWalk, lr: float, weight_decay: float, steps: int) -> Expectation:
    """Return what is expected if the rate has always been this one."""
    kept = abs(1 - lr * weight_decay) ** steps
    return Expectation(walk_equilibrium(lr, weight_decay, walk) * math.sqrt(1 - kept**2), kept)
