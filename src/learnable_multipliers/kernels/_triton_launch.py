"""Launches the Triton kernels: tables of addresses, one launch for all parameters of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnable_multipliers.kernels import _triton_kernels as k
from learnable_multipliers.kernels._transfer import sent
from learnable_multipliers.kernels._work import Rates, Work

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
"""Numbers per program where nothing is multiplied."""
_BLOCK = 1024
_MOST_TABLES = 48
"""Lists of parameters whose tables are kept; more of them start over."""


@dataclass
class _Kind:
    """Parameters that one launch can serve: same dtypes, same way of updating."""

    grad_type: Any
    weight_type: Any
    factors: bool
    owns_raw: bool
    even: bool
    """Tensors start at multiples of 16 bytes."""
    aligned: bool
    """So does every row, so that whole vectors can be read."""
    tile: tuple[int, int]
    works: list[Work] = field(default_factory=list)
    row_blocks: Tensor | None = None
    """Programs over blocks of rows, for updates."""
    reduce_blocks: Tensor | None = None
    column_blocks: Tensor | None = None
    runs: Tensor | None = None
    """Programs over runs of numbers, where nothing is multiplied."""
    samples: Tensor | None = None


class _Tables:
    """Everything the kernels look up for one list of parameters."""

    def __init__(self, works: list[Work]):
        device = works[0].raw.device
        self.device = device
        self.rows = 1 + max(work.index for work in works)
        addresses = torch.zeros(self.rows, k.FIELDS.value, dtype=torch.int64)
        kinds: dict[tuple[Any, ...], _Kind] = {}
        for work in works:
            _check(work)
            if work.raw.numel() == 0:
                continue
            addresses[work.index] = torch.tensor(_addresses(work))
            cols = _grid(work)[2]
            tile = _LONG_ROWS if cols >= _LONG_ROWS[1] else _SHORT_ROWS
            even = all(t.data_ptr() % 16 == 0 for t in (work.weight, work.raw, *work.moments))
            aligned = even and cols % 16 == 0
            flags = (work.factors is not None, work.owns_raw, even, aligned, tile)
            key = (work.grad.dtype, work.weight.dtype, *flags)
            types = _TYPES[work.grad.dtype], _TYPES[work.weight.dtype]
            kinds.setdefault(key, _Kind(*types, *flags)).works.append(work)
        self.addresses = addresses.to(device)
        self.indices = torch.tensor([work.index for work in works]).to(device)
        self._found: list[tuple[int, ...]] = []
        self._where: list[tuple[int, ...]] = []
        self._adjust: list[float] = []
        self._factors = torch.ones(self.rows, dtype=torch.float32, device=device)
        self.kinds = list(kinds.values())
        self.num_partials = self.num_squares = 0
        # Where the partial squares of each parameter lie, by its index.
        self._square_runs: dict[int, range] = {}
        self._order = [work.index for work in works]
        self._square_lines: Tensor | None = None
        for kind in self.kinds:
            self._lay_out(kind, device)
        self.partials = torch.empty(self.num_partials, dtype=torch.float32, device=device)
        self.squares = torch.empty(self.num_squares, dtype=torch.float32, device=device)

    def _lay_out(self, kind: _Kind, device: torch.device) -> None:
        blocks, reduces, columns, runs, samples = [], [], [], [], []
        for work in kind.works:
            stack, rows, cols = _grid(work)
            for e in range(stack):
                first, last = e * rows, (e + 1) * rows
                blocks.append(_programs(work, range(first, last, kind.tile[0]), last, e))
                samples.append(_programs(work, range(0, max(rows, cols), _BLOCK), rows, e))
                if kind.factors:
                    starts = range(first, last, _REDUCE_ROWS)
                    summed = _programs(work, range(0, cols, _COLUMNS), cols, e)
                    summed[:, k.PARTIAL.value] = self.num_partials
                    summed[:, k.NUM_BLOCKS.value] = len(starts)
                    columns.append(summed)
                    reduced = _programs(work, starts, last, e)
                    where = self.num_partials + cols * torch.arange(len(starts))
                    reduced[:, k.PARTIAL.value] = where
                    reduces.append(reduced)
                    self.num_partials += cols * len(starts)
            if not kind.factors:
                size = work.raw.numel()
                run = _programs(work, range(0, size, _FLAT), size, 0)
                run[:, k.STOP.value] = (run[:, k.START.value] + _FLAT).clamp(max=size)
                runs.append(run)

        def table(programs: list[Tensor]) -> Tensor:
            empty = torch.empty(0, k.PROGRAM.value, dtype=torch.int64)
            return torch.cat([empty, *programs]).to(device)

        first = self.num_squares
        for work in kind.works:
            stack, rows, _ = _grid(work)
            whole = work.raw.numel()
            count = stack * -(-rows // _REDUCE_ROWS) if kind.factors else -(-whole // _FLAT)
            self._square_runs[work.index] = range(first, first + count)
            first += count
        kind.row_blocks, kind.samples = table(blocks), table(samples)
        kind.reduce_blocks, kind.column_blocks = table(reduces), table(columns)
        kind.runs = table(runs)
        self.num_squares += len(kind.reduce_blocks) if kind.factors else len(kind.runs)

    def refresh(self, works: list[Work], updates: Sequence[Tensor] = ()) -> None:
        """Send the addresses that have changed since the last time; mostly none have."""
        found = [(work.grad.data_ptr(), work.weight.data_ptr()) for work in works]
        if found != self._found:
            self._found = found
            self._send(found, slice(k.GRAD.value, k.WEIGHT.value + 1))
        where = [(update.data_ptr(),) for update in updates]
        if updates and where != self._where:
            self._where = where
            self._send(where, slice(k.UPDATE.value, k.UPDATE.value + 1))

    def _send(self, listed: list[tuple[int, ...]], columns: slice) -> None:
        fresh = torch.tensor(listed, dtype=torch.int64)
        self.addresses[self.indices, columns] = sent(fresh, self.device)

    def squares_of_each(self) -> Tensor:
        """Return the squared norm of each parameter's gradient, in the order of the works."""
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
            self._factors[self.indices] = sent(torch.tensor(adjust).float(), self.device)
        return self._factors


