"""One parameter, bound to the tensors an optimizer keeps for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.kernels._work import Factors, Work
from learnable_multipliers.optim._packed_multipliers import MultiplierBank
from learnable_multipliers.optim._sharding import Share, local


@dataclass
class Slot:
    """One parameter, bound to the tensors the optimizer keeps for it."""

    parameter: torch.nn.Parameter
    name: str
    group: dict[str, Any]
    matrix: Matrix | None
    share: Share
    work: Work
    step: Tensor
    """Its count of steps, as the state holds it."""
    sharded: bool
    owns_raw: bool
    version: int = -1
    pointer: int = 0

    def lies_elsewhere(self) -> bool:
        """Tell whether the parameter's storage is another than the last step's."""
        parameter = local(self.parameter) if self.sharded else self.parameter
        return (
            parameter.data_ptr() != self.pointer or self.parameter.dtype != self.work.weight.dtype
        )


def factors_of(bank: MultiplierBank, place: int, transposed: bool) -> Factors:
    """Return views of the bank along a matrix's stored rows and columns."""
    out = [
        bank.out_view(f, place) for f in (bank.out_factors, bank.out_factors_next, bank.out_sums)
    ]
    into = [bank.in_view(f, place) for f in (bank.in_factors, bank.in_factors_next, bank.in_sums)]
    rows, cols = (into, out) if transposed else (out, into)
    return Factors(
        rows=rows[0],
        rows_next=rows[1],
        row_sums=rows[2],
        cols=cols[0],
        cols_next=cols[1],
        col_sums=cols[2],
    )


def start_raw(work: Work) -> None:
    """Set the raw weight behind the effective one, at the factors its bank has written."""
    work.raw.copy_(work.weight)
    if work.factors is not None:
        f = work.factors
        stacked = work.raw.view(f.rows.shape[0], f.rows.shape[1], f.cols.shape[1])
        stacked.div_(f.rows.unsqueeze(-1)).div_(f.cols.unsqueeze(-2))


def can_be_divided(work: Work) -> bool:
    """Tell whether no factor of a matrix is zero, so that a raw weight can follow."""
    return work.factors is not None and bool(work.factors.rows.all() & work.factors.cols.all())
