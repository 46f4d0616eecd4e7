"""Measure the drift of multipliers along the scale symmetries of a model, and undo it.

Nothing in the loss holds a scale in its place along a symmetry (paper sec. 4.1), so noise moves it.
With x_e the scales, s_k the free factor of each member k of a symmetry (a channel, a head) and P_ek
the power with which it multiplies x_e, an orbit is log|x_e| + sum_k P_ek log s_k.

The scales of an axis are the rows, columns or scalars that a matrix carries, a vector, or the rows
or columns of a filter: a parameter of three or more dimensions that carries nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers._multiplier import Matrix, effective, keep_carried_rows
from learnable_multipliers.kernels._parameter import ParameterState
from learnable_multipliers.optim._accessors import unwrap
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.symmetry import Axis, Symmetry

# Largest error of a member's coordinate in a solution, in log units.
_BALANCED = 1e-13
_MOST_ITERATIONS = 10_000
# Rounds to a power of two only this much above the half, so that a second call changes nothing.
_MARGIN = 1e-6


@dataclass(frozen=True)
class Drift:
    """How far the members of a symmetry are along their orbits, in log units."""

    symmetry: Symmetry
    rms: float
    """Over members."""
    largest: float
    """In absolute value."""
    num_zero: int
    """Scales of exactly 0, which have no logarithm and are left out."""

    def __str__(self) -> str:
        return f"rms {self.rms:.3g}, largest {self.largest:.3g}: {self.symmetry}"


def symmetry_positions(opt: Optimizer, symmetries: Iterable[Symmetry]) -> tuple[Tensor, ...]:
    """Return the position of each member of each symmetry along its orbit, in log units.

    t = sum_e p_e log|x_e| / sum_e p_e^2 over the scales of a member: a factor s moves it by log s,
    and it is 0 where all scales are 1. Keep it at the start of a run for `drift(..., since=)`.
    """
    return Orbits(unwrap(opt), symmetries).positions()


def drift(
    opt: Optimizer,
    symmetries: Iterable[Symmetry],
    *,
    since: Sequence[Tensor] | None = None,
) -> tuple[Drift, ...]:
    """Return how far scales have drifted along each symmetry: `rms` and `largest`, in log units.

    Args:
        since: Positions to measure from, as `lrm.symmetry_positions` returned them; by default
            those of scales of 1. Norm weights and folded multipliers do not start at 1: the drift
            of a run is the difference from its start.
    """
    orbits = Orbits(unwrap(opt), symmetries)
    now = orbits.positions()
    if since is not None:
        if [len(t) for t in since] != [len(t) for t in now]:
            raise ValueError(
                f"`since` holds positions of {len(since)} symmetries that are not these "
                f"{len(now)}; give what symmetry_positions(opt, symmetries) returned for "
                "the same ones"
            )
        now = tuple(t - before for t, before in zip(now, since, strict=True))
    return tuple(
        Drift(symmetry, float(t.square().mean().sqrt()), float(t.abs().max()), zeros)
        for symmetry, t, zeros in zip(orbits.symmetries, now, orbits.num_zero, strict=True)
    )


def rebalance_(
    opt: Optimizer, symmetries: Iterable[Symmetry], *, powers_of_two: bool = False
) -> None:
    """Move along all symmetries to the point of least squared logs; the model's outputs stay.

    minimize sum_e (log|x_e| + sum_k P_ek log s_k)^2 over all log s_k together, since a scale may
    have a part in several symmetries; then x_e <- x_e prod_k s_k^P_ek. There every position is 0.
    The scales x_e are multipliers, vectors and filters. Their gradients are divided by the same
    factors, so moments become m / s^p and v / s^2p; raw weights and their moments do not change.
    Zeros stay zero.

    With `powers_of_two` each s_k is the nearest power of two and the model computes bit for bit the
    same, in bfloat16 too. A symmetry of kind "normalization" is exact up to the small constant in
    the norm: leave it out where that matters.

    Call it between steps, every few hundred: the next step moves multipliers by the same absolute
    amounts as before, so by other relative amounts.
    """
    opt = unwrap(opt)
    orbits = Orbits(opt, symmetries)
    doublings = orbits.balanced() / math.log(2)
    if powers_of_two:
        for axis, values in orbits.values.items():
            if not values.doubles_exactly:
                stored = "as x - 1" if axis.offset else "by its logarithm"
                raise ValueError(
                    f"{axis} ({axis.kind}) is stored {stored}, where a factor of two rounds: leave "
                    "out powers_of_two, or the symmetries that have a term with it"
                )
        # Halves round towards 0, so that the remainder of a rounding rounds to 0.
        whole = (doublings.abs() - 0.5 - _MARGIN).ceil().clamp(min=0)
        doublings = doublings.sign() * whole
    # exp2 of an integer is exact.
    multiply_(opt, {axis: along.exp2() for axis, along in orbits.by_axis(doublings).items()})


class Orbits:
    """The matrix P by its nonzero entries, and the logs of all scales.

    `power` is the entry of P for the scale `entry` and the member `member`, counted through all
    symmetries. A scale of 0 has no part in P, and `num_zero` counts those by symmetry.
    """

    def __init__(self, opt: MultiplierOptimizer, symmetries: Iterable[Symmetry]):
        self.symmetries = tuple(symmetries)
        axes = dict.fromkeys(term.axis for symmetry in self.symmetries for term in symmetry.terms)
        self.values = read_axis_values(opt, axes)
        by_owner = {values.owner: values.values for values in self.values.values()}
        starts = itertools.accumulate(map(len, by_owner.values()), initial=0)
        start_of = dict(zip(by_owner, starts, strict=False))
        x = torch.cat([*by_owner.values(), torch.empty(0, dtype=torch.float64)])
        self.logs = x.abs().log().where(x != 0, torch.zeros_like(x))
        self.num_zero: list[int] = []
        none = torch.empty(0, dtype=torch.int64)
        nonzeros = [(none, none, none.double())]
        first = 0
        for symmetry in self.symmetries:
            zeros = 0
            for term in symmetry.terms:
                values = self.values[term.axis]
                _check_fit(term.axis, values, term.members)
                member = term.members[values.index]
                entry = torch.arange(len(member)) + start_of[values.owner]
                present = (member >= 0) & (x[entry] != 0)
                zeros += int((member >= 0).sum() - present.sum())
                power = torch.full_like(x[entry], term.power)
                nonzeros.append((entry[present], member[present] + first, power[present]))
            self.num_zero.append(zeros)
            first += symmetry.num_members
        self.entry, self.member, self.power = map(torch.cat, zip(*nonzeros, strict=True))

    def positions(self) -> tuple[Tensor, ...]:
        """Return t by symmetry and member; 0 for a member without a scale."""
        return self._by_symmetry(self._across(self.logs) / self._squares())

    def balanced(self) -> Tensor:
        """Return the log s of all members that solve P'P log s = -P' log|x|.

        By conjugate gradients, scaled by the diagonal of P'P: P has a few entries in a row.
        """
        squares = self._squares()
        solution = torch.zeros_like(squares)
        rest = -self._across(self.logs)
        scaled = rest / squares
        heading, size = scaled, rest @ scaled
        for _ in range(_MOST_ITERATIONS):
            if not (scaled.abs() > _BALANCED).any():
                return solution
            image = self._across(self._along(heading))
            length = size / (heading @ image)
            solution = solution + length * heading
            rest = rest - length * image
            scaled = rest / squares
            before, size = size, rest @ scaled
            heading = scaled + size / before * heading
        raise RuntimeError(
            f"the balanced point of {len(self.symmetries)} symmetries was not found in "
            f"{_MOST_ITERATIONS} iterations, {float(scaled.abs().max()):.1e} away; please report it"
        )

    def by_axis(self, logs: Tensor) -> dict[Axis, Tensor]:
        """Return the sum of members' logs at every entry of every axis, including zeros."""
        sums: dict[Axis, Tensor] = {}
        for symmetry, part in zip(self.symmetries, self._by_symmetry(logs), strict=True):
            for axis, along in symmetry.log_factors(part).items():
                sums[axis] = sums.get(axis, 0.0) + along
        return sums

    def _squares(self) -> Tensor:
        """Return the diagonal of P'P: sum_e p_e^2 of each member, 1 for one without a scale."""
        squares = self._by_member(self.power.square())
        return squares.where(squares > 0, torch.ones_like(squares))

    def _by_symmetry(self, values: Tensor) -> tuple[Tensor, ...]:
        return values.split([symmetry.num_members for symmetry in self.symmetries])

    def _along(self, log_scales: Tensor) -> Tensor:
        """Return P log s."""
        moved = torch.zeros_like(self.logs)
        return moved.index_add_(0, self.entry, self.power * log_scales[self.member])

    def _across(self, logs: Tensor) -> Tensor:
        """Return P' logs."""
        return self._by_member(self.power * logs[self.entry])

    def _by_member(self, values: Tensor) -> Tensor:
        num_members = sum(symmetry.num_members for symmetry in self.symmetries)
        return values.new_zeros(num_members).index_add_(0, self.member, values)