class TritonKernels:
    """The kernels of `reference.py`, with the same names and arguments."""

    decides_on_host = False

    def __init__(self) -> None:
        self._tables: dict[int, tuple[list[Work], list[torch.dtype], _Tables]] = {}

    def reduce(self, works: list[Work], each: Tensor | None = None) -> Tensor:
        """Write the row and column sums of every matrix; return the gradients' squared norm."""
        for work in works:
            if not work.grad.is_contiguous():
                work.grad = work.grad.contiguous()
            elif work.grad.data_ptr() % 16:
                # A view into a bucket of gradients can start anywhere.
                work.grad = work.grad.clone()
        tables = self._tables_for(works)
        tables.refresh(works)
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
                    *_REDUCE_TILES[kind.works[0].grad.element_size()],
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

    def tabulate(self, rates: Rates) -> tuple[Tensor, Tensor]:
        """Return the hyper-parameters of all raw weights, and those of their multipliers."""
        size = len(rates.steps)
        tables = rates.steps.new_empty(2, size, k.HYPERS.value)
        k.tabulate_kernel[(triton.cdiv(size, _COLUMNS),)](
            rates.table, rates.class_of, rates.steps, tables[0], tables[1], size, _COLUMNS
        )
        return tables[0], tables[1]

    def adamw_(self, works: list[Work], hyper: Tensor, clip: Tensor, go: Tensor) -> None:
        """Update raw weights by AdamW and write the effective weights."""
        tables = self._tables_for(works)
        tables.refresh(works)
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
        self,
        works: list[Work],
        updates: Sequence[Tensor],
        clip: Tensor,
        momentum: float,
        nesterov: bool,
        go: Tensor,
    ) -> None:
        """Update the momentum of every raw gradient and write what is to be orthogonalized."""
        tables = self._tables_for(works)
        tables.refresh(works, updates)
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
        self,
        works: list[Work],
        updates: Sequence[Tensor],
        hyper: Tensor,
        adjust: Sequence[float],
        go: Tensor,
    ) -> None:
        """Decay raw weights, take the orthogonalized step and write the effective weights."""
        tables = self._tables_for(works)
        tables.refresh(works, [update.contiguous() for update in updates])
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
        self,
        state: tuple[Tensor, Tensor, Tensor],
        grads: Tensor,
        owner: Tensor,
        trained: Tensor,
        active: Tensor,
        hyper: Tensor,
        clip: Tensor,
        go: Tensor,
    ) -> None:
        """AdamW on all multipliers; `owner` tells each one's row in the hyper-parameters."""
        size = grads.numel()
        k.multiplier_adamw_kernel[(triton.cdiv(size, _BLOCK),)](
            *state, grads, owner, trained, active, hyper, clip, go, size, _BLOCK
        )

    def touched_from_outside(self, works: list[Work]) -> Tensor:
        """Tell for each parameter whether it is what was written, on a sample of entries."""
        tables = self._tables_for(works)
        tables.refresh(works)
        found = torch.zeros(tables.rows, dtype=torch.int32, device=tables.device)
        for kind in tables.kinds:
            if not kind.owns_raw:
                continue
            flags = torch.empty(len(kind.samples), dtype=torch.int32, device=tables.device)
            k.touched_kernel[(len(kind.samples),)](
                tables.addresses, kind.samples, flags, kind.weight_type, kind.factors, _BLOCK
            )
            found.scatter_reduce_(0, kind.samples[:, k.SLOT.value], flags, "amax")
        return found[tables.indices].bool()

    def _tables_for(self, works: list[Work]) -> _Tables:
        """Return the tables of a list of works, made once for each list."""
        known = self._tables.get(id(works))
        types = [work.grad.dtype for work in works]
        if known is None and len(self._tables) >= _MOST_TABLES:
            self._tables.clear()
        if known is None or known[0] is not works or known[1] != types:
            known = self._tables[id(works)] = (works, types, _Tables(works))
        return known[2]


