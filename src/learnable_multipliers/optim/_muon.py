"""Muon whose weights carry learnable multipliers, with AdamW for what is not a hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._batches import AdjustLr, Batches, update_dtype
from learnable_multipliers.optim._binding import MOST_SUBSETS, Binding
from learnable_multipliers.optim._exchange import SharedBatches, gathered_boxes
from learnable_multipliers.optim._groups import MULTIPLIER_WEIGHT_DECAY
from learnable_multipliers.optim._newton_schulz import COEFFICIENTS, Coefficients
from learnable_multipliers.optim._process_group import team_in
from learnable_multipliers.optim._sharding import Box
from learnable_multipliers.optim._slots import Slot

_NOT_HIDDEN = {"embedding", "position-embedding", "tied-embedding", "head", "router"}


@dataclass(frozen=True, kw_only=True)
class _HiddenSide:
    """What belongs to one list of hidden matrices."""

    batches: Batches | SharedBatches
    indices: Tensor
    """Of the matrices among all parameters."""
    sizes: Tensor
    """Numbers in each matrix, on all ranks together."""


class Muon(MultiplierOptimizer):
    """Muon on hidden matrices; AdamW on embeddings, head, routers, vectors and multipliers.

    Momentum and the step live on the raw weight, so the orthogonalized matrix is that of
    `row_i col_j G_ij`. Each block of a fused matrix, and each expert of a stack, is
    orthogonalized by itself. AdamW's learning rate is `lr * adamw_lr_scale`.

    Ranks that hold parts or copies of the matrices share the work: each matrix is orthogonalized
    on one of them. Sharded parameters tell which ranks these are; under DistributedDataParallel,
    `process_group` does.
    """

    # Not part of a copy: process groups cannot be copied.
    _process_group: Any = None
    _layout: list[tuple[str, int, str]] | None = None
    _boxes: dict[str, list[Box]]

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
        process_group: Any = None,
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
        self._process_group = process_group
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

    def _update_(
        self, bound: Binding, active: list[Slot], hyper: Any, clip: Tensor, go: Tensor
    ) -> None:
        hidden, rest = self._sides(active)
        if rest:
            bound.kernels.adamw_(bound.works(rest), hyper, clip, go)
        if not hidden:
            return
        if id(hidden) not in self._hidden:
            self._hidden[id(hidden)] = self._hidden_side(hidden)
        side = self._hidden[id(hidden)]
        works = bound.works(hidden)
        self._average_squares(bound, side, clip, go)
        updates = side.batches.fresh()
        bound.kernels.muon_momentum_(works, updates, clip, self.momentum, self.nesterov, go)
        updates = side.batches.orthogonalize(updates, self.coefficients)
        bound.kernels.muon_apply_(works, updates, hyper, side.batches.adjust, go)

    def _average_squares(self, bound: Binding, side: _HiddenSide, clip: Tensor, go: Tensor) -> None:
        """Follow mean(g^2) of the clipped raw gradients by an average with beta2.

        It starts from the first one it sees, so that its expectation on noise needs no
        correction, whenever that was.
        """
        assert bound.squares is not None
        at = side.indices
        before = bound.mean_squares[at]
        square = bound.squares[at] * clip.to(before.dtype).square() / side.sizes
        towards = (1 - self._rates(bound).beta2[at]).to(before.dtype)
        after = torch.where(before == 0, square, before.lerp(square, towards))
        bound.mean_squares[at] = torch.where(go != 0, after, before)

    def _bind(self) -> None:
        super()._bind()
        self._split: dict[int, tuple[list[Slot], list[Slot], list[Slot]]] = {}
        self._hidden: dict[int, _HiddenSide] = {}
        self._share_out()

    def _share_out(self) -> None:
        """Learn what other ranks hold of the hidden matrices, if there are such ranks."""
        bound = self._bound()
        self._workers = bound.team
        if self._process_group is not None:
            if bound.team is not None:
                raise ValueError(
                    "process_group is for parameters that are not sharded; sharded ones tell which "
                    "ranks share them, so leave it out"
                )
            self._workers = team_in(self._process_group)
        if self._workers is None:
            return
        hidden = [slot for slot in bound.slots if is_hidden(slot.matrix)]
        layout = [(slot.name, slot.share.num_parts, str(_placements(slot))) for slot in hidden]
        if hidden and layout != self._layout:
            # Asked once for a layout: one rank may bind anew when others need not.
            own = [slot.share.box for slot in hidden]
            boxes = gathered_boxes(self._workers, own, bound.device)
            self._boxes = dict(zip((slot.name for slot in hidden), boxes, strict=True))
            self._layout = layout

    def _hidden_side(self, hidden: list[Slot]) -> _HiddenSide:
        matrices = [slot.matrix for slot in hidden if slot.matrix is not None]
        raws = [slot.work.raw for slot in hidden]
        device = raws[0].device
        if self._workers is None:
            batches = Batches(matrices, self.adjust_lr, update_dtype(raws[0]), device)
        else:
            boxes = [self._boxes[slot.name] for slot in hidden]
            batches = SharedBatches(matrices, boxes, raws, self._workers, self.adjust_lr)
        sizes = [max(math.prod(matrix.shape), 1) for matrix in matrices]
        return _HiddenSide(
            batches=batches,
            indices=torch.tensor([slot.work.index for slot in hidden], device=device),
            sizes=torch.tensor(sizes, dtype=raws[0].dtype, device=device),
        )

    def _sides(self, slots: list[Slot]) -> tuple[list[Slot], list[Slot]]:
        """Return the slots Muon trains and those AdamW does, the same lists for the same slots."""
        if len(self._split) > MOST_SUBSETS:
            self._split.clear()
            self._hidden.clear()
        known = self._split.get(id(slots))
        if known is None or known[0] is not slots:
            hidden = [slot for slot in slots if is_hidden(slot.matrix)]
            rest = [slot for slot in slots if not is_hidden(slot.matrix)]
            known = self._split[id(slots)] = (slots, hidden, rest)
        return known[1], known[2]


def is_hidden(matrix: Matrix | None) -> bool:
    """Tell a matrix that Muon trains: inside the model, not at its ends."""
    return matrix is not None and not any(block.role in _NOT_HIDDEN for block in matrix.blocks)


def _placements(slot: Slot) -> Any:
    return slot.parameter.placements if slot.sharded else None  # pyright: ignore[reportAttributeAccessIssue]