def _check_fit(axis: Axis, values: AxisValues, members: Tensor) -> None:
    size = len(values.carried)
    if len(members) != size:
        raise ValueError(
            f"the symmetry has {len(members)} entries for {axis} ({axis.kind}), the optimizer "
            f"{size}: it was found on a model of another size"
        )
    extra = int(((members >= 0) & ~values.carried).sum())
    if extra:
        raise ValueError(
            f"the symmetry scales {extra} {axis} that carry no multiplier in this optimizer. Find "
            "the symmetries with the plan it was made with: "
            "lrm.find_symmetries(model, plan, inputs)"
        )


_DEGREES = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1}
"""Powers of the gradient in the moments that optimizers keep under these names."""


@dataclass(frozen=True)
class AxisValues:
    """The numbers that an axis scales."""

    values: Tensor
    """Flat, float64 on the CPU. For a filter, the l2 norm over the taps of each pair of channels:
    its gain on white noise, 1 if the filter is neutral."""
    owner: Axis
    """The axis that stands for these values: rows and columns of a filter scale the same ones."""
    index: Tensor
    """The entry of the axis that scales each of the values."""
    carried: Tensor
    """Which entries of the axis exist: not the rows of blocks that carry none."""
    doubles_exactly: bool = True
    """Whether a factor of two is exact in the stored form of the values."""


