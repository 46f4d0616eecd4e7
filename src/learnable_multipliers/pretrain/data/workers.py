"""Encoding in parallel: worker processes that share the batches, and results in their order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from learnable_multipliers.pretrain.data import encoding
from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer

Note = TypeVar("Note")


def encode_batches(
    tokenizer: TextTokenizer,
    dtype: np.dtype,
    batches: Iterable[tuple[list[str], Note]],
    num_workers: int,
) -> Iterator[tuple[list[bytes], Note]]:
    """Encode batches in their order, here (one worker) or in worker processes.

    A note that comes with a batch is handed back with its result.
    """
    settings = (tokenizer.tokenizer.to_str(), tokenizer.eos_id, dtype.str)
    if num_workers == 1:
        encode = encoding.DocumentEncoder(*settings)
        for batch, note in batches:
            yield encode(batch), note
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()
    workers: list[_Worker] = []

    def encode_in_worker(batch: list[str]) -> list[bytes]:
        worker = idle.get()
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    waiting: deque[tuple[Future[list[bytes]], Note]] = deque()
    # A thread for each process: it waits on the pipes.
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenize")
    try:
        for _ in range(num_workers):
            workers.append(_Worker(settings))
            idle.put(workers[-1])
        for batch, note in batches:
            waiting.append((threads.submit(encode_in_worker, batch), note))
            # Bounded: a corpus larger than memory is read only as fast as it is encoded.
            if len(waiting) > 2 * num_workers:
                future, note = waiting.popleft()
                yield future.result(), note
        for future, note in waiting:
            yield future.result(), note
    finally:
        # Killed first: a thread may be waiting for an answer nobody needs any more.
        for worker in workers:
            worker.kill()
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


class _Worker:
    """A process that runs the program of `encoding`."""

    def __init__(self, settings: tuple[str, int, str]) -> None:
        self._process = subprocess.Popen(
            # -P: the folder of this package is no place to import from.
            [sys.executable, "-P", encoding.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One process is one core.
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._settings = settings
        self._is_ready = False

    def encode(self, batch: list[str]) -> list[bytes]:
        """Send a batch and wait for its tokens."""
        try:
            if not self._is_ready:
                pickle.dump(self._settings, self._to)
                self._is_ready = True
            pickle.dump(batch, self._to)
            self._to.flush()
            return pickle.load(self._from)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise RuntimeError(
                f"a tokenization process died (exit status {self._process.wait()}), perhaps for "
                "want of memory; use fewer num_workers or cut the largest documents"
            ) from error

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes."""
        # What is still buffered has no reader any more.
        with suppress(BrokenPipeError):
            self._to.close()
        self._from.close()
