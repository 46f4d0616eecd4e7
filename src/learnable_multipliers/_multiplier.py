"""The multipliers that a weight matrix can carry, and their maths (paper sec. 2, eqs. 2-4).

`Matrix` describes one stored matrix: its axes, the blocks its rows fall into, and which
multipliers each block carries. `effective` and `split_gradient` are pure functions of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Scale = Literal["linear", "log"]
"""`linear`: the stored value is the multiplier. `log`: the multiplier is its exponential."""

Kind = Literal["none", "scalar", "per-head", "row", "col", "row+col"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MultiplierName = Literal["row", "col", "scalar"]
MULTIPLIERS: tuple[MultiplierName, ...] = get_args(MultiplierName)

Values = Mapping[str, Tensor]
"""Stored multiplier values by `MultiplierName`, those that a matrix carries."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A named set of rows of a stored matrix: the whole of it, or one part of a fused one."""

    role: str
    size: int
    """Rows of this block in one repeat of the matrix's row pattern."""
    row: bool = False
    scalar: bool = False
    per_head: bool = False
    """Whether it has a scalar for each head instead of one for the block."""
    init: float = 1.0
    """Initial value of the product of the block's multipliers."""
    head_dim: int | None = None
    """Rows of one attention head; None if there are no heads, or if they are unknown."""

    @property
    def rows_of_scalar(self) -> int:
        """Rows of one repeat that share a scalar."""
        return self.head_dim if self.per_head and self.head_dim is not None else self.size


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A stored matrix: how its storage maps to (stack, out, in), and its multipliers.

    The rows are `repeats` copies of the pattern formed by the blocks in order. One repeat gives
    blocks that are slices (z, x, B, C, dt of a Mamba `in_proj`); one repeat per head gives the
    interleaved q, k, v of GPT-NeoX.
    """

    shape: tuple[int, ...]
    """As stored: (out, in), (in, out) if transposed, with a leading stack axis for experts."""
    blocks: tuple[Block, ...]
    repeats: int = 1
    col: bool = False
    transposed: bool = False
    scale: Scale = "linear"

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise ValueError(
                f"multipliers need a matrix or a stack of matrices, got shape {self.shape}"
            )
        rows = self.repeats * sum(block.size for block in self.blocks)
        if rows != self.num_out:
            sizes = ", ".join(f"{block.role} {block.size}" for block in self.blocks)
            raise ValueError(
                f"blocks ({sizes}) times {self.repeats} cover {rows} rows, "
                f"but the matrix {self.shape} has {self.num_out}"
            )
        if self.scale not in ("linear", "log"):
            raise ValueError(f"unknown scale {self.scale!r}; choose 'linear' or 'log'")
        for block in self.blocks:
            if block.head_dim is not None and (block.head_dim < 1 or block.size % block.head_dim):
                raise ValueError(
                    f"heads of {block.head_dim} rows do not divide the {block.size} rows of "
                    f"{block.role}"
                )
            if block.per_head and (block.head_dim is None or not block.scalar):
                raise ValueError(f"{block.role} has no heads that are known, for scalars per head")
            start = f"initial value {block.init} of {block.role}"
            if block.init == 0 or not math.isfinite(block.init):
                raise ValueError(f"{start}: it must be finite, not zero")
            if self.scale == "log" and block.init < 0:
                raise ValueError(f"{start}: log scale needs a positive one")
        different = len({block.init for block in self.blocks}) > 1
        if different and any(_starts_on_columns(block) for block in self.blocks):
            raise ValueError(
                "blocks that share one column multiplier cannot start at different values; "
                "give them rows or scalars of their own"
            )

    @property
    def stack(self) -> tuple[int, ...]:
        """`(experts,)` for a stack, `()` for a single matrix."""
        return self.shape[:-2]

    @property
    def dims(self) -> tuple[int, int]:
        """The dims of the output and the input features."""
        return (-1, -2) if self.transposed else (-2, -1)

    @property
    def num_out(self) -> int:
        """Output features: the rows of the paper's W."""
        return self.shape[self.dims[0]]

    @property
    def num_in(self) -> int:
        """Input features: the columns of the paper's W."""
        return self.shape[self.dims[1]]

    @property
    def row_pattern(self) -> tuple[int, int]:
        """The rows as a grid: (repeats, rows in one repeat)."""
        return self.repeats, sum(block.size for block in self.blocks)

    @property
    def row(self) -> bool:
        """Whether any block carries row multipliers."""
        return any(block.row for block in self.blocks)

    @property
    def num_scalars(self) -> int:
        """Number of scalars of a single matrix."""
        return sum(self.scalars_of(block) for block in self.blocks)

    def scalars_of(self, block: Block) -> int:
        """Return the number of scalars of a block."""
        if block.per_head:
            return self.repeats * block.size // block.rows_of_scalar
        return int(block.scalar)

    @property
    def carries(self) -> bool:
        """Whether the matrix carries any multiplier."""
        return self.row or self.col or self.num_scalars > 0

    @property
    def num_multipliers(self) -> int:
        """Number of learned values besides the raw weight."""
        pattern = sum(block.size for block in self.blocks if block.row)
        per_matrix = pattern * self.repeats + self.num_scalars + (self.num_in if self.col else 0)
        return per_matrix * math.prod(self.stack)

    def value_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stored values; `row` spans all rows, carried or not."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.row:
            shapes["row"] = (*self.stack, self.num_out)
        if self.col:
            shapes["col"] = (*self.stack, self.num_in)
        if self.num_scalars == 1:
            shapes["scalar"] = self.stack or (1,)
        elif self.num_scalars > 1:
            shapes["scalar"] = (*self.stack, self.num_scalars)
        return shapes