def read_axis_values(opt: MultiplierOptimizer, axes: Iterable[Axis]) -> dict[Axis, AxisValues]:
    """Return the values of some axes; raise for those that the optimizer does not train."""
    states = {state.name: state for state in opt.parameter_states()}
    multipliers, raw = opt.multipliers(), opt.raw_weights()
    by_axis = {}
    for axis in axes:
        state = states.get(axis.name)
        if state is None or not _trains(state, axis):
            raise ValueError(
                f"{axis} ({axis.kind}) is not a scale that this optimizer trains. Find the "
                "symmetries with the plan it was made with: "
                "lrm.find_symmetries(model, plan, inputs)"
            )
        matrix = state.matrix
        if not axis.is_vector and matrix is None:
            by_axis[axis] = _filter(axis, raw[axis.name])
            continue
        stored = raw[axis.name] if axis.is_vector else multipliers[axis.name][axis.kind]
        values = (stored.detach() + axis.offset).to("cpu", torch.float64)
        carried = torch.ones(values.shape, dtype=torch.bool)
        if matrix is not None and axis.kind == "row":
            carried = keep_carried_rows(matrix, carried)
        exact = not axis.offset and not (matrix and matrix.scale == "log")
        index = torch.arange(values.numel())
        by_axis[axis] = AxisValues(values.flatten(), axis, index, carried.flatten(), exact)
    for axis, read in by_axis.items():
        if not read.values.isfinite().all():
            raise ValueError(f"{axis} ({axis.kind}) holds numbers that are not finite")
    return by_axis


