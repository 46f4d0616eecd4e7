"""Muon whose weights carry learnable multipliers, with AdamW for all but hidden matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._plan import Plan, PlanEntry
from learnable_multipliers._rules import as_number
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._parameter import ParameterSet, Rates
from learnable_multipliers.optim._base import MultiplierOptimizer, check_fused_and_foreach
from learnable_multipliers.optim._batches import AdjustLr, Batches, Split, update_dtype
from learnable_multipliers.optim._binding import MEAN_SQUARE, Binding
from learnable_multipliers.optim._distributed_batches import DistributedBatches, gather_boxes
from learnable_multipliers.optim._orthogonalization import COEFFICIENTS, Coefficients
from learnable_multipliers.optim._sharding import Box, local_shard
from learnable_multipliers.roles import QKV, UNKNOWN

_NOT_HIDDEN = {"embedding", "position-embedding", "tied-embedding", "head", "router"}


@dataclass(frozen=True)
class _HiddenMatrices:
    """The hidden matrices among some parameters, with the batches for their updates."""

    states: ParameterSet
    batches: Batches | DistributedBatches
    indices: Tensor
    """Indices of the matrices among all parameters."""
    sizes: Tensor
    """Number of entries of each whole matrix."""


class Muon(MultiplierOptimizer):
    """Muon on hidden matrices; AdamW on embeddings, head, routers, vectors and multipliers.

    Momentum and update are those of the raw weight, whose gradient is `row_i col_j G_ij`. Each
    block of a fused matrix, and each expert of a stack, is orthogonalized by itself; with
    `split="heads"` so is each head of queries, keys and values. AdamW's learning rate is
    `lr * adamw_lr_scale`.

    Ranks that shard the matrices share the work: each matrix is orthogonalized on one rank. Under
    DistributedDataParallel every rank orthogonalizes all matrices, unless `process_group` names the
    ranks to share the work; a DDP model alone only makes replicas agree on skipped steps.

    Args:
        lr: Learning rate of hidden matrices. Settings that `lrm.AdamW` has too are as there.
        adjust_lr: `"match_rms_adamw"` gives updates the rms of AdamW's, so that its learning rates
            carry over; `"original"` is the factor of the first Muon, sqrt(max(1, out / in)).
        coefficients: Coefficients of the Newton-Schulz iteration.
        split: Orthogonalize each of the `"blocks"` by itself, or each of the `"heads"`.
        adamw_lr_scale: Learning rate of AdamW over `lr`.
    """

    _layout: list[tuple[str, int, str]] | None = None
    _boxes: dict[str, list[Box]]

    _settings = (
        *MultiplierOptimizer._settings,
        "nesterov",
        "adjust_lr",
        "coefficients",
        "split",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        weight_decay: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        adjust_lr: AdjustLr = "match_rms_adamw",
        coefficients: Coefficients = "quintic",
        split: Split = "blocks",
        adamw_lr_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        multiplier_lr_scale: float | None = None,
        multiplier_weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        clip_multipliers: bool = False,
        backend: Backend = "auto",
        process_group: Any = None,
        fused: bool | None = None,
        foreach: bool | None = None,
    ):
        check_fused_and_foreach(fused, foreach)
        if adjust_lr not in get_args(AdjustLr):
            raise ValueError(f"unknown adjust_lr {adjust_lr!r}; choose from {get_args(AdjustLr)}")
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"unknown coefficients {coefficients!r}; choose from {', '.join(COEFFICIENTS)}"
            )
        if split not in get_args(Split):
            raise ValueError(f"unknown split {split!r}; choose from {get_args(Split)}")
        self.nesterov = nesterov
        self.adjust_lr: AdjustLr = adjust_lr
        self.coefficients: Coefficients = coefficients
        self.split: Split = split
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "adamw_lr_scale": adamw_lr_scale,
            "multiplier_lr_scale": multiplier_lr_scale,
            "multiplier_weight_decay": multiplier_weight_decay,
        }
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            clip_multipliers=clip_multipliers,
            backend=backend,
            process_group=process_group,
        )
        if split == "heads":
            _check_heads(self.plan)

    def _moment_names(self, matrix: Matrix | None) -> tuple[str, ...]:
        if is_hidden(matrix):
            return ("momentum_buffer", MEAN_SQUARE)
        return super()._moment_names(matrix)

    def raw_lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        """Return the learning rate of a raw weight: Muon's or AdamW's."""
        lr = super().raw_lr(group, matrix)
        return lr if is_hidden(matrix) else lr * group["adamw_lr_scale"]

    def _check_group_settings(self, group: dict[str, Any]) -> None:
        super()._check_group_settings(group)
        if not 0 <= as_number("momentum", group["momentum"]) < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {group['momentum']}")

    def _summary(self) -> list[str]:
        """Return lines that say what is trained, and by which of the two optimizers."""
        trained = {
            name
            for group in self.param_groups
            if group.get("train") != "multipliers"
            for name in group.get("param_names", ())
        }
        entries = [entry for entry in self.plan.entries if entry.name in trained]
        return [*super()._summary(), *_division(entries)]

    def _update_(
        self, binding: Binding, active: ParameterSet, hyper: Any, clip: Tensor, go: Tensor
    ) -> None:
        if active not in self._partitions:
            self._partitions[active] = self._partition(active)
        hidden, rest = self._partitions[active]
        if rest:
            super()._update_(binding, rest, hyper, clip, go)
        if hidden is None:
            return
        self._average_squares(binding, hidden, clip, go)
        updates = hidden.batches.allocate()
        momentum = _shared_momentum(hidden.states)
        binding.kernels.muon_momentum_(hidden.states, updates, clip, momentum, self.nesterov, go)
        updates = hidden.batches.orthogonalize(updates, self.coefficients, self.backend)
        binding.kernels.muon_apply_(hidden.states, updates, hyper, hidden.batches.adjust, go)

    def _average_squares(
        self, binding: Binding, hidden: _HiddenMatrices, clip: Tensor, go: Tensor
    ) -> None:
        """Average mean(g^2) of the clipped raw gradients with beta2.

        The average starts at its first value, so that on noise its expectation needs no bias
        correction.
        """
        assert binding.squares is not None
        at = hidden.indices
        before = binding.mean_squares[at]
        square = binding.squares[at] * clip.to(before.dtype).square() / hidden.sizes
        beta2 = binding.rates[binding.class_of[at], Rates._fields.index("beta2")]
        after = torch.where(before == 0, square, before.lerp(square, (1 - beta2).to(before.dtype)))
        binding.mean_squares[at] = torch.where(go != 0, after, before)

    def _make_binding(self) -> Binding:
        binding = super()._make_binding()
        self._partitions: WeakKeyDictionary[
            ParameterSet, tuple[_HiddenMatrices | None, ParameterSet]
        ] = WeakKeyDictionary()
        self._workers = binding.process_group
        if self._process_group is not None and dist.get_world_size(self._process_group) > 1:
            self._workers = self._process_group
        if self._workers is not None:
            self._gather_boxes(binding, self._workers)
        return binding

    def _gather_boxes(self, binding: Binding, workers: dist.ProcessGroup) -> None:
        """Gather the boxes of the hidden matrices on every rank."""
        hidden = [state for state in binding.states if is_hidden(state.matrix)]
        shards = [local_shard(state.parameter, state.matrix) for state in hidden]
        layout = [
            (state.name, shard.num_shards, str(getattr(state.parameter, "placements", None)))
            for state, shard in zip(hidden, shards, strict=True)
        ]
        if hidden and layout != self._layout:
            # Once per layout: this is collective, and one rank may bind again when others do not.
            boxes = gather_boxes(workers, [shard.box for shard in shards], binding.device)
            self._boxes = dict(zip((state.name for state in hidden), boxes, strict=True))
            self._layout = layout

    def _partition(self, active: ParameterSet) -> tuple[_HiddenMatrices | None, ParameterSet]:
        """Return the parameters that Muon trains, and those that AdamW trains."""
        states = ParameterSet([state for state in active if is_hidden(state.matrix)])
        rest = ParameterSet([state for state in active if not is_hidden(state.matrix)])
        if not states:
            return None, rest
        matrices = [state.matrix for state in states if state.matrix is not None]
        raws = [state.raw for state in states]
        device = raws[0].device
        if self._workers is None:
            batches = Batches(matrices, self.adjust_lr, self.split, update_dtype(raws[0]), device)
        else:
            boxes = [self._boxes[state.name] for state in states]
            batches = DistributedBatches(
                matrices, boxes, raws, self._workers, self.adjust_lr, self.split
            )
        sizes = [max(math.prod(matrix.shape), 1) for matrix in matrices]
        indices = torch.tensor(states.indices, device=device)
        sizes = torch.tensor(sizes, dtype=raws[0].dtype, device=device)
        return _HiddenMatrices(states, batches, indices, sizes), rest


def is_hidden(matrix: Matrix | None) -> bool:
    """Return whether Muon trains a matrix: not at the ends of the model, and no router."""
    return matrix is not None and not any(block.role in _NOT_HIDDEN for block in matrix.blocks)


def _division(entries: Sequence[PlanEntry]) -> list[str]:
    """Return in words what Muon trains of some parameters, and what AdamW."""
    hidden = [entry for entry in entries if is_hidden(entry.matrix)]
    others = [entry for entry in entries if not entry.vector and not is_hidden(entry.matrix)]
    num_vectors = len(entries) - len(hidden) - len(others)
    roles = ", ".join(dict.fromkeys(entry.role for entry in others))
    by_adamw = _counted(len(others), "matrix", "matrices") + (f" ({roles})" if roles else "")
    lines = [
        f"Muon: {_counted(len(hidden), 'matrix', 'matrices')}; "
        f"AdamW: {by_adamw} and {_counted(num_vectors, 'vector', 'vectors')}"
    ]
    unknown = [entry.name for entry in hidden if UNKNOWN in entry.role.split(" | ")]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        lines.append(f"Muon trains matrices of unknown role: {', '.join(unknown[:3])}{more}")
    return lines


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _check_heads(plan: Plan) -> None:
    """Raise if the head size of queries, keys or values is unknown, or if there are none."""
    blocks = [
        (entry.name, block)
        for entry in plan.entries
        if entry.matrix is not None
        for block in entry.matrix.blocks
        if block.role in QKV
    ]
    unknown = [name for name, block in blocks if block.head_dim is None]
    if unknown:
        raise ValueError(
            f'split="heads" needs the rows of one head of {unknown[0]}, which the model does not '
            f'give: set it with a rule, lrm.Rule(r"{re.escape(unknown[0])}", head_dim=64)'
        )
    if not blocks:
        raise ValueError(
            'split="heads" has no effect: no matrix of this model is known as query, key or value'
        )


def _shared_momentum(states: ParameterSet) -> float:
    """Return the momentum of the hidden matrices, which one launch updates together."""
    momenta = {float(state.group["momentum"]) for state in states}
    if len(momenta) > 1:
        values = ", ".join(f"{value:g}" for value in sorted(momenta))
        raise ValueError(
            f"the parameter groups of hidden matrices have different momentum ({values}): set the "
            "same in all of them"
        )
    return momenta.pop()
