"""The rms that noise alone would have given each tensor of an optimizer by now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.equilibrium._introspection import Trained
from learnable_multipliers.equilibrium._random_walk import (
    BrownianState,
    RandomWalk,
    adamw_walk,
    brownian_step,
    mixed_walk,
    muon_walk,
    walk_equilibrium,
)
from learnable_multipliers.optim import Muon
from learnable_multipliers.optim._base import MultiplierOptimizer

_SPARSE = {"embedding", "tied-embedding", "position-embedding"}


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
                optimizer.momentum,
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


def decayed(lrs: Sequence[float], weight_decay: float) -> float:
    """Return what decay alone leaves of a weight."""
    return math.prod(abs(1 - lr * weight_decay) for lr in lrs)
