"""Forward and backward of a batch, micro-batch by micro-batch.

On a GPU a micro-batch is hundreds of short kernels, and Python cannot launch them as fast as they
run. So forward and backward are captured as a CUDA graph after a few eager runs, and then replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.parallelize import ParallelModel
from learnable_multipliers.pretrain.trainer.device import Device

_EAGER_RUNS = 3
"""Micro-batches before capture, so compilation and autotuning are done."""


class TrainStep:
    """Computes the gradients of a batch, left in `grad` of the parameters."""

    def __init__(
        self, model: HybridLM, device: Device, z_loss: float, parallel: ParallelModel | None = None
    ):
        self._parallel = parallel or ParallelModel(model.loss)
        self._device, self._z_loss = device, z_loss
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # Key of the captured graph: shape of a micro-batch, and sequences in the batch.
        self._key: tuple[torch.Size, int] | None = None
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = self._loss = torch.empty(0)
        self._accumulates = False

    def gradients(self, batches: Iterable[Tensor], sequences: int) -> Tensor:
        """Compute the gradients of a batch of `sequences`; return its cross-entropy per token.

        Given this rank's part of a batch it returns that part's contribution; gradients are those
        of the whole batch once ranks have reduced theirs.
        """
        total = torch.zeros((), device=self._device.device)
        num_left = sequences // self._parallel.dp_degree
        for tokens in batches:
            num_left -= len(tokens)
            # Gradients are reduced over ranks in the last micro-batch.
            with self._parallel.no_sync() if num_left else nullcontext():
                total += len(tokens) / sequences * self._micro_batch(tokens, sequences)
        return total

    def clear(self) -> None:
        """Clear the gradients, after the optimizer step."""
        if self._graph is None:
            for parameter in self._trained:
                parameter.grad = None
        elif self._accumulates:
            for parameter in self._trained:
                assert parameter.grad is not None
                parameter.grad.zero_()

    def _micro_batch(self, tokens: Tensor, sequences: int) -> Tensor:
        if not self._device.captured:
            return self._compute(tokens, sequences)
        if sequences % len(tokens):
            # A last micro-batch of another size would need a new capture in every step.
            self._release()
            return self._compute(tokens, sequences)
        key = (tokens.shape, sequences)
        if key != self._key:
            self._release()
            self._key, self._seen = key, 0
        if self._graph is None:
            self._seen += 1
            # Not in the middle of a batch.
            at_start = all(p.grad is None for p in self._trained)
            if self._seen <= _EAGER_RUNS or not at_start:
                return self._compute(tokens, sequences)
            self._capture(tokens, sequences)
        self._tokens.copy_(tokens, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()

    def _compute(self, tokens: Tensor, sequences: int) -> Tensor:
        with self._device.autocast():
            losses = self._parallel.loss(tokens, self._z_loss)
        # Gradients are averaged over ranks, and each rank has a part of the sum.
        share = len(tokens) * self._parallel.dp_degree / sequences
        (losses.total * share).backward()
        return losses.cross_entropy

    def _capture(self, tokens: Tensor, sequences: int) -> None:
        # A single micro-batch writes gradients; several accumulate into gradients that start at 0.
        self._accumulates = len(tokens) < sequences
        self._tokens = tokens.clone()
        if self._accumulates:
            for parameter in self._trained:
                # In the dtype of the gradients, which may be wider than the weight.
                dtype = getattr(parameter, "grad_dtype", None)
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._compute(self._tokens, sequences)

    def _release(self) -> None:
        """Release the captured graph and its memory; between batches only."""
        if self._graph is not None:
            self._graph, self._key = None, None
            self._loss = torch.empty(0)
            for parameter in self._trained:
                parameter.grad = None