def _programs(work: Work, starts: range, stop: int, stack: int) -> Tensor:
    """Return a row of the table of programs for each start."""
    programs = torch.zeros(len(starts), k.PROGRAM.value, dtype=torch.int64)
    programs[:, k.SLOT.value] = work.index
    programs[:, k.START.value] = torch.arange(starts.start, starts.stop, starts.step)
    programs[:, k.STOP.value] = stop
    programs[:, k.STACK.value] = stack
    return programs


def _grid(work: Work) -> tuple[int, int, int]:
    """Return (stack, rows, cols) of a parameter as stored."""
    if work.factors is not None:
        return (*work.factors.rows.shape, work.factors.cols.shape[1])
    if work.raw.ndim >= 2:
        return (1, work.raw.numel() // max(work.raw.shape[-1], 1), work.raw.shape[-1])
    return (1, 1, work.raw.numel())


def _addresses(work: Work) -> list[int]:
    row = [0] * k.FIELDS.value
    row[k.RAW.value] = work.raw.data_ptr()
    for column, moment in zip((k.FIRST, k.SECOND), work.moments, strict=False):
        row[column.value] = moment.data_ptr()
    row[k.NUM_COLS.value] = _grid(work)[2]
    if work.factors is not None:
        f = work.factors
        columns = (k.ROW, k.COL, k.ROW_NEXT, k.COL_NEXT, k.ROW_SUM, k.COL_SUM)
        tensors = (f.rows, f.cols, f.rows_next, f.cols_next, f.row_sums, f.col_sums)
        for column, tensor in zip(columns, tensors, strict=True):
            row[column.value] = tensor.data_ptr()
    return row


def _check(work: Work) -> None:
    if work.raw.dtype != torch.float32:
        raise ValueError("the Triton kernels train in float32; use backend='torch' for float64")
    if not work.weight.is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(work.weight.shape)} is not contiguous; make it so, or "
            "use backend='torch'"
        )
