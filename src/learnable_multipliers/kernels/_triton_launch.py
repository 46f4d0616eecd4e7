"""The kernels of `_reference.py` in Triton, with the same names and arguments.

Tables of addresses let one launch serve all parameters of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnable_multipliers.kernels import _triton_kernels as k
from learnable_multipliers.kernels._backend import to_device
from learnable_multipliers.kernels._parameter import ParameterSet, ParameterState

decides_on_host = False

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
# Tiles in rows and columns, the fastest of fourteen shapes each on one H200: the
# reduction by bytes of a gradient, the update by whether rows are long enough for one tile.
_REDUCE_TILES = {4: (64, 64), 2: (64, 128)}
_REDUCE_ROWS = 64
_LONG_ROWS, _SHORT_ROWS = (1, 1024), (4, 256)
_WARPS = 4
_COLUMNS = 256
_FLAT = 16384
"""Elements per program for parameters without multipliers."""
_BLOCK = 1024


@dataclass
class _Kind:
    """Parameters that one launch can serve: same dtypes, same kind of update."""

    grad_type: Any
    weight_type: Any
    reduce_tile: tuple[int, int]
    factors: bool
    owns_raw: bool
    even: bool
    """Tensors start at multiples of 16 bytes."""
    aligned: bool
    """So does every row, so that whole vectors can be read."""
    tile: tuple[int, int]
    states: list[ParameterState] = field(default_factory=list)
    row_blocks: Tensor | None = None
    """Programs over blocks of rows, for updates."""
    reduce_blocks: Tensor | None = None
    column_blocks: Tensor | None = None
    runs: Tensor | None = None
    """Programs over contiguous elements, for parameters without multipliers."""
    samples: Tensor | None = None


class _Tables:
    """All tables of the kernels for one set of parameters."""

    def __init__(self, states: ParameterSet, grad_dtypes: list[torch.dtype]):
        self.device = device = states.states[0].raw.device
        self.grad_dtypes = grad_dtypes
        self.rows = 1 + max(states.indices)
        addresses = torch.zeros(self.rows, k.FIELDS.value, dtype=torch.int64)
        kinds: dict[tuple[Any, ...], _Kind] = {}
        for state, grad_dtype in zip(states, grad_dtypes, strict=True):
            _check(state)
            if state.raw.numel() == 0:
                continue
            addresses[state.index] = torch.tensor(_addresses(state))
            cols = _grid(state)[2]
            tile = _LONG_ROWS if cols >= _LONG_ROWS[1] else _SHORT_ROWS
            even = all(t.data_ptr() % 16 == 0 for t in (state.weight, state.raw, *state.moments))
            aligned = even and cols % 16 == 0
            flags = (state.factors is not None, state.owns_raw, even, aligned, tile)
            types = _TYPES[grad_dtype], _TYPES[state.weight.dtype]
            kind = _Kind(*types, _REDUCE_TILES[grad_dtype.itemsize], *flags)
            key = (grad_dtype, state.weight.dtype, *flags)
            kinds.setdefault(key, kind).states.append(state)
        self.addresses = addresses.to(device)
        self.indices = torch.tensor(states.indices).to(device)
        self._grads: list[int] = []
        self._updates: list[int] = []
        self._adjust: list[float] = []
        self._factors = torch.ones(self.rows, dtype=torch.float32, device=device)
        self.kinds = list(kinds.values())
        self.num_partials = self.num_squares = 0
        # Offsets of the partial squares of each parameter, by its index.
        self._square_runs: dict[int, range] = {}
        self._order = states.indices
        self._square_lines: Tensor | None = None
        for kind in self.kinds:
            self._lay_out(kind, device)
        self.partials = torch.empty(self.num_partials, dtype=torch.float32, device=device)
        self.squares = torch.empty(self.num_squares, dtype=torch.float32, device=device)

    def _lay_out(self, kind: _Kind, device: torch.device) -> None:
        blocks, reduces, columns, runs, samples = [], [], [], [], []
        for state in kind.states:
            stack, rows, cols = _grid(state)
            for e in range(stack):
                first, last = e * rows, (e + 1) * rows
                blocks.append(_programs(state, range(first, last, kind.tile[0]), last, e))
                samples.append(_programs(state, range(0, max(rows, cols), _BLOCK), rows, e))
                if kind.factors:
                    starts = range(first, last, _REDUCE_ROWS)
                    summed = _programs(state, range(0, cols, _COLUMNS), cols, e)
                    summed[:, k.PARTIAL.value] = self.num_partials
                    summed[:, k.NUM_BLOCKS.value] = len(starts)
                    columns.append(summed)
                    reduced = _programs(state, starts, last, e)
                    where = self.num_partials + cols * torch.arange(len(starts))
                    reduced[:, k.PARTIAL.value] = where
                    reduces.append(reduced)
                    self.num_partials += cols * len(starts)
            if not kind.factors:
                size = state.raw.numel()
                run = _programs(state, range(0, size, _FLAT), size, 0)
                run[:, k.STOP.value] = (run[:, k.START.value] + _FLAT).clamp(max=size)
                runs.append(run)

        def table(programs: list[Tensor]) -> Tensor:
            empty = torch.empty(0, k.PROGRAM.value, dtype=torch.int64)
            return torch.cat([empty, *programs]).to(device)

        first = self.num_squares
        for state in kind.states:
            stack, rows, _ = _grid(state)
            whole = state.raw.numel()
            count = stack * -(-rows // _REDUCE_ROWS) if kind.factors else -(-whole // _FLAT)
            self._square_runs[state.index] = range(first, first + count)
            first += count
        kind.row_blocks, kind.samples = table(blocks), table(samples)
        kind.reduce_blocks, kind.column_blocks = table(reduces), table(columns)
        kind.runs = table(runs)
        self.num_squares += len(kind.reduce_blocks) if kind.factors else len(kind.runs)

    def refresh(self, states: ParameterSet, updates: Sequence[Tensor]) -> None:
        """Send the addresses that have changed since the last call, usually none."""
        grads = [0 if state.grad is None else state.grad.data_ptr() for state in states]
        if grads != self._grads:
            self._grads = grads
            self._send(grads, k.GRAD.value)
        where = [update.data_ptr() for update in updates]
        if updates and where != self._updates:
            self._updates = where
            self._send(where, k.UPDATE.value)

    def _send(self, addresses: list[int], column: int) -> None:
        fresh = torch.tensor(addresses, dtype=torch.int64)
        self.addresses[self.indices, column] = to_device(fresh, self.device)

    def squares_of_each(self) -> Tensor:
        """Return the squared norm of each parameter's gradient, in the order of the set."""
        if self._square_lines is None:
            runs = [torch.tensor(self._square_runs.get(i, ())).long() for i in self._order]
            self._square_lines = torch.nn.utils.rnn.pad_sequence(
                runs, batch_first=True, padding_value=self.num_squares
            ).to(self.device)
        # Gathered into lines and summed along them: the same order every time, unlike atomics.
        padded = torch.cat([self.squares, self.squares.new_zeros(1)])
        return padded[self._square_lines].sum(1)

    def factors(self, adjust: Sequence[float]) -> Tensor:
        """Return the learning-rate factors of all parameters, on the device."""
        if list(adjust) != self._adjust:
            self._adjust = list(adjust)
            self._factors[self.indices] = to_device(torch.tensor(adjust).float(), self.device)
        return self._factors


