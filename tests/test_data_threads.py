"""Threads that work ahead give what one after the other gives, in order, and all end."""

import threading
import time
from typing import NamedTuple

import pytest

from learnable_multipliers.pretrain.data import threads as threads_module
from learnable_multipliers.pretrain.data.threads import Threads, batches_of


class Item(NamedTuple):
    number: int
    num_bytes: int


def items(count):
    return [Item(n, [1000, 0, 1, 50, 99, 100][n % 6]) for n in range(count)]


def two_of(batch):
    """Yield two results an item; some take longer than others."""
    for item in batch:
        yield item.number
        time.sleep(0.002 if item.number % 7 == 0 else 0)
        yield -item.number


EXPECTED = [sign * n for n in range(200) for sign in (1, -1)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Cut everything small, and see that no thread is left."""
    monkeypatch.setattr(threads_module, "_BATCH_BYTES", 100)
    monkeypatch.setattr(threads_module, "_AHEAD_BYTES", 1000)
    yield
    assert not [one for one in threading.enumerate() if one.name.startswith("lrm-")]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_order(count):
    with Threads(count) as threads:
        assert list(threads.map(two_of, batches_of(items(200)))) == EXPECTED
        sources = (iter(items(200)[n : n + 30]) for n in range(0, 200, 30))
        assert list(threads.map(two_of, threads.read(sources))) == EXPECTED


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("source", ["in line", "read ahead"])
@pytest.mark.parametrize("fails", ["item", "function", "both"])
def test_an_error_comes_where_its_item_would(count, source, fails):
    def reading():
        yield from items(200)[: 100 if fails == "item" else 101]
        if fails != "function":
            raise LookupError("reading item 100" if fails == "item" else "reading item 101")

    def failing(batch):
        for item in batch:
            yield from two_of([item]) if item.number < 100 else (100,)
            if item.number == 100:
                raise LookupError("working on item 100")

    found, caught = [], None
    with Threads(count) as threads:
        batches = threads.read([reading()]) if source == "read ahead" else batches_of(reading())
        try:
            for one in threads.map(failing, batches):
                found.append(one)
        except LookupError as error:
            caught = str(error)
    if fails == "item":
        assert (caught, found) == ("reading item 100", EXPECTED[:200])
    else:
        assert (caught, found) == ("working on item 100", EXPECTED[:201])


def test_no_more_is_taken_than_some_batches_ahead():
    taken = []

    def many():
        for number in range(10_000):
            taken.append(number)
            yield Item(number, 50)

    with Threads(2) as threads:
        found = threads.map(two_of, batches_of(many()))
        assert next(found) == 0
        # Two items make a batch; two batches a thread wait, and one more is begun.
        assert len(taken) <= 2 * (2 * 2 + 1)
        del taken[:]
        found = threads.map(two_of, threads.read([many(), many()]))
        assert next(found) == 0
        time.sleep(0.1)
        # Both readers are full, and the batches of above are with the threads.
        assert 2 * 20 <= len(taken) <= 2 * 20 + 2 * (2 * 2 + 1)


def test_some_sources_are_read_at_the_same_time():
    met = threading.Barrier(3, timeout=20)

    def source(number):
        met.wait()
        yield Item(number, 1)

    with Threads(1) as threads:
        batches = list(threads.read(source(n) for n in range(3)))
    assert [item.number for batch in batches for item in batch.items] == [0, 1, 2]


def many(closed):
    """Yield many items, and note where that ends."""
    try:
        for number in range(10_000):
            yield Item(number, 50)
    finally:
        closed.append(True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_all_threads_end_with_the_context(error):
    closed = []

    def interrupted():
        with Threads(3) as threads:
            for number in threads.map(two_of, threads.read([many(closed), many(closed)])):
                if number == 20:
                    raise error

    with pytest.raises(error):
        interrupted()
    assert closed == [True, True]


def test_what_is_no_longer_asked_for_is_not_read():
    closed = []
    with Threads(3) as threads:
        for number in threads.map(two_of, threads.read([many(closed), many(closed)])):
            if number == 20:
                break
        assert closed == [True, True]
        assert list(threads.map(two_of, threads.read([iter(items(200))]))) == EXPECTED
