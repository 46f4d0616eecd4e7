"""The scales that a model can learn, as axes: rows and columns of matrices, and vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor, nn

from learnable_multipliers._multiplier import (
    MULTIPLIERS,
    Matrix,
    MultiplierName,
    keep_carried_rows,
    scalars_per_row,
    sum_by_scalar,
)
from learnable_multipliers._names import named_parameters
from learnable_multipliers.roles import read_roles

AxisKind = MultiplierName | Literal["vector", "one-plus"]


class Axis(NamedTuple):
    """All scales of one kind of one parameter, one entry per feature."""

    name: str
    """Name of the parameter."""
    kind: AxisKind
    """`vector`: the entries of the parameter itself, one scale each. `one-plus`: 1 + the entries,
    as some norms use their weight."""

    @property
    def offset(self) -> float:
        """Offset added to a value before it is scaled."""
        return 1.0 if self.kind == "one-plus" else 0.0

    @property
    def is_vector(self) -> bool:
        """Whether the entries are those of the parameter itself."""
        return self.kind in ("vector", "one-plus")

    def __str__(self) -> str:
        words = {"row": "rows of ", "col": "columns of ", "one-plus": "1 + "}
        return f"{words.get(self.kind, '')}{self.name.removesuffix('.weight')}"


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """How a parameter is stored: which of its dimensions are rows and columns."""

    name: str
    shape: tuple[int, ...]
    stack: int = 0
    """Number of leading dimensions that count matrices, as in a stack of experts."""
    transposed: bool = False
    is_matrix: bool = True
    one_plus: bool = False
    """A vector that the forward pass uses as 1 + its entries."""
    matrix: Matrix | None = None
    """Its matrix in a plan. None without a plan: then it has all rows and columns."""

    @property
    def is_vector(self) -> bool:
        """Whether its entries themselves are scales, instead of its rows and columns."""
        return not self.is_matrix and len(self.shape) <= 1

    @property
    def axes(self) -> list[Axis]:
        """The axes of the parameter."""
        if self.is_vector:
            return [Axis(self.name, "one-plus" if self.one_plus else "vector")]
        if self.matrix is not None:
            kinds = self.matrix.value_shapes()
            return [Axis(self.name, kind) for kind in MULTIPLIERS if kind in kinds]
        # Depthwise filters, one per channel, have only rows.
        has_columns = self.is_matrix or self.shape[1] > 1
        return [Axis(self.name, "row"), *([Axis(self.name, "col")] if has_columns else [])]

    def dimensions(self, kind: AxisKind) -> tuple[int, ...]:
        """Return the stored dimensions that an axis runs along."""
        if kind in ("vector", "one-plus"):
            return tuple(range(len(self.shape)))
        # Scalars run along rows; stored (in, out) if transposed.
        is_last = (kind == "col") != self.transposed
        return (*range(self.stack), self.stack + is_last)

    def along(self, kind: AxisKind, values: Tensor) -> Tensor:
        """Return an axis's values, flat, shaped so that they broadcast over the parameter."""
        if kind == "scalar" and self.matrix is not None:
            given = {"scalar": values.view(self.matrix.value_shapes()["scalar"])}
            # These are factors, not stored values, so never logarithms.
            per_row = scalars_per_row(replace(self.matrix, scale="linear"), given)
            assert per_row is not None
            values = per_row.flatten()
        dimensions = self.dimensions(kind)
        return values.view([size if i in dimensions else 1 for i, size in enumerate(self.shape)])

    def num_entries(self, kind: AxisKind) -> int:
        """Return how many entries an axis has."""
        if kind == "scalar" and self.matrix is not None:
            return math.prod(self.matrix.value_shapes()["scalar"])
        return math.prod(self.shape[i] for i in self.dimensions(kind))

    def summed(self, kind: AxisKind, values: Tensor) -> Tensor:
        """Return sums over all but an axis's dimensions, flat; 0 for rows that carry nothing."""
        others = [i for i in range(values.ndim) if i not in self.dimensions(kind)]
        sums = values.sum(others) if others else values
        if self.matrix is not None and kind == "scalar":
            sums = sum_by_scalar(self.matrix, sums)
        elif self.matrix is not None and kind == "row":
            sums = keep_carried_rows(self.matrix, sums)
        return sums.flatten()


def layouts(
    model: nn.Module, carried: Mapping[str, Matrix] | None = None
) -> dict[str, ParameterLayout]:
    """Return how every trained parameter of a model is stored, by name.

    Module types show which weights are stored transposed. A parameter of three dimensions that is
    no convolution's filter is a stack of matrices. Names are not used. With `carried`, matrices
    have only the axes that they carry.
    """
    transposed = {role.name for role in read_roles(model).parameters if role.transposed}
    filters = {
        id(parameter)
        for module in model.modules()
        if hasattr(module, "kernel_size")
        for owner in (module, *getattr(module, "parametrizations", nn.ModuleDict()).values())
        for parameter in owner.parameters(recurse=False)
    }
    by_name = {}
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            continue
        shape = tuple(parameter.shape)
        # Depthwise filters are often a bare parameter, (channels, 1, taps).
        is_stack = len(shape) == 3 and shape[1] > 1 and id(parameter) not in filters
        if len(shape) != 2 and not is_stack:
            by_name[name] = ParameterLayout(name=name, shape=shape, is_matrix=False)
            continue
        matrix = None if carried is None else carried.get(name)
        if carried is None or (matrix is not None and matrix.carries):
            by_name[name] = ParameterLayout(
                name=name,
                shape=shape,
                stack=len(shape) - 2,
                transposed=name in transposed,
                matrix=matrix,
            )
    return by_name
