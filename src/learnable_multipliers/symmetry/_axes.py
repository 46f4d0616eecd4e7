"""The scales a model can learn, as axes: rows and columns of matrices, and vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor, nn

from learnable_multipliers._multiplier import (
    Matrix,
    keep_carried_rows,
    scalars_per_row,
    sum_by_scalar,
)
from learnable_multipliers._names import named_parameters
from learnable_multipliers.roles import ParameterRole, read_roles

AxisKind = Literal["row", "col", "scalar", "vector", "one-plus"]


class Axis(NamedTuple):
    """All scales of one kind that one parameter has; one entry for each feature."""

    name: str
    """The parameter's."""
    kind: AxisKind
    """`vector`: the entries of the parameter itself, one scale each. `one-plus`: 1 + the entries,
    which is how some norms use their weight."""

    @property
    def offset(self) -> float:
        """What is added to a value before it is scaled."""
        return 1.0 if self.kind == "one-plus" else 0.0

    @property
    def is_vector(self) -> bool:
        """Whether the entries are those of the parameter itself."""
        return self.kind in ("vector", "one-plus")

    def __str__(self) -> str:
        words = {"row": "rows of ", "col": "columns of ", "one-plus": "1 + "}
        return f"{words.get(self.kind, '')}{self.name.removesuffix('.weight')}"


@dataclass(frozen=True)
class Layout:
    """How a parameter is stored: which dimensions its rows and columns are."""

    stack: int = 0
    """Leading dimensions that count matrices, as in a stack of experts."""
    transposed: bool = False
    matrix: bool = True
    one_plus: bool = False
    """A vector that the forward pass uses as 1 + its entries."""
    carries: Matrix | None = None
    """What a plan puts on it; without a plan it has all rows and columns."""

    def axes(self, name: str, shape: Sequence[int]) -> list[Axis]:
        """Return the axes of a parameter of this layout."""
        if not self.matrix and len(shape) <= 1:
            return [Axis(name, "one-plus" if self.one_plus else "vector")]
        if self.carries is not None:
            kinds = self.carries.value_shapes()
            return [Axis(name, kind) for kind in ("row", "col", "scalar") if kind in kinds]
        # A filter of its own for each channel (depthwise) has rows alone.
        has_columns = self.matrix or shape[1] > 1
        return [Axis(name, "row"), *([Axis(name, "col")] if has_columns else [])]

    def dimensions(self, kind: AxisKind, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the stored dimensions that an axis runs along."""
        if kind in ("vector", "one-plus"):
            return tuple(range(len(shape)))
        if not self.matrix:
            return (0,) if kind == "row" else (1,)
        stack = tuple(range(self.stack))
        # Each row has the scalar of its block.
        kind = "row" if kind == "scalar" else kind
        out, into = self.stack, self.stack + 1
        if self.transposed:
            out, into = into, out
        return (*stack, out if kind == "row" else into)

    def along(self, kind: AxisKind, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Return an axis's values, flat, shaped so that they broadcast over the parameter."""
        if kind == "scalar" and self.carries is not None:
            given = {"scalar": values.view(self.carries.value_shapes()["scalar"])}
            per_row = scalars_per_row(self.carries, given)
            assert per_row is not None
            values = per_row.flatten()
        dimensions = self.dimensions(kind, shape)
        return values.view([size if i in dimensions else 1 for i, size in enumerate(shape)])

    def num_entries(self, kind: AxisKind, shape: Sequence[int]) -> int:
        """Return how many entries an axis has."""
        if kind == "scalar" and self.carries is not None:
            return math.prod(self.carries.value_shapes()["scalar"])
        return math.prod(shape[i] for i in self.dimensions(kind, shape))

    def summed(self, kind: AxisKind, values: Tensor) -> Tensor:
        """Return sums over all but an axis's dimensions, flat; 0 for rows that carry nothing."""
        others = [i for i in range(values.ndim) if i not in self.dimensions(kind, values.shape)]
        sums = values.sum(others) if others else values
        if self.carries is not None and kind == "scalar":
            sums = sum_by_scalar(self.carries, sums)
        elif self.carries is not None and kind == "row":
            sums = keep_carried_rows(self.carries, sums)
        return sums.flatten()


def layouts(model: nn.Module, carried: Mapping[str, Matrix] | None = None) -> dict[str, Layout]:
    """Return how every trained parameter of a model is stored, by name.

    Module types say which weights are stored transposed; what has three dimensions and is not
    the filters of a convolution is a stack of matrices. Names are not used.
    With `carried`, matrices have the axes that they carry and no others.
    """
    roles = {role.name: role for role in read_roles(model).parameters}
    filters = {
        id(parameter)
        for module in model.modules()
        if hasattr(module, "kernel_size")
        for parameter in module.parameters(recurse=False)
    }
    found = {}
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            continue
        layout = _layout(roles.get(name), parameter.shape, id(parameter) in filters)
        if layout.matrix and carried is not None:
            matrix = carried.get(name)
            if matrix is None or not matrix.carries:
                continue
            layout = replace(layout, carries=matrix)
        found[name] = layout
    return found


def _layout(role: ParameterRole | None, shape: Sequence[int], is_filter: bool) -> Layout:
    # One filter for each channel is often a bare parameter, (channels, 1, taps).
    is_stack = len(shape) == 3 and shape[1] > 1 and not is_filter
    if len(shape) == 2 or is_stack:
        return Layout(stack=len(shape) - 2, transposed=role is not None and role.transposed)
    return Layout(matrix=False)
