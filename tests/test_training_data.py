"""What a run reads: batches, held-out text, its bytes, and a default corpus that is made once."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from learnable_multipliers.pretrain.config import DataConfig, LogConfig, RuntimeConfig, TrainConfig
from learnable_multipliers.pretrain.data import training_data
from learnable_multipliers.pretrain.data.order import sample_order
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.evaluation import evaluate
from runs import LLAMA, bytes_per_token

LENGTH = 16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Held out: one document of short tokens, then one of a long word again and again."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "train.txt").write_text("incomprehensibilities " * 400 + "0123456789 " * 50)
    (root / "valid").mkdir()
    (root / "valid" / "a.txt").write_text("".join(f"{n} " for n in range(90)))
    (root / "valid" / "b.txt").write_text("incomprehensibilities " * 300)
    prepare(
        PrepareConfig(
            sources=(str(root / "train.txt"),),
            valid_sources=(str(root / "valid"),),
            out=root / "data",
            vocab_size=300,
        )
    )
    return root / "data"


def targets(data, max_tokens):
    return torch.cat([batch[:, 1:] for batch in data.held_out(3, max_tokens, CPU)]).flatten()


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """Token shards of 333 bytes from 5000 random letters, and 5000 more held out."""
    root = tmp_path_factory.mktemp("letters")
    for seed, name in enumerate(("train", "valid")):
        text = np.random.default_rng(seed).integers(97, 123, 5000).astype(np.uint8).tobytes()
        (root / f"{name}.txt").write_bytes(text)
    prepare(
        PrepareConfig(
            sources=(str(root / "train.txt"),),
            valid_sources=(str(root / "valid.txt"),),
            out=root / "data",
            vocab_size=257,
            shard_tokens=333,
        )
    )
    return root / "data"


def test_batch_has_the_samples_of_the_order(letters):
    data = TrainingData(letters, LENGTH, seed=5)
    tokens = data.tokens("train").astype(np.int64)
    batch = data.batch(300, 40, CPU)
    assert (batch.shape, batch.dtype) == ((40, LENGTH + 1), torch.int64)
    order = sample_order(range(300, 340), 5000 // LENGTH, 5)
    for row, sample in zip(batch, order, strict=True):
        assert row.tolist() == tokens[sample * LENGTH : sample * LENGTH + LENGTH + 1].tolist()


def test_batches_depend_on_the_index_and_not_on_the_batch_size(letters):
    whole = TrainingData(letters, LENGTH, seed=1).batch(17, 840, CPU)
    for size in (1, 7, 120):
        data = TrainingData(letters, LENGTH, seed=1)
        parts = [data.batch(17 + n, size, CPU) for n in range(0, 840, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(TrainingData(letters, LENGTH, seed=2).batch(17, 840, CPU), whole)


def test_one_epoch_reads_every_target_once(letters):
    data = TrainingData(letters, LENGTH, seed=0)
    count = 5000 // LENGTH
    read = data.batch(count, count, CPU)[:, 1:]
    stream = data.tokens("train")[1 : count * LENGTH + 1].reshape(-1, LENGTH)
    assert sorted(map(tuple, read.tolist())) == sorted(map(tuple, stream.tolist()))


def test_held_out_covers_the_split_once_with_a_smaller_last_batch(letters):
    data = TrainingData(letters, LENGTH, seed=0)
    batches = list(data.held_out(50, 0, CPU))
    assert [len(batch) for batch in batches] == [50] * 6 + [12]
    stream = torch.cat([batch[:, 1:].flatten() for batch in batches])
    expected = data.tokens("valid")[1 : 312 * LENGTH + 1].astype(np.int64)
    assert torch.equal(stream, torch.from_numpy(expected))
    inputs = torch.cat([batch[:, :-1].flatten() for batch in batches])
    assert torch.equal(inputs[1:], stream[:-1])


def test_sequence_longer_than_the_data_is_an_error(letters):
    assert TrainingData(letters, 5000, seed=0).batch(3, 1, CPU).shape == (1, 5001)
    with pytest.raises(ValueError, match=r"sequence of 5001 tokens .* longer than the data"):
        TrainingData(letters, 5001, seed=0)


def test_damage_is_found_on_opening_or_by_verify_and_named(letters):
    TrainingData(letters, LENGTH, seed=0).verify()
    for name in ("tokenizer.json", "train-00001.bin", "valid-00002.bin", "manifest.json"):
        path = letters / name
        good = path.read_bytes()
        for bad in (good[:-3], good[:-1] + bytes([good[-1] ^ 1])):
            path.write_bytes(bad)
            # Each byte of the tokens is read by `verify` alone; their sizes are always compared.
            is_cheap = name.endswith("json") or len(bad) != len(good)
            with pytest.raises(ValueError, match=name) if is_cheap else nullcontext():
                TrainingData(letters, LENGTH, seed=0)
            with pytest.raises(ValueError, match=name):
                TrainingData(letters, LENGTH, seed=0).verify()
        path.write_bytes(good)


@pytest.mark.parametrize(("asked", "read"), [(1, 16), (16, 16), (47, 32), (64, 64)])
def test_held_out_text_is_read_in_whole_sequences(folder, asked, read):
    data = TrainingData(folder, LENGTH, seed=0)
    assert data.num_held_out(asked) == read == len(targets(data, asked))


@pytest.mark.parametrize("asked", [64, 160, 0])
def test_bytes_are_those_of_the_tokens_read(folder, asked):
    data = TrainingData(folder, LENGTH, seed=0)
    read = targets(data, asked)
    assert data.num_held_out(asked) == len(read)
    text = data.decode(read.tolist()).encode()
    assert data.held_out_bytes(len(read)) == len(text)
    # The average over the split would be far off here.
    if asked == 64:
        assert len(text) < 0.5 * len(read) * bytes_per_token(data)


def test_the_whole_split_has_the_bytes_its_manifest_names(folder):
    data = TrainingData(folder, LENGTH, seed=0)
    total = data.manifest.num_tokens("valid")
    first = data.decode([int(data.tokens("valid")[0])])
    assert data.held_out_bytes(total - 1) + len(first) == data.manifest.num_bytes("valid")


def test_a_uniform_model_takes_the_bits_of_its_vocabulary_for_each_token(folder):
    settings = DataConfig(sequence_length=LENGTH, batch_sequences=4)
    config = TrainConfig(data=settings, log=LogConfig(evaluate_tokens=64))
    data = TrainingData(folder, LENGTH, seed=0)
    model = build(replace(LLAMA, vocab_size=512)).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    device = choose_device(RuntimeConfig(device="cpu"))
    found = evaluate(model, data, config, device)
    expected = 64 * 9 / len(data.decode(targets(data, 64).tolist()))
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    # A model that was not being trained still is not.
    assert not model.training


def test_a_tokenizer_without_bytes_goes_by_the_average(tmp_path):
    words = {"<unk>": 0, "<|endoftext|>": 1} | {f"w{i}": i + 2 for i in range(10)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, count in (("train", 90), ("valid", 45)):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"w{i % 10}" for i in range(count)))
    prepare(
        PrepareConfig(
            sources=(str(tmp_path / "train.txt"),),
            valid_sources=(str(tmp_path / "valid.txt"),),
            tokenizer=tmp_path / "tokenizer.json",
            out=tmp_path / "data",
        )
    )
    data = TrainingData(tmp_path / "data", LENGTH, seed=0)
    assert data.held_out_bytes(32) == pytest.approx(32 * bytes_per_token(data))


def test_a_default_corpus_that_another_process_made_meanwhile_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))

    def slower(config):
        config.out.mkdir(parents=True)
        raise FileExistsError(f"{config.out} exists")

    monkeypatch.setattr(training_data, "prepare", slower)
    assert training_data.default_corpus(300).is_dir()

    def failing(config):
        raise FileExistsError("something else exists")

    monkeypatch.setattr(training_data, "prepare", failing)
    with pytest.raises(FileExistsError, match="something else"):
        training_data.default_corpus(301)