@torch.no_grad()
def multiply_(opt: MultiplierOptimizer, factors: Mapping[Axis, Tensor]) -> None:
    """Multiply the entries of axes by factors, and write the effective weights.

    With x' = f x a gradient is g' = g / f, so moments become m / f and v / f^2; gradients that are
    present are divided too. On the log scale the stored value moves by log f, and its gradient,
    x dL/dx, stays. Raw weights under multipliers and their moments do not change.
    """
    by_name: dict[str, dict[Axis, Tensor]] = {}
    for axis, factor in factors.items():
        if bool((factor != 1).any()):
            by_name.setdefault(axis.name, {})[axis] = factor
    with opt.rewriting(by_name.keys()) as states:
        for state in states:
            _check_movable(opt, state)
        for state in states:
            if state.carries:
                _multiply_multipliers_(state, by_name[state.name])
            else:
                _multiply_parameter_(opt, state, by_name[state.name])


def _multiply_multipliers_(state: ParameterState, factors: Mapping[Axis, Tensor]) -> None:
    assert state.matrix is not None
    stored = state.multipliers
    inverse = {
        kind: torch.ones(shape, dtype=torch.float64)
        for kind, shape in state.matrix.value_shapes().items()
    }
    for axis, flat in factors.items():
        value = stored[axis.kind]
        inverse[axis.kind] = (1 / flat).view(value.shape)
        if state.matrix.scale == "log":
            value.add_(flat.log().view(value.shape).to(value))
            continue
        factor = flat.view(value.shape).to(value)
        value.mul_(factor)
        stored[f"{axis.kind}_exp_avg"].div_(factor)
        stored[f"{axis.kind}_exp_avg_sq"].div_(factor.square())
    grad = state.parameter.grad
    if grad is not None:
        linear: Matrix = replace(state.matrix, scale="linear")
        # Divided as the weight is multiplied: G' = G / (row col).
        inverse = {kind: value.to(state.raw) for kind, value in inverse.items()}
        grad.copy_(effective(linear, grad.to(state.raw.dtype), inverse))


def _multiply_parameter_(
    opt: MultiplierOptimizer, state: ParameterState, factors: Mapping[Axis, Tensor]
) -> None:
    raw = state.raw
    for axis, flat in factors.items():
        dim = {"row": 0, "col": 1}.get(axis.kind)
        shape = raw.shape if dim is None else [-1 if i == dim else 1 for i in range(raw.ndim)]
        factor = flat.view(shape).to(raw)
        if axis.offset:
            raw.add_(axis.offset).mul_(factor).sub_(axis.offset)
        else:
            raw.mul_(factor)
        for name, moment in opt.moments_of(state).items():
            if name in _DEGREES:
                moment.div_(factor ** _DEGREES[name])
        if state.parameter.grad is not None:
            state.parameter.grad.div_(factor)


def _trains(state: ParameterState, axis: Axis) -> bool:
    if axis.is_vector:
        return state.matrix is None and state.parameter.ndim <= 1
    if state.matrix is not None:
        return axis.kind in state.matrix.value_shapes()
    return axis.kind in ("row", "col") and state.parameter.ndim >= 3


def _filter(axis: Axis, weight: Tensor) -> AxisValues:
    gains = weight.detach().to("cpu", torch.float64).flatten(2).norm(dim=2)  # (out, in)
    out, into = gains.shape
    index = torch.arange(out)[:, None] if axis.kind == "row" else torch.arange(into)
    return AxisValues(
        values=gains.flatten(),
        owner=Axis(axis.name, "row"),
        index=index.expand(out, into).flatten(),
        carried=torch.ones(out if axis.kind == "row" else into, dtype=torch.bool),
    )


def _check_movable(opt: MultiplierOptimizer, state: ParameterState) -> None:
    if state.sharded:
        raise NotImplementedError(
            f"{state.name} is sharded, and scales are moved on whole tensors only: load a full "
            "checkpoint of model and optimizer in one process, move them there, and save it again"
        )
    if state.carries:
        return
    for name, moment in opt.moments_of(state).items():
        # A single number, as a product of betas, belongs to the step and not to an entry.
        by_entry = moment.numel() > 1 or state.parameter.numel() == 1
        if by_entry and name != "step" and name not in _DEGREES:
            raise ValueError(
                f"the wrapped optimizer keeps {name!r} for {state.name}, and how that changes with "
                "the scale is not known here. Leave out the symmetries that have a term with "
                "this parameter, or train with lrm.AdamW or lrm.Muon"
            )
