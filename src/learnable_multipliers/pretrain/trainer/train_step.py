"""Forward and backward passes of a batch, micro-batch by micro-batch.

On a GPU a pass is hundreds of short kernels, and Python cannot launch them as fast as they run.
So the pass is recorded as a CUDA graph, after a few passes the usual way, and then replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from learnable_multipliers.optim._sharding import local
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.parallelize import ParallelModel
from learnable_multipliers.pretrain.trainer.device import Device

_FIRST_PASSES = 3
"""Passes before recording: compilation and libraries' own choices must be over by then."""


@dataclass(frozen=True)
class _Key:
    """What a recorded pass is good for."""

    shape: tuple[int, ...]
    sequences: int
    """In the whole batch: the loss of a micro-batch counts for its share."""


class Passes:
    """Leaves the gradient of a batch in the parameters."""

    def __init__(
        self, model: HybridLM, device: Device, z_loss: float, parallel: ParallelModel | None = None
    ):
        self._parallel = parallel or ParallelModel(model.loss)
        self._device, self._z_loss = device, z_loss
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._smallest = min(self._trained, key=Tensor.numel)
        self._key: _Key | None = None
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = self._loss = torch.empty(0)
        self._adds_up = False

    def gradients(self, batches: Iterable[Tensor], sequences: int) -> Tensor:
        """Leave the gradient of a batch of `sequences`; return its cross-entropy per token.

        Given a part of the batch it returns what that adds to the cross-entropy of the whole; the
        gradient is that of the whole, once ranks have exchanged theirs.
        """
        total = torch.zeros((), device=self._device.device)
        for tokens, is_last in _marked(batches):
            share = len(tokens) / sequences
            with nullcontext() if is_last else self._parallel.no_sync():
                total += share * self._one(tokens, _Key(tuple(tokens.shape), sequences))
        return total

    def clear(self) -> None:
        """Make ready for the next batch, once the optimizer has taken the gradients."""
        if self._graph is None:
            for parameter in self._trained:
                parameter.grad = None
        elif self._adds_up:
            for parameter in self._trained:
                assert parameter.grad is not None
                parameter.grad.zero_()

    def spoil(self, loss: Tensor) -> None:
        """Let no step be taken on a loss that is not finite, whatever its gradients look like.

        The optimizer judges gradients: one that is not finite is enough, and nobody has to wait.
        Gradients have been exchanged by now, so the loss is that of the whole batch on every rank.
        """
        assert self._smallest.grad is not None
        local(self._smallest.grad).masked_fill_(~loss.isfinite(), torch.nan)

    def _one(self, tokens: Tensor, key: _Key) -> Tensor:
        if not self._device.recorded:
            return self._compute(tokens, key)
        if key.sequences % len(tokens):
            # A last micro-batch of another size would have to be recorded anew in every step.
            self._forget()
            return self._compute(tokens, key)
        if key != self._key:
            self._forget()
            self._key, self._seen = key, 0
        if self._graph is None:
            self._seen += 1
            # A batch is one thing: it is not recorded halfway through.
            at_start = all(p.grad is None for p in self._trained)
            if self._seen <= _FIRST_PASSES or not at_start:
                return self._compute(tokens, key)
            self._record(tokens, key)
        self._tokens.copy_(tokens, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()

    def _compute(self, tokens: Tensor, key: _Key) -> Tensor:
        with self._device.autocast():
            losses = self._parallel.loss(tokens, self._z_loss)
        # Ranks' gradients are averaged, and each has its part of the sum.
        share = len(tokens) * self._parallel.dp_degree / key.sequences
        (losses.total * share).backward()
        return losses.cross_entropy

    def _record(self, tokens: Tensor, key: _Key) -> None:
        # One pass a batch writes gradients; several add to gradients that start at zero.
        self._adds_up = len(tokens) < key.sequences
        self._tokens = tokens.clone()
        if self._adds_up:
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._compute(self._tokens, key)

    def _forget(self) -> None:
        """Let go of a recorded pass and of the memory it holds; between batches only."""
        if self._graph is not None:
            self._graph, self._key = None, None
            self._loss = torch.empty(0)
            for parameter in self._trained:
                parameter.grad = None


def _marked(batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Yield each batch with whether it is the last."""
    waiting: Tensor | None = None
    for tokens in batches:
        if waiting is not None:
            yield waiting, False
        waiting = tokens
    if waiting is not None:
        yield waiting, True
