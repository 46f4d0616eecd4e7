"""Every tensor that an optimizer trains, and the rms that noise alone would have given it by now.

Tensors come with their moments, rate and decay, and are read only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from learnable_multipliers._multiplier import (
    MULTIPLIERS,
    Matrix,
    MultiplierName,
    carried_rows,
    initial_values,
)
from learnable_multipliers.equilibrium._random_walk import (
    SETTLED,
    BrownianState,
    RandomWalk,
    adamw_walk,
    brownian_step,
    mixed_walk,
    muon_walk,
)
from learnable_multipliers.kernels._parameter import ParameterState
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._batches import AdjustLr, Split, num_rows
from learnable_multipliers.optim._binding import MEAN_SQUARE
from learnable_multipliers.optim._muon import Muon, is_hidden
from learnable_multipliers.optim._orthogonalization import Coefficients
from learnable_multipliers.optim._sharding import full
from learnable_multipliers.optim._wrapper import LearnableMultipliers

TensorPart = Literal["weight"] | MultiplierName


class TensorWalk(NamedTuple):
    """The random walk of a tensor relative to its run; tensors with equal ones share it."""

    walk: RandomWalk
    lr_scale: float
    """Learning rate over that of the first parameter group."""
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class TrainedTensor:
    """One tensor in training: a raw weight, a vector, or the multipliers of a matrix."""

    name: str
    """Of the parameter."""
    part: TensorPart
    """`weight`: the parameter itself, or its raw weight; otherwise the multiplier."""
    kind: Literal["matrix", "multiplier", "vector"]
    matrix: Matrix | None
    """The plan's matrix of the parameter."""
    value: Tensor
    """As trained: the stored value of a multiplier, its logarithm on the log scale."""
    start_rms: float | None
    """RMS before the first step; known afterwards only for multipliers."""
    walk: TensorWalk | None
    """On noise; None for an optimizer whose walk is not known."""
    steps: int
    """Steps in which it had a gradient."""
    first: Tensor | None
    """Average of the gradient with beta1; None if no known one is kept."""
    second: Tensor | None
    """Average of the squared gradient with beta2: elementwise, or one number for all."""
    betas: tuple[float, float]
    """beta2 is 0 if the average of squares needs no bias correction."""

    @property
    def key(self) -> tuple[str, str]:
        """Name and part: unique in an optimizer."""
        return self.name, self.part

    @property
    def is_embedding(self) -> bool:
        """Whether a row gets a gradient only if its token occurs."""
        blocks = self.matrix.blocks if self.matrix and self.part == "weight" else ()
        return any(block.role.endswith("embedding") for block in blocks)


@torch.no_grad()
def trained_tensors(optimizer: MultiplierOptimizer) -> Iterator[TrainedTensor]:
    """Yield all tensors that an optimizer trains; collective, as sharded ones are gathered."""
    base = float(optimizer.param_groups[0]["lr"])
    for parameter in optimizer.parameter_states():
        # Groups mostly share one rate; those of a wrapped optimizer may not.
        rate = float(parameter.group["lr"])
        yield from _tensors_of(optimizer, parameter, rate / base if rate and base else 1.0)


def _tensors_of(
    optimizer: MultiplierOptimizer, parameter: ParameterState, share: float
) -> Iterator[TrainedTensor]:
    group, matrix = parameter.group, parameter.matrix
    state = optimizer.state[parameter.parameter]
    names, betas, walk = _raw_moments(optimizer, group, matrix)
    moments = optimizer.moments_of(parameter)
    first, second = (full(moments[name]) if name in moments else None for name in names)
    lr_scale = share * optimizer.raw_lr({**group, "lr": 1.0}, matrix)
    weight_decay = float(group.get("weight_decay", 0.0))
    is_matrix = matrix is not None or group["kind"] == "matrix"
    shared: dict[str, Any] = {"name": parameter.name, "matrix": matrix, "steps": int(state["step"])}
    if parameter.trains_raw:
        yield TrainedTensor(
            part="weight",
            kind="matrix" if is_matrix else "vector",
            value=full(state.get("raw", parameter.parameter.detach())),
            start_rms=None,
            walk=walk and TensorWalk(walk, lr_scale, weight_decay),
            first=first,
            second=second,
            betas=betas,
            **shared,
        )
    if matrix is None or not matrix.carries:
        return
    start, betas = initial_values(matrix), optimizer.adamw_settings(group)[:2]
    lr_scale = share * group["multiplier_lr_scale"]
    weight_decay = float(group["multiplier_weight_decay"])
    for part in MULTIPLIERS:
        if part not in state:
            continue

        def carried(value: Tensor, part: str = part) -> Tensor:
            return carried_rows(matrix, full(value)) if part == "row" else full(value)

        yield TrainedTensor(
            part=part,
            kind="multiplier",
            value=carried(state[part]),
            start_rms=carried(start[part]).square().mean().sqrt().item(),
            walk=TensorWalk(adamw_walk(betas[0]), lr_scale, weight_decay),
            first=carried(state[f"{part}_exp_avg"]),
            second=carried(state[f"{part}_exp_avg_sq"]),
            betas=betas,
            **shared,
        )