def effective(matrix: Matrix, raw: Tensor, values: Values) -> Tensor:
    """Return `row_i W_ij col_j`, or `s W_ij` (eqs. 2 and 3), laid out as `raw` is."""
    rows, cols = _factors(matrix, values)
    weight = raw if rows is None else rows * raw
    return weight if cols is None else weight * cols


def split_gradient(
    matrix: Matrix, raw: Tensor, values: Values, grad: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Turn G, the gradient of the effective weight, into those of its factors (eq. 4).

    raw: row_i col_j G_ij; row: sum_j W_ij col_j G_ij; col: sum_i row_i W_ij G_ij;
    scalar: sum_ij W_ij G_ij, with row and col where a block carries them too. Nothing is
    divided by a multiplier, so all of this holds where one is zero. On the log scale each
    multiplier's gradient is times the multiplier itself.
    """
    rows, cols = _factors(matrix, values)
    out_dim, in_dim = matrix.dims
    by_cols = grad if cols is None else grad * cols
    raw_grad = by_cols if rows is None else rows * by_cols

    grads: dict[str, Tensor] = {}
    if matrix.row or matrix.num_scalars:
        row_sums = (raw * by_cols).sum(in_dim)  # (*stack, out)
        if matrix.row:
            scalar = scalars_per_row(matrix, values)
            through_scalar = row_sums if scalar is None else scalar * row_sums
            grads["row"] = keep_carried_rows(matrix, through_scalar)
        if matrix.num_scalars:
            through_row = row_sums * multiplier(matrix, values["row"]) if matrix.row else row_sums
            grads["scalar"] = sum_by_scalar(matrix, through_row)
    if matrix.col:
        by_rows = grad if rows is None else rows * grad
        grads["col"] = (raw * by_rows).sum(out_dim)  # (*stack, in)
    if matrix.scale == "log":
        grads = {name: grad * multiplier(matrix, values[name]) for name, grad in grads.items()}
    return raw_grad, grads


def raw_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of the raw weight, multipliers and moments of a weight."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def multiplier(matrix: Matrix, value: Tensor) -> Tensor:
    """Return the multiplier a stored value stands for."""
    return value.exp() if matrix.scale == "log" else value


def _factors(matrix: Matrix, values: Values) -> tuple[Tensor | None, Tensor | None]:
    """Return the factors of output and input features, shaped to broadcast; None if all are 1."""
    out_dim, in_dim = matrix.dims
    rows = scalars_per_row(matrix, values)
    if matrix.row:
        row = multiplier(matrix, values["row"])
        rows = row if rows is None else row * rows
    rows = None if rows is None else rows.unsqueeze(in_dim)
    cols = multiplier(matrix, values["col"]).unsqueeze(out_dim) if matrix.col else None
    return rows, cols


def initial_values(
    matrix: Matrix, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return stored values at which each block's multipliers have the product `init`.

    A block puts its initial value on its scalar if it has one, else on its rows, else on the
    shared columns.
    """
    values = {
        name: torch.full(shape, _stored(matrix, 1.0), dtype=dtype, device=device)
        for name, shape in matrix.value_shapes().items()
    }
    if matrix.row:
        for block, rows in by_block(matrix, values["row"]):
            if block.row and not block.scalar:
                rows.fill_(_stored(matrix, block.init))
    if matrix.num_scalars:
        inits = [
            _stored(matrix, block.init)
            for block in matrix.blocks
            for _ in range(matrix.scalars_of(block))
        ]
        flat = values["scalar"].view(*matrix.stack, matrix.num_scalars)
        flat.copy_(torch.tensor(inits, dtype=dtype, device=device).expand_as(flat))
    if matrix.col and _starts_on_columns(matrix.blocks[0]):
        values["col"].fill_(_stored(matrix, matrix.blocks[0].init))
    return values


def carried_rows(matrix: Matrix, row: Tensor) -> Tensor:
    """Return the entries of a full-length `row` whose blocks carry one, in row order."""
    kept = [rows for block, rows in by_block(matrix, row) if block.row]
    return torch.cat(kept, -1).flatten(-2)


def all_rows(matrix: Matrix, carried: Tensor) -> Tensor:
    """Return the full-length `row` for its carried entries, with 1 for the other rows."""
    if all(block.row for block in matrix.blocks):
        return carried
    sizes = [block.size for block in matrix.blocks if block.row]
    parts = iter(carried.unflatten(-1, (matrix.repeats, sum(sizes))).split(sizes, -1))
    pattern = [
        next(parts)
        if block.row
        else carried.new_full((*matrix.stack, matrix.repeats, block.size), _stored(matrix, 1.0))
        for block in matrix.blocks
    ]
    return torch.cat(pattern, -1).flatten(-2)


def _starts_on_columns(block: Block) -> bool:
    return block.init != 1.0 and not block.row and not block.scalar


def by_block(matrix: Matrix, per_row: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Pair each block with its view of a per-row quantity, (*stack, repeats, size)."""
    sizes = [block.size for block in matrix.blocks]
    parts = per_row.unflatten(-1, matrix.row_pattern).split(sizes, -1)
    return zip(matrix.blocks, parts, strict=True)


def _stored(matrix: Matrix, init: float) -> float:
    return math.log(init) if matrix.scale == "log" else init


def scalars_per_row(matrix: Matrix, values: Values) -> Tensor | None:
    """Return the scalar of each row, (*stack, out); 1 if its block has none."""
    if not matrix.num_scalars:
        return None
    scalar = multiplier(matrix, values["scalar"]).reshape(*matrix.stack, matrix.num_scalars)
    cells = scalar.split([matrix.scalars_of(block) for block in matrix.blocks], -1)
    one = scalar.new_ones((*matrix.stack, 1))
    pattern = [
        _over_rows(matrix, block, cell if block.scalar else one)
        for block, cell in zip(matrix.blocks, cells, strict=True)
    ]
    return torch.cat(pattern, -1).flatten(-2)


def _over_rows(matrix: Matrix, block: Block, scalars: Tensor) -> Tensor:
    """Spread a block's scalars over its rows, (*stack, repeats, size)."""
    if block.per_head:
        heads = scalars.unflatten(-1, (matrix.repeats, -1, 1))
        return heads.expand(*heads.shape[:-1], block.rows_of_scalar).flatten(-2)
    return scalars.unsqueeze(-2).expand(*scalars.shape[:-1], matrix.repeats, block.size)


def sum_by_scalar(matrix: Matrix, per_row: Tensor) -> Tensor:
    """Sum a per-row quantity over the rows of each scalar."""
    sums = [
        rows.unflatten(-1, (-1, block.rows_of_scalar)).sum(-1).flatten(-2)
        if block.per_head
        else rows.sum(-2).sum(-1, keepdim=True)
        for block, rows in by_block(matrix, per_row)
        if block.scalar
    ]
    return torch.cat(sums, -1).reshape(matrix.value_shapes()["scalar"])


def scalar_index(matrix: Matrix) -> Tensor:
    """Return the index of the scalar of each row, (out,); -1 for rows without one."""
    index = torch.full((matrix.num_out,), -1)
    first = 0
    for block, rows in by_block(matrix, index):
        count = matrix.scalars_of(block)
        if count:
            rows.copy_(_over_rows(matrix, block, torch.arange(first, first + count)))
        first += count
    return index


def keep_carried_rows(matrix: Matrix, per_row: Tensor) -> Tensor:
    """Zero a per-row quantity on the rows of blocks that carry none."""
    kept = per_row.clone()
    for block, rows in by_block(matrix, kept):
        if not block.row:
            rows.zero_()
    return kept
