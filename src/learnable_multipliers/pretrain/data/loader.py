"""Batches: a pure function of the dataset, the seed and the global sample index.

The index of the next sample is the whole state of a run's data: the trainer keeps it, and a run
resumed with it sees exactly the batches it would have seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from learnable_multipliers.pretrain.data.order import num_samples, sample_order
from learnable_multipliers.pretrain.data.shards import TokenDataset


class BatchLoader:
    """Reads batches of a split in the order of a seed."""

    def __init__(self, dataset: TokenDataset, sequence_length: int, seed: int = 0) -> None:
        self.dataset = dataset
        self.sequence_length = sequence_length
        self.seed = seed
        self.num_samples = num_samples(len(dataset), sequence_length)
        """Samples in one epoch."""

    def batch(self, start_index: int, size: int) -> Tensor:
        """Return the samples at global indices start_index .. start_index + size - 1.

        Inputs are `[:, :-1]`, targets `[:, 1:]`.
        """
        indices = np.arange(start_index, start_index + size)
        samples = sample_order(indices, self.num_samples, self.seed)
        return _gather(self.dataset, samples, self.sequence_length)

    def prefetch(
        self, start_index: int, size: int, *, stride: int | None = None, depth: int = 2
    ) -> Iterator[Tensor]:
        """Yield batch(start), batch(start + stride), ... without end, read ahead by a thread.

        `stride` is the global batch where several ranks share it, `size` where it is not given.
        With CUDA the batches lie in pinned memory.
        """
        step = size if stride is None else stride
        pin = torch.cuda.is_available()

        def read(index: int) -> Tensor:
            batch = self.batch(index, size)
            return batch.pin_memory() if pin else batch

        ahead: deque[Future[Tensor]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            try:
                while True:
                    while len(ahead) < max(depth, 1):
                        ahead.append(thread.submit(read, start_index))
                        start_index += step
                    yield ahead.popleft().result()
            finally:
                thread.shutdown(cancel_futures=True)


def evaluation_batches(
    dataset: TokenDataset, sequence_length: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[Tensor]:
    """Yield the samples of a split from its start, each target once; the last batch may be smaller.

    `max_tokens` bounds the number of targets. What is left behind the last whole sample (fewer
    than `sequence_length` tokens) is not read: every row has the same length.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    count = num_samples(len(dataset), sequence_length)
    if max_tokens is not None:
        if max_tokens < sequence_length:
            raise ValueError(
                f"max_tokens is {max_tokens}, less than one sequence of {sequence_length}; raise it"
            )
        count = min(count, max_tokens // sequence_length)
    # Checked at the call, not at the first batch.
    return (
        _gather(dataset, np.arange(start, min(start + batch_size, count)), sequence_length)
        for start in range(0, count, batch_size)
    )


def _gather(dataset: TokenDataset, samples: np.ndarray, length: int) -> Tensor:
    rows = np.empty((len(samples), length + 1), dtype=np.int64)
    for row, sample in zip(rows, samples.tolist(), strict=True):
        row[:] = dataset.tokens(sample * length, sample * length + length + 1)
    return torch.from_numpy(rows)
