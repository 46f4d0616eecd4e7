"""Muon whose weights carry learnable multipliers, with AdamW for what is not a hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from learnable_multipliers.kernels.backend import Backend
from learnable_multipliers.multiplier import Matrix
from learnable_multipliers.optim.base import MOST_SUBSETS, MultiplierOptimizer
from learnable_multipliers.optim.groups import MULTIPLIER_WEIGHT_DECAY
from learnable_multipliers.optim.newton_schulz import COEFFICIENTS, Coefficients, orthogonalize
from learnable_multipliers.optim.slots import Slot

AdjustLr = Literal["match_rms_adamw", "original"]
_NOT_HIDDEN = {"embedding", "position-embedding", "tied-embedding", "head", "router"}


class Muon(MultiplierOptimizer):
    """Muon on hidden matrices; AdamW on embeddings, head, routers, vectors and multipliers.

    Momentum and the step live on the raw weight, so the orthogonalized matrix is that of
    `row_i col_j G_ij`. Each block of a fused matrix, and each expert of a stack, is
    orthogonalized by itself. AdamW's learning rate is `lr * adamw_lr_scale`.
    """

    _settings = (
        *MultiplierOptimizer._settings,
        "momentum",
        "nesterov",
        "adjust_lr",
        "coefficients",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        adjust_lr: AdjustLr = "match_rms_adamw",
        coefficients: Coefficients = "quintic",
        adamw_lr_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        multiplier_lr_scale: float = 1.0,
        multiplier_weight_decay: float = MULTIPLIER_WEIGHT_DECAY,
        max_grad_norm: float | None = None,
        backend: Backend = "auto",
    ):
        if adjust_lr not in get_args(AdjustLr):
            raise ValueError(f"unknown adjust_lr {adjust_lr!r}; choose from {get_args(AdjustLr)}")
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"unknown coefficients {coefficients!r}; choose from {', '.join(COEFFICIENTS)}"
            )
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        self.momentum, self.nesterov = momentum, nesterov
        self.adjust_lr: AdjustLr = adjust_lr
        self.coefficients: Coefficients = coefficients
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_lr_scale": adamw_lr_scale,
            "multiplier_lr_scale": multiplier_lr_scale,
            "multiplier_weight_decay": multiplier_weight_decay,
        }
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, backend=backend)
        if not any(group["matrices"] for group in self.param_groups):
            raise ValueError(
                "Muon must know which matrices are hidden ones and how fused ones are split: give "
                "it lrm.param_groups(model, plan)"
            )

    def _moment_names(self, group: dict[str, Any], matrix: Matrix | None) -> tuple[str, ...]:
        return ("momentum_buffer",) if is_hidden(matrix) else ("exp_avg", "exp_avg_sq")

    def _keeps_mean_square(self, matrix: Matrix | None) -> bool:
        return is_hidden(matrix)

    def _lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        lr = super()._lr(group, matrix)
        return lr if is_hidden(matrix) else lr * group["adamw_lr_scale"]

    def _update_(self, slots: list[Slot], hyper: Any, clip: Tensor, go: Tensor) -> None:
        hidden, rest = self._sides(slots)
        if rest:
            self._kernels.adamw_(self._works(rest), hyper, clip, go)
        if not hidden:
            return
        if id(hidden) not in self._batches:
            self._batches[id(hidden)] = _Batches(hidden, self.adjust_lr)
        batches = self._batches[id(hidden)]
        works = self._works(hidden)
        self._average_squares(batches, clip, go)
        updates = batches.fresh()
        self._kernels.muon_momentum_(works, updates, clip, self.momentum, self.nesterov, go)
        updates = batches.orthogonalize(updates, self.coefficients)
        self._kernels.muon_apply_(works, updates, hyper, batches.adjust, go)

    def _average_squares(self, batches: _Batches, clip: Tensor, go: Tensor) -> None:
        """Follow mean(g^2) of the clipped raw gradients by an average with beta2.

        It starts from the first one it sees, so that its expectation on noise needs no
        correction, whenever that was.
        """
        assert self._squares is not None
        at = batches.indices
        before = self._mean_squares[at]
        square = self._squares[at] * clip.to(before.dtype).square() / batches.sizes
        towards = (1 - self._rates().beta2[at]).to(before.dtype)
        after = torch.where(before == 0, square, before.lerp(square, towards))
        self._mean_squares[at] = torch.where(go != 0, after, before)

    def _bind(self) -> None:
        super()._bind()
        self._split: dict[int, tuple[list[Slot], list[Slot], list[Slot]]] = {}
        self._batches: dict[int, _Batches] = {}

    def _sides(self, slots: list[Slot]) -> tuple[list[Slot], list[Slot]]:
        """Return the slots Muon trains and those AdamW does, the same lists for the same slots."""
        if len(self._split) > MOST_SUBSETS:
            self._split.clear()
            self._batches.clear()
        known = self._split.get(id(slots))
        if known is None or known[0] is not slots:
            hidden = [slot for slot in slots if is_hidden(slot.matrix)]
            for slot in hidden:
                if slot.sharded:
                    raise NotImplementedError(
                        f"{slot.name} is sharded: Muon needs whole matrices; use lrm.AdamW with "
                        "FSDP2"
                    )
            rest = [slot for slot in slots if not is_hidden(slot.matrix)]
            known = self._split[id(slots)] = (slots, hidden, rest)
        return known[1], known[2]


def is_hidden(matrix: Matrix | None) -> bool:
    """Tell a matrix that Muon trains: inside the model, not at its ends."""
    return matrix is not None and not any(block.role in _NOT_HIDDEN for block in matrix.blocks)


def lr_factor(rule: AdjustLr, num_out: int, num_in: int) -> float:
    """Return what Muon's learning rate is multiplied by for a matrix of this shape."""
    if rule == "original":
        return math.sqrt(max(1.0, num_out / max(num_in, 1)))
    return 0.2 * math.sqrt(max(num_out, num_in))


