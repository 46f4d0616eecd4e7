"""A parameter of an optimizer with all tensors kept for it, its weights, and sets for kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learnable_multipliers._multiplier import Matrix, raw_dtype

RowsCols = tuple[Tensor, Tensor]
"""Values along the stored rows (stack, rows) and along the stored columns (stack, cols).

A weight stored (in, out) has its output features along its stored columns.
"""


class Rates(NamedTuple):
    """Hyper-parameters of a parameter in a step: the columns of the kernels' table of rates."""

    lr: float
    weight_decay: float
    multiplier_lr: float
    multiplier_weight_decay: float
    beta1: float
    beta2: float
    eps: float


@dataclass(kw_only=True, eq=False)
class ParameterState:
    """One parameter: its settings, and its tensors on this rank.

    The optimizer sets the fields up to `weight`. `Binding` sets the others; the tensors are those
    of the optimizer's state.
    """

    index: int
    """Place among the optimizer's parameters, and row in the tables of hyper-parameters."""
    parameter: nn.Parameter
    name: str
    group: dict[str, Any]
    matrix: Matrix | None
    """Its matrix in the plan; None for vectors."""
    moment_names: tuple[str, ...]
    """Names of the raw weight's moments in the state."""
    sharded: bool
    tied_names: tuple[str, ...] = ()
    """All names of a tied parameter."""

    weight: Tensor
    """The parameter itself: the effective weight."""
    raw: Tensor = field(init=False)
    """The trained weight, float32 or float64; `weight` itself if the two do not differ."""
    owns_raw: bool = False
    """Whether the raw weight is another tensor than the parameter."""
    moments: tuple[Tensor, ...] = field(init=False)
    """(exp_avg, exp_avg_sq) for AdamW, (momentum,) for Muon."""
    multipliers: dict[str, Tensor] = field(default_factory=dict)
    """Its multipliers and their moments by name in the state: views of the packed ones."""
    step: Tensor = field(init=False)
    """How many steps it has taken."""
    kept: tuple[Any, ...] = ()
    """All tensors above as the state holds them: DTensors if the parameter is one."""
    grad: Tensor | None = None
    """Gradient of the effective weight; set only during a step."""
    factors: RowsCols | None = None
    """Factors of the raw weight's rows and columns; None without multipliers."""
    next_factors: RowsCols | None = None
    """The same after the multipliers' update of this step."""
    sums: RowsCols | None = None
    """Sums of W * G along rows and columns, which give the multipliers' gradients."""

    written_version: int = -1
    """Version counter of the parameter after the optimizer's last write."""
    written_pointer: int = 0
    """Address of its storage then."""

    @property
    def raw_dtype(self) -> torch.dtype:
        """Dtype of the raw weight, its multipliers and moments."""
        return raw_dtype(self.parameter)

    @property
    def carries(self) -> bool:
        """Whether the parameter has multipliers."""
        return self.matrix is not None and self.matrix.carries

    @property
    def trains_raw(self) -> bool:
        """Whether the raw weight is trained, and not only its multipliers."""
        return self.group.get("train") != "multipliers"


class ParameterSet:
    """Parameters that kernels update together, with tables that a backend prepares for them."""

    def __init__(self, states: Sequence[ParameterState]):
        self.states = tuple(states)
        self.indices = [state.index for state in states]
        self.tables: Any = None
        """Owned by the backend."""

    @cached_property
    def fixed(self) -> tuple[ParameterState, ...]:
        """The parameters whose raw weight is fixed, so that only multipliers are trained."""
        return tuple(state for state in self.states if not state.trains_raw)

    @property
    def trained(self) -> ParameterSet:
        """The parameters whose raw weight is trained: this set itself if all are."""
        # A set that kept a reference to itself would hold its tensors until garbage collection.
        return self._without_fixed if self.fixed else self

    @cached_property
    def _without_fixed(self) -> ParameterSet:
        return ParameterSet([state for state in self.states if state.trains_raw])

    def __iter__(self) -> Iterator[ParameterState]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)


def raw_gradient(state: ParameterState, clip: Tensor) -> Tensor:
    """Return the clipped gradient of a raw weight, `clip rows_i cols_j G_ij`."""
    g = gradient_of(state).to(state.raw.dtype)
    clip = clip.to(g.dtype)
    if state.factors is None:
        return g * clip
    rows, cols = state.factors
    scaled = rows.unsqueeze(-1) * clip * as_stack(g, state.factors) * cols.unsqueeze(-2)
    return scaled.view(state.raw.shape)


def effective_weight(state: ParameterState) -> Tensor:
    """Return `rows_i W_ij cols_j` in the raw dtype, multiplied in this order."""
    if state.next_factors is None:
        return state.raw
    rows, cols = state.next_factors
    stacked = as_stack(state.raw, state.next_factors)
    return (rows.unsqueeze(-1) * stacked * cols.unsqueeze(-2)).view(state.raw.shape)


def write_effective_(state: ParameterState) -> None:
    """Write the effective weight of one parameter from its raw weight and next factors."""
    state.weight.copy_(effective_weight(state))


def write_raw_(state: ParameterState) -> None:
    """Write the raw weight that gives the effective one at the current factors."""
    state.raw.copy_(state.weight)
    if state.factors is not None:
        rows, cols = state.factors
        as_stack(state.raw, state.factors).div_(rows.unsqueeze(-1)).div_(cols.unsqueeze(-2))


def gradient_of(state: ParameterState) -> Tensor:
    """Return the gradient of a parameter that is known to have one."""
    assert state.grad is not None, state.name
    return state.grad


def as_stack(tensor: Tensor, factors: RowsCols) -> Tensor:
    """Return a stored matrix as (stack, rows, cols)."""
    rows, cols = factors
    return tensor.reshape(rows.shape[0], rows.shape[1], cols.shape[1])
