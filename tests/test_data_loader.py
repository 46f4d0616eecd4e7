import itertools
import json
import threading

import numpy as np
import pytest
import torch

from learnable_multipliers.pretrain.data import (
    BatchLoader,
    PrepareConfig,
    TokenDataset,
    evaluation_batches,
    prepare,
    sample_order,
)

LENGTH = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    text = bytes(np.random.default_rng(0).integers(97, 123, 5000).tolist()).decode()
    source = folder / "a.jsonl"
    source.write_text(json.dumps({"text": text}) + "\n")
    config = PrepareConfig(
        sources=(str(source),),
        out=folder / "out",
        vocab_size=257,
        valid_fraction=0,
        shard_tokens=333,
    )
    prepare(config)
    return TokenDataset.open(folder / "out")


def test_batch_holds_the_samples_of_the_order(dataset):
    loader = BatchLoader(dataset, LENGTH, seed=5)
    tokens = dataset.tokens(0, len(dataset)).astype(np.int64)
    assert loader.num_samples == 5000 // LENGTH
    batch = loader.batch(300, 40)
    assert (batch.shape, batch.dtype) == ((40, LENGTH + 1), torch.int64)
    for row, sample in zip(
        batch, sample_order(range(300, 340), loader.num_samples, 5), strict=True
    ):
        assert row.tolist() == tokens[sample * LENGTH : sample * LENGTH + LENGTH + 1].tolist()


def test_batches_depend_on_the_index_and_not_on_the_batch_size(dataset):
    loader = BatchLoader(dataset, LENGTH, seed=1)
    whole = loader.batch(17, 840)
    for size in (1, 7, 120):
        parts = [BatchLoader(dataset, LENGTH, 1).batch(17 + n, size) for n in range(0, 840, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(BatchLoader(dataset, LENGTH, seed=2).batch(17, 840), whole)


def test_one_epoch_reads_every_target_once(dataset):
    loader = BatchLoader(dataset, LENGTH)
    targets = loader.batch(loader.num_samples, loader.num_samples)[:, 1:]
    stream = dataset.tokens(1, loader.num_samples * LENGTH + 1).astype(np.int64)
    assert sorted(map(tuple, targets.tolist())) == sorted(
        map(tuple, stream.reshape(-1, LENGTH).tolist())
    )


def test_prefetched_batches_are_the_batches(dataset):
    loader = BatchLoader(dataset, LENGTH)
    before = threading.active_count()
    for stride, depth in ((None, 1), (None, 3), (24, 2)):
        stream = loader.prefetch(100, 8, stride=stride, depth=depth)
        for turn, batch in enumerate(itertools.islice(stream, 60)):
            assert torch.equal(batch, loader.batch(100 + turn * (stride or 8), 8))
        stream.close()
    assert threading.active_count() == before


def test_error_of_the_reading_thread_reaches_the_trainer(dataset, monkeypatch):
    loader = BatchLoader(dataset, LENGTH)
    stream = loader.prefetch(0, 8)
    next(stream)

    def fail(*_):
        raise OSError("the disk went away")

    monkeypatch.setattr(dataset, "tokens", fail)
    with pytest.raises(OSError, match="the disk went away"):
        list(itertools.islice(stream, 5))


def test_evaluation_covers_the_split_once_with_a_smaller_last_batch(dataset):
    batches = list(evaluation_batches(dataset, LENGTH, batch_size=50))
    assert [len(batch) for batch in batches] == [50] * 6 + [12]
    stream = torch.cat([batch[:, 1:].flatten() for batch in batches])
    expected = dataset.tokens(1, 312 * LENGTH + 1).astype(np.int64)
    assert torch.equal(stream, torch.from_numpy(expected))
    inputs = torch.cat([batch[:, :-1].flatten() for batch in batches])
    assert torch.equal(inputs[1:], stream[:-1])


def test_evaluation_stops_at_max_tokens(dataset):
    for most, rows in ((LENGTH, 1), (LENGTH * 3 - 1, 2), (10**9, 312)):
        found = list(evaluation_batches(dataset, LENGTH, batch_size=100, max_tokens=most))
        assert sum(map(len, found)) == rows
    with pytest.raises(ValueError, match="max_tokens is 15, less than one sequence of 16"):
        evaluation_batches(dataset, LENGTH, batch_size=1, max_tokens=15)
    with pytest.raises(ValueError, match="batch_size is 0"):
        evaluation_batches(dataset, LENGTH, batch_size=0)


def test_sequence_longer_than_the_data_is_an_error(dataset):
    assert BatchLoader(dataset, 5000).batch(3, 1).shape == (1, 5001)
    for make in (
        lambda: BatchLoader(dataset, 5001),
        lambda: evaluation_batches(dataset, 5001, batch_size=1),
    ):
        with pytest.raises(ValueError, match=r"sequence of 5001 tokens .* longer than the data"):
            make()
