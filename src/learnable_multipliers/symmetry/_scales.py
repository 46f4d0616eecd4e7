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
from learnable_multipliers.kernels._reference import write_effective
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._packed_multipliers import MultiplierBank
from learnable_multipliers.optim._slots import Slot
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
    slots = {slot.name: slot for slot in opt._bound().slots}
    multipliers, raw = opt.multipliers(), opt.raw_weights()
    found = {}
    for axis in axes:
        slot = slots.get(axis.name)
        if slot is None or not _trains(slot, axis):
            raise ValueError(
                f"{axis} ({axis.kind}) is not a scale that this optimizer trains. Find the "
                "symmetries with the plan it was made with: "
                "lrm.find_symmetries(model, plan, inputs)"
            )
        carried = None
        if axis.is_vector:
            values = raw[axis.name] + axis.offset
        elif slot.matrix is not None:
            values = multipliers[axis.name][axis.kind]
            if axis.kind == "row":
                carried = keep_carried_rows(slot.matrix, torch.ones(values.shape)).bool().flatten()
        else:
            found[axis] = _filter(axis, raw[axis.name])
            continue
        values = values.detach().to("cpu", torch.float64).flatten()
        if carried is None:
            carried = torch.ones(len(values), dtype=torch.bool)
        exact = not axis.offset and not (slot.matrix and slot.matrix.scale == "log")
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
    names = {axis.name for axis in moved}
    bound = opt._current()
    slots = [slot for slot in bound.slots if slot.name in names]
    by_kind = {
        slot.name: {axis: factor for axis, factor in moved.items() if axis.name == slot.name}
        for slot in slots
    }
    for slot in slots:
        _refuse_what_cannot_be_moved(opt, slot)
    # These weights are written below: what something else wrote would be lost without a word.
    bound.watch.refuse_other_numbers(slots)
    for slot in slots:
        if slot.matrix is not None and slot.matrix.carries:
            _multiply_multipliers_(*bound.bank_of[slot.work.index], slot, by_kind[slot.name])
        else:
            _multiply_parameter_(opt, slot, by_kind[slot.name])
    bound.write_factors_()
    for slot in slots:
        if slot.owns_raw:
            write_effective(slot.work)
    bound.watch.remember(slots)


def _multiply_multipliers_(
    bank: MultiplierBank, place: int, slot: Slot, factors: Mapping[Axis, Tensor]
) -> None:
    assert slot.matrix is not None
    state = bank.state_views(place)
    inverse = {
        kind: torch.ones(shape, dtype=torch.float64)
        for kind, shape in slot.matrix.value_shapes().items()
    }
    for axis, flat in factors.items():
        value = state[axis.kind]
        inverse[axis.kind] = (1 / flat).view(value.shape)
        if slot.matrix.scale == "log":
            value.add_(flat.log().view(value.shape).to(value))
            continue
        factor = flat.view(value.shape).to(value)
        value.mul_(factor)
        state[f"{axis.kind}_exp_avg"].div_(factor)
        state[f"{axis.kind}_exp_avg_sq"].div_(factor.square())
    grad = slot.parameter.grad
    if grad is not None:
        linear: Matrix = replace(slot.matrix, scale="linear")
        # Divided as the weight is multiplied: G' = G / (row col).
        inverse = {kind: value.to(slot.work.raw) for kind, value in inverse.items()}
        grad.copy_(effective(linear, grad.to(slot.work.raw.dtype), inverse))


def _multiply_parameter_(
    opt: MultiplierOptimizer, slot: Slot, factors: Mapping[Axis, Tensor]
) -> None:
    raw = slot.work.raw
    for axis, flat in factors.items():
        dim = {"row": 0, "col": 1}.get(axis.kind)
        shape = raw.shape if dim is None else [-1 if i == dim else 1 for i in range(raw.ndim)]
        factor = flat.view(shape).to(raw)
        if axis.offset:
            raw.add_(axis.offset).mul_(factor).sub_(axis.offset)
        else:
            raw.mul_(factor)
        for name, moment in opt._moments_of(slot).items():
            if name in _DEGREES:
                moment.div_(factor ** _DEGREES[name])
        if slot.parameter.grad is not None:
            slot.parameter.grad.div_(factor)


def _trains(slot: Slot, axis: Axis) -> bool:
    if axis.is_vector:
        return slot.matrix is None and slot.parameter.ndim <= 1
    if slot.matrix is not None:
        return axis.kind in slot.matrix.value_shapes()
    return axis.kind in ("row", "col") and slot.parameter.ndim >= 3


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


def _refuse_what_cannot_be_moved(opt: MultiplierOptimizer, slot: Slot) -> None:
    if slot.sharded:
        raise NotImplementedError(
            f"{slot.name} is sharded, and scales are moved on whole tensors only: load a full "
            "checkpoint of model and optimizer in one process, move them there, and save it again"
        )
    if slot.matrix is not None and slot.matrix.carries:
        return
    for name, moment in opt._moments_of(slot).items():
        # A single number, as a product of betas, belongs to the step and not to an entry.
        by_entry = moment.numel() > 1 or slot.parameter.numel() == 1
        if by_entry and name != "step" and name not in _DEGREES:
            raise ValueError(
                f"the wrapped optimizer keeps {name!r} for {slot.name}, and how that changes with "
                "the scale is not known here. Leave out the symmetries that have a term with "
                "this parameter, or train with lrm.AdamW or lrm.Muon"
            )