class _Batches:
    """Where the updates of many matrices lie, those of one shape side by side.

    A matrix that is one block and no stack has its update right in its batch; the blocks of
    others are copied in and out.
    """

    def __init__(self, slots: list[Slot], rule: AdjustLr):
        self._slots = slots
        self._counts: dict[tuple[int, int], int] = {}
        # For each matrix, the shape, first place and number of each of its blocks.
        self._places: list[list[tuple[tuple[int, int], int, int]]] = []
        self.adjust: list[float] = []
        for slot in slots:
            matrix = slot.matrix
            assert matrix is not None
            places = []
            for block in matrix.blocks:
                shape, count = _stored_shape(matrix, block.size), math.prod(matrix.stack)
                places.append((shape, self._counts.get(shape, 0), count))
                self._counts[shape] = self._counts.get(shape, 0) + count
            self._places.append(places)
            whole = len(places) == 1
            self.adjust.append(lr_factor(rule, matrix.num_out, matrix.num_in) if whole else 1.0)
        self._rule: AdjustLr = rule
        raw = slots[0].work.raw
        self.indices = torch.tensor([slot.work.index for slot in slots], device=raw.device)
        sizes = [max(slot.work.raw.numel(), 1) for slot in slots]
        self.sizes = torch.tensor(sizes, dtype=raw.dtype, device=raw.device)

    def fresh(self) -> list[Tensor]:
        """Return room for the update of each matrix."""
        raw = self._slots[0].work.raw
        dtype = _update_dtype(raw)
        self._batches = {
            shape: torch.empty(count, *shape, dtype=dtype, device=raw.device)
            for shape, count in self._counts.items()
        }
        apart = [
            torch.empty_like(slot.work.raw, dtype=dtype) if len(places) > 1 else None
            for slot, places in zip(self._slots, self._places, strict=True)
        ]
        return self._views(self._batches, apart)

    def orthogonalize(self, updates: list[Tensor], coefficients: Coefficients) -> list[Tensor]:
        """Return every update in its orthogonalized form."""
        for slot, update, places in zip(self._slots, updates, self._places, strict=True):
            if len(places) > 1:
                blocks = _block_views(slot.matrix, update)
                for block, (shape, start, count) in zip(blocks, places, strict=True):
                    room = self._batches[shape][start : start + count]
                    room.copy_(block.reshape(count, *shape))
        done = {shape: orthogonalize(x, coefficients) for shape, x in self._batches.items()}
        del self._batches
        for slot, update, places in zip(self._slots, updates, self._places, strict=True):
            matrix = slot.matrix
            assert matrix is not None
            if len(places) > 1:
                blocks = zip(matrix.blocks, _block_views(matrix, update), places, strict=True)
                for block, view, (shape, start, count) in blocks:
                    factor = lr_factor(self._rule, block.size * matrix.repeats, matrix.num_in)
                    view.copy_((done[shape][start : start + count] * factor).view(view.shape))
        return self._views(done, updates)

    def _views(
        self, batches: dict[tuple[int, int], Tensor], apart: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return each matrix's update: its place in a batch, or the tensor it has apart."""
        units = {shape: batch.unbind(0) for shape, batch in batches.items()}
        views = []
        for slot, places, own in zip(self._slots, self._places, apart, strict=True):
            shape, start, count = places[0]
            if len(places) > 1 and own is not None:
                views.append(own)
            elif slot.work.raw.ndim == 2:
                views.append(units[shape][start])
            else:
                views.append(batches[shape][start : start + count])
        return views


def _stored_shape(matrix: Matrix, block_size: int) -> tuple[int, int]:
    rows = block_size * matrix.repeats
    return (matrix.num_in, rows) if matrix.transposed else (rows, matrix.num_in)


def _block_views(matrix: Matrix | None, stored: Tensor) -> list[Tensor]:
    """Return the blocks of a stored matrix, as views with the repeats on an axis of their own."""
    assert matrix is not None
    sizes = [block.size for block in matrix.blocks]
    dim = -1 if matrix.transposed else -2
    grid = stored.unflatten(dim, matrix.row_pattern)
    return list(grid.split(sizes, dim if matrix.transposed else -2))


def _update_dtype(raw: Tensor) -> torch.dtype:
    """Newton-Schulz runs in bfloat16 on a GPU; a CPU is faster in float32."""
    if raw.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if raw.device.type == "cuda" else torch.float32
