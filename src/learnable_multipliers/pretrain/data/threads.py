"""Threads that read and work ahead, and return the results in order.

Decompression, hashing and tokenization release Python's lock, so threads use all cores. Processes
would each import torch first, and text and tokens would be copied from one to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Condition, Thread
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from learnable_multipliers.pretrain.cores import num_cores

# Text per batch.
_BATCH_BYTES = 1 << 19
# Text that a reader buffers, and the number of concurrent readers.
_AHEAD_BYTES = 1 << 26
_READERS = 4


class Sized(Protocol):
    """An item of work."""

    @property
    def num_bytes(self) -> int:
        """Bytes of text."""
        ...


Item = TypeVar("Item", bound=Sized)
Result = TypeVar("Result")


class Batch(NamedTuple, Generic[Item]):
    """Consecutive items, and the error that followed them."""

    items: list[Item]
    num_bytes: int
    error: Exception | None = None


class Threads:
    """`count` worker threads (None: one per core) and some readers; they end with the context.

    Errors are raised in order: results of earlier items come first.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count or num_cores()
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="lrm-work")
        self._readers: set[_Reader] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.close()
        self._pool.shutdown(cancel_futures=True)

    def map(
        self, function: Callable[[list[Item]], Iterable[Result]], batches: Iterable[Batch[Item]]
    ) -> Iterator[Result]:
        """Yield the results of each batch, in order; each batch is one task."""

        def work(batch: Batch[Item]) -> tuple[list[Result], Exception | None]:
            results: list[Result] = []
            try:
                for one in function(batch.items):
                    results.append(one)
            except Exception as error:
                return results, error
            return results, batch.error

        waiting: deque[Future[tuple[list[Result], Exception | None]]] = deque()
        try:
            for batch in batches:
                waiting.append(self._pool.submit(work, batch))
                # Bounded: a corpus larger than memory is read only as fast as it is encoded.
                if len(waiting) > 2 * self._count:
                    yield from _results(waiting.popleft())
            while waiting:
                yield from _results(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    def read(self, sources: Iterable[Iterator[Item]]) -> Iterator[Batch[Item]]:
        """Yield the batches of the sources in order; later sources are read ahead."""
        to_come = iter(sources)
        readers: deque[_Reader[Item]] = deque()
        try:
            while True:
                for source in islice(to_come, _READERS - len(readers)):
                    readers.append(_Reader(source))
                    self._readers.add(readers[-1])
                if not readers:
                    return
                yield from readers[0]
                self._close(readers.popleft())
        finally:
            for reader in readers:
                self._close(reader)

    def _close(self, reader: _Reader) -> None:
        reader.close()
        self._readers.discard(reader)


class _Reader(Generic[Item]):
    """A thread that reads one source ahead, up to a number of bytes."""

    def __init__(self, source: Iterator[Item]) -> None:
        self._batches = batches_of(source)
        self._ready: deque[Batch[Item]] = deque()
        self._num_bytes = 0
        self._is_closed = self._is_done = False
        self._changed = Condition()
        self._thread = Thread(target=self._read, name="lrm-read", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch[Item]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._is_done)
                if not self._ready:
                    return
                batch = self._ready.popleft()
                self._num_bytes -= batch.num_bytes
                self._changed.notify()
            yield batch

    def close(self) -> None:
        """End the thread after its current batch."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _read(self) -> None:
        for batch in self._batches:
            with self._changed:
                self._ready.append(batch)
                self._num_bytes += batch.num_bytes
                self._changed.notify()
                self._changed.wait_for(lambda: self._is_closed or self._num_bytes < _AHEAD_BYTES)
                if self._is_closed:
                    break
        # Close the file now, not at garbage collection.
        self._batches.close()
        with self._changed:
            self._is_done = True
            self._changed.notify()


def batches_of(items: Iterable[Item]) -> Generator[Batch[Item], None, None]:
    """Group items up to some size."""
    batch: list[Item] = []
    num_bytes = 0
    try:
        for item in items:
            batch.append(item)
            num_bytes += item.num_bytes
            if num_bytes >= _BATCH_BYTES:
                yield Batch(batch, num_bytes)
                batch, num_bytes = [], 0
    except Exception as error:
        yield Batch(batch, num_bytes, error)
    else:
        yield Batch(batch, num_bytes)


def _results(future: Future[tuple[list[Result], Exception | None]]) -> Iterator[Result]:
    results, error = future.result()
    yield from results
    if error is not None:
        raise error