def _raw_moments(
    optimizer: MultiplierOptimizer, group: dict[str, Any], matrix: Matrix | None
) -> tuple[tuple[str, str], tuple[float, float], RandomWalk | None]:
    """Return names and betas of a raw weight's moments, and its walk on noise if known."""
    if isinstance(optimizer, Muon) and matrix is not None and is_hidden(matrix):
        momentum, adjust_lr = float(group["momentum"]), optimizer.adjust_lr
        walk = _muon_walk(
            matrix,
            momentum,
            optimizer.nesterov,
            adjust_lr,
            optimizer.coefficients,
            optimizer.split,
        )
        return ("momentum_buffer", MEAN_SQUARE), (momentum, 0.0), walk
    betas, known = optimizer.adamw_settings(group)[:2], True
    if isinstance(optimizer, LearnableMultipliers):
        beta1, beta2 = group.get("betas", betas)
        betas, inner = (float(beta1), float(beta2)), optimizer.inner
        # Adam's coupled decay goes through the second moment and is not predicted.
        apart = isinstance(inner, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
        known = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        known = known and (apart or not group.get("weight_decay"))
    return ("exp_avg", "exp_avg_sq"), betas, adamw_walk(betas[0]) if known else None


@lru_cache(maxsize=256)
def _muon_walk(
    matrix: Matrix,
    momentum: float,
    nesterov: bool,
    adjust_lr: AdjustLr,
    coefficients: Coefficients,
    split: Split,
) -> RandomWalk:
    """Return the walk of a matrix that Muon orthogonalizes block by block, or head by head."""
    walks = [
        muon_walk(
            momentum,
            nesterov,
            adjust_lr=adjust_lr,
            shape=(num_rows(matrix, block, split), matrix.num_in),
            coefficients=coefficients,
        )
        for block in matrix.blocks
    ]
    return mixed_walk(walks, [block.size * matrix.repeats for block in matrix.blocks])


@dataclass(frozen=True)
class Expectation:
    """The effect of a run of pure noise on a tensor, for any start."""

    spread: float
    """RMS that a tensor starting at zero would have by now."""
    kept: float
    """Share of the start that decay has left: the product of 1 - lr wd over all steps."""

    @property
    def settling(self) -> float:
        """2 wd sum(lr): minus the logarithm of the share of the start's square that is left."""
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
    """Expected random walks of a run's tensors, step by step; equal ones are computed once."""

    def __init__(
        self, walks: Mapping[tuple[str, str], TensorWalk | None], lrs: Iterable[float] = ()
    ):
        self.walks = walks
        known = (walk for walk in walks.values() if walk is not None)
        self._states = dict.fromkeys(known, (BrownianState(0.0), 1.0))
        self.steps = 0
        for lr in lrs:
            self.step(lr)

    def step(self, lr: float) -> None:
        """Follow one step of a run, at its learning rate."""
        self.steps += 1
        for walk, (state, kept) in self._states.items():
            own, decay = lr * walk.lr_scale, walk.weight_decay
            state = brownian_step(state, own, decay, walk.walk)
            self._states[walk] = state, kept * abs(1 - own * decay)

    def state(self) -> dict[str, Any]:
        """Return the state of the walks as plain numbers and strings."""
        walks = [
            {
                "walk": asdict(walk.walk),
                "lr_scale": walk.lr_scale,
                "weight_decay": walk.weight_decay,
                "state": state._asdict(),
                "kept": kept,
            }
            for walk, (state, kept) in self._states.items()
        ]
        return {"steps": self.steps, "walks": walks}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the same walks."""
        try:
            steps = int(state["steps"])
            states = {
                TensorWalk(RandomWalk(**entry["walk"]), entry["lr_scale"], entry["weight_decay"]): (
                    BrownianState(**entry["state"]),
                    float(entry["kept"]),
                )
                for entry in state["walks"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "not the state of a monitor, or of another version of it: "
                f"{type(error).__name__}: {error}"
            ) from error
        differing = sorted(map(str, states.keys() ^ self._states.keys()))
        if differing:
            raise ValueError(
                "this state is of another run, or settings were changed: only one of the two has "
                f"{differing[0]}"
            )
        self.steps = steps
        self._states = {walk: states[walk] for walk in self._states}

    def of(self, tensor: TrainedTensor, taken: int) -> tuple[Expectation | None, str]:
        """Return the expectation for a tensor after the steps taken, or None and the reason."""
        walk = self.walks[tensor.key]
        reason = _unpredictable(tensor, walk)
        if walk is None or reason:
            return None, reason
        if tensor.steps < taken:
            return None, f"had a gradient in {tensor.steps} of {taken} steps"
        if tensor.walk is None or tensor.walk.weight_decay != walk.weight_decay:
            return None, "its decay was changed during the run"
        state, kept = self._states[walk]
        return Expectation(state.rms, kept), ""


def steady_expectation(tensor: TrainedTensor, base_lr: float) -> tuple[Expectation | None, str]:
    """Return the expectation if the rate was always this one, and a reason to doubt it, or ""."""
    reason = _unpredictable(tensor, tensor.walk)
    if tensor.walk is None or reason:
        return None, reason
    walk, lr_scale, weight_decay = tensor.walk
    lr = lr_scale * base_lr
    if lr * weight_decay == 0:
        missing = "no decay" if lr else "the rate is 0 now"
        return None, f"{missing}, so no equilibrium: give lrs and start"
    kept = abs(1 - lr * weight_decay) ** tensor.steps
    expected = Expectation(walk.equilibrium(lr, weight_decay) * math.sqrt(1 - kept**2), kept)
    early = "too early for the equilibrium at the present rate: give lrs"
    return expected, "" if expected.settling >= SETTLED else early


def _unpredictable(tensor: TrainedTensor, walk: TensorWalk | None) -> str:
    """Return why noise predicts nothing about a tensor; empty if it predicts something."""
    if walk is None:
        return "its optimizer's random walk on noise is not known"
    if tensor.steps == 0:
        return "no step yet"
    return "row by row: see the rows" if tensor.is_embedding else ""