def reduce(active: ParameterSet, each: Tensor | None = None) -> Tensor:
    """Write the row and column sums of every matrix; return the gradients' squared norm."""
    for state in active:
        grad = state.grad
        assert grad is not None
        if not grad.is_contiguous():
            state.grad = grad.contiguous()
        elif grad.data_ptr() % 16:
            # A view into a bucket of gradients can start anywhere.
            state.grad = grad.clone()
    tables = _tables_for(active)
    start = 0
    for kind in tables.kinds:
        if kind.factors:
            count = len(kind.reduce_blocks)
            k.reduce_kernel[(count,)](
                tables.addresses,
                kind.reduce_blocks,
                tables.partials,
                tables.squares[start:],
                kind.grad_type,
                kind.aligned,
                *kind.reduce_tile,
                num_warps=_WARPS,
            )
            k.column_sums_kernel[(len(kind.column_blocks),)](
                tables.addresses, kind.column_blocks, tables.partials, _COLUMNS, num_warps=2
            )
        else:
            count = len(kind.runs)
            k.squares_kernel[(count,)](
                tables.addresses,
                kind.runs,
                tables.squares[start:],
                kind.grad_type,
                _BLOCK,
                num_warps=_WARPS,
            )
        start += count
    if each is not None:
        each[tables.indices] = tables.squares_of_each()
    return tables.squares.sum()


