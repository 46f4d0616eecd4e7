"""The scales that an optimizer trains, by axis: read, and multiplied with what belongs to them.

An axis is the rows, columns or scalars that a matrix carries, a vector, or the rows or columns of a
filter: a parameter of three or more dimensions that carries nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix, effective, keep_carried_rows
from learnable_multipliers.kernels._parameter import ParameterState
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.symmetry import Axis

_DEGREES = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1}
"""Powers of the gradient in the moments that optimizers keep under these names."""


@dataclass(frozen=True)
class Scale:
    """The numbers that an axis scales."""

    values: Tensor
    """Flat, float64 on the CPU. Of a filter the l2 norm over its taps, for each pair of channels:
    its gain on white noise, 1 where the filter is neutral."""
    owner: Axis
    """Whose numbers these are: rows and columns of a filter scale the same ones."""
    index: Tensor
    """The entry of the axis that scales each of the values."""
    carried: Tensor
    """Which entries of the axis there are: not the rows of blocks that carry none."""
    doubles_exactly: bool = True
    """Whether a factor of two is exact in the way the values are stored."""


def read_scales(opt: MultiplierOptimizer, axes: Iterable[Axis]) -> dict[Axis, Scale]:
    """Return the scales of some axes; refuse those that the optimizer does not train."""
    states = {state.name: state for state in opt.parameter_states()}
    multipliers, raw = opt.multipliers(), opt.raw_weights()
    found = {}
    for axis in axes:
        state = states.get(axis.name)
        if state is None or not _trains(state, axis):
            raise ValueError(
                f"{axis} ({axis.kind}) is not a scale that this optimizer trains. Find the "
                "symmetries with the plan it was made with: "
                "lrm.find_symmetries(model, plan, inputs)"
            )
        carried = None
        if axis.is_vector:
            values = raw[axis.name] + axis.offset
        elif state.matrix is not None:
            values = multipliers[axis.name][axis.kind]
            if axis.kind == "row":
                carried = keep_carried_rows(state.matrix, torch.ones(values.shape)).bool().flatten()
        else:
            found[axis] = _filter(axis, raw[axis.name])
            continue
        values = values.detach().to("cpu", torch.float64).flatten()
        if carried is None:
            carried = torch.ones(len(values), dtype=torch.bool)
        exact = not axis.offset and not (state.matrix and state.matrix.scale == "log")
        found[axis] = Scale(values, axis, torch.arange(len(values)), carried, exact)
    for axis, scale in found.items():
        if not scale.values.isfinite().all():
            raise ValueError(f"{axis} ({axis.kind}) holds numbers that are not finite")
    return found


@torch.no_grad()
def multiply_(opt: MultiplierOptimizer, factors: Mapping[Axis, Tensor]) -> None:
    """Multiply the entries of axes by factors, and write the weights that follow.

    With x' = f x a gradient is g' = g / f, so that moments become m / f and v / f^2, and gradients
    that wait for a step are divided as well. On the log scale the stored value moves by log f, and
    its gradient, x dL/dx, stays. Raw weights under multipliers and their moments are not touched.
    """
    moved = {axis: factor for axis, factor in factors.items() if bool((factor != 1).any())}
    by_name: dict[str, dict[Axis, Tensor]] = {}
    for axis, factor in moved.items():
        by_name.setdefault(axis.name, {})[axis] = factor
    with opt.rewriting(by_name.keys()) as states:
        for state in states:
            _refuse_what_cannot_be_moved(opt, state)
        for state in states:
            if state.carries:
                _multiply_multipliers_(state, by_name[state.name])
            else:
                _multiply_parameter_(opt, state, by_name[state.name])


def _multiply_multipliers_(state: ParameterState, factors: Mapping[Axis, Tensor]) -> None:
    assert state.matrix is not None
    kept = state.multipliers
    inverse = {
        kind: torch.ones(shape, dtype=torch.float64)
        for kind, shape in state.matrix.value_shapes().items()
    }
    for axis, flat in factors.items():
        value = kept[axis.kind]
        inverse[axis.kind] = (1 / flat).view(value.shape)
        if state.matrix.scale == "log":
            value.add_(flat.log().view(value.shape).to(value))
            continue
        factor = flat.view(value.shape).to(value)
        value.mul_(factor)
        kept[f"{axis.kind}_exp_avg"].div_(factor)
        kept[f"{axis.kind}_exp_avg_sq"].div_(factor.square())
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


def _filter(axis: Axis, weight: Tensor) -> Scale:
    gains = weight.detach().to("cpu", torch.float64).flatten(2).norm(dim=2)  # (out, in)
    out, into = gains.shape
    index = torch.arange(out)[:, None] if axis.kind == "row" else torch.arange(into)
    return Scale(
        values=gains.flatten(),
        owner=Axis(axis.name, "row"),
        index=index.expand(out, into).flatten(),
        carried=torch.ones(out if axis.kind == "row" else into, dtype=torch.bool),
    )


def _refuse_what_cannot_be_moved(opt: MultiplierOptimizer, state: ParameterState) -> None:
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