def tabulate(rates: Tensor, class_of: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hyper-parameters of all raw weights, and those of their multipliers."""
    size = len(steps)
    tables = steps.new_empty(2, size, k.HYPERS.value)
    k.tabulate_kernel[(triton.cdiv(size, _COLUMNS),)](
        rates, class_of, steps, tables[0], tables[1], size, _COLUMNS
    )
    return tables[0], tables[1]


def adamw_(active: ParameterSet, hyper: Tensor, clip: Tensor, go: Tensor) -> None:
    """Update raw weights by AdamW and write the effective weights."""
    tables = _tables_for(active)
    for kind in tables.kinds:
        if kind.factors:
            k.adamw_kernel[(len(kind.row_blocks),)](
                tables.addresses,
                kind.row_blocks,
                hyper,
                clip,
                go,
                kind.grad_type,
                kind.weight_type,
                kind.aligned,
                *kind.tile,
                num_warps=_WARPS,
            )
        else:
            k.adamw_flat_kernel[(len(kind.runs),)](
                tables.addresses,
                kind.runs,
                hyper,
                clip,
                go,
                kind.grad_type,
                kind.weight_type,
                kind.owns_raw,
                kind.even,
                _BLOCK,
                num_warps=_WARPS,
            )


def muon_momentum_(
    active: ParameterSet,
    updates: Sequence[Tensor],
    clip: Tensor,
    momentum: float,
    nesterov: bool,
    go: Tensor,
) -> None:
    """Update the momentum of every raw gradient; write the updates before orthogonalization."""
    tables = _tables_for(active, updates)
    for kind in tables.kinds:
        k.momentum_kernel[(len(kind.row_blocks),)](
            tables.addresses,
            kind.row_blocks,
            clip,
            go,
            momentum,
            kind.grad_type,
            _TYPES[updates[0].dtype],
            kind.factors,
            nesterov,
            kind.aligned,
            *kind.tile,
            num_warps=_WARPS,
        )


def muon_apply_(
    active: ParameterSet,
    updates: Sequence[Tensor],
    hyper: Tensor,
    adjust: Sequence[float],
    go: Tensor,
) -> None:
    """Decay raw weights, take the orthogonalized step and write the effective weights."""
    tables = _tables_for(active, [update.contiguous() for update in updates])
    factors = tables.factors(adjust)
    for kind in tables.kinds:
        k.apply_kernel[(len(kind.row_blocks),)](
            tables.addresses,
            kind.row_blocks,
            hyper,
            factors,
            go,
            _TYPES[updates[0].dtype],
            kind.weight_type,
            kind.factors,
            kind.owns_raw,
            kind.aligned,
            *kind.tile,
            num_warps=_WARPS,
        )


def multipliers_(
    state: tuple[Tensor, Tensor, Tensor],
    grads: Tensor,
    owner: Tensor,
    trained: Tensor,
    active: Tensor,
    hyper: Tensor,
    clip: Tensor,
    go: Tensor,
) -> None:
    """Update all multipliers by AdamW; `owner` is the row of `hyper` for each of them."""
    size = grads.numel()
    k.multiplier_adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        *state, grads, owner, trained, active, hyper, clip, go, size, _BLOCK
    )


def touched_from_outside(states: ParameterSet) -> Tensor:
    """Return for each parameter whether a sample of entries differs from what was written."""
    tables = _tables_for(states)
    touched = torch.zeros(tables.rows, dtype=torch.int32, device=tables.device)
    for kind in tables.kinds:
        if not kind.owns_raw:
            continue
        flags = torch.empty(len(kind.samples), dtype=torch.int32, device=tables.device)
        k.touched_kernel[(len(kind.samples),)](
            tables.addresses, kind.samples, flags, kind.weight_type, kind.factors, _BLOCK
        )
        touched.scatter_reduce_(0, kind.samples[:, k.SLOT.value], flags, "amax")
    return touched[tables.indices].bool()


def _tables_for(states: ParameterSet, updates: Sequence[Tensor] = ()) -> _Tables:
    """Return the tables of a set of parameters with current addresses, made at first use."""
    # Only the check for outside writes takes parameters without a gradient; it reads none.
    dtypes = [(state.weight if state.grad is None else state.grad).dtype for state in states]
    if states.tables is None or states.tables.grad_dtypes != dtypes:
        states.tables = _Tables(states, dtypes)
    states.tables.refresh(states, updates)
    return states.tables


def _programs(state: ParameterState, starts: range, stop: int, stack: int) -> Tensor:
    """Return a row of the table of programs for each start."""
    programs = torch.zeros(len(starts), k.PROGRAM.value, dtype=torch.int64)
    programs[:, k.SLOT.value] = state.index
    programs[:, k.START.value] = torch.arange(starts.start, starts.stop, starts.step)
    programs[:, k.STOP.value] = stop
    programs[:, k.STACK.value] = stack
    return programs


def _grid(state: ParameterState) -> tuple[int, int, int]:
    """Return (stack, rows, cols) of a parameter as stored."""
    if state.factors is not None:
        rows, cols = state.factors
        return (*rows.shape, cols.shape[1])
    if state.raw.ndim >= 2:
        return (1, state.raw.numel() // max(state.raw.shape[-1], 1), state.raw.shape[-1])
    return (1, 1, state.raw.numel())


def _addresses(state: ParameterState) -> list[int]:
    row = [0] * k.FIELDS.value
    # If the storage of a parameter moves, it is bound again, with new tables.
    row[k.WEIGHT.value], row[k.RAW.value] = state.weight.data_ptr(), state.raw.data_ptr()
    for column, moment in zip((k.FIRST, k.SECOND), state.moments, strict=False):
        row[column.value] = moment.data_ptr()
    row[k.NUM_COLS.value] = _grid(state)[2]
    if state.factors and state.next_factors and state.sums:
        columns = (k.ROW, k.COL, k.ROW_NEXT, k.COL_NEXT, k.ROW_SUM, k.COL_SUM)
        tensors = (*state.factors, *state.next_factors, *state.sums)
        for column, tensor in zip(columns, tensors, strict=True):
            row[column.value] = tensor.data_ptr()
    return row


def _check(state: ParameterState) -> None:
    if state.raw.dtype != torch.float32:
        raise ValueError("the Triton kernels train in float32; use backend='torch' for float64")
    if not state.weight.is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(state.weight.shape)} is not contiguous; make it so, or "
            "use backend='torch'"
        )
