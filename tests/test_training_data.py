"""What a run reads: held-out text, its bytes, and a default corpus that is made once."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from learnable_multipliers.pretrain.config import DataConfig, RuntimeConfig
from learnable_multipliers.pretrain.data import training_data
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.evaluation import evaluate
from runs import LLAMA

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
        assert len(text) < 0.5 * len(read) * data.bytes_per_token


def test_the_whole_split_has_the_bytes_its_manifest_tells(folder):
    data = TrainingData(folder, LENGTH, seed=0)
    total = data.manifest.num_tokens("valid")
    first = data.decode([int(data.tokens("valid")[0])])
    assert data.held_out_bytes(total - 1) + len(first) == data.manifest.num_bytes("valid")


def test_a_uniform_model_takes_the_bits_of_its_vocabulary_for_each_token(folder):
    config = DataConfig(sequence_length=LENGTH, batch_sequences=4)
    data = TrainingData(folder, LENGTH, seed=0)
    model = build(replace(LLAMA, vocab_size=512)).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    device = choose_device(RuntimeConfig(device="cpu"))
    found = evaluate(model, data, config, device, max_tokens=64)
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
    assert data.held_out_bytes(32) == pytest.approx(32 * data.bytes_per_token)


def test_a_default_corpus_that_another_process_made_meanwhile_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))

    def slower(config):
        config.out.mkdir()
        raise FileExistsError(f"{config.out} exists")

    monkeypatch.setattr(training_data, "prepare", slower)
    assert training_data.default_corpus(300).is_dir()

    def failing(config):
        raise FileExistsError("something else exists")

    monkeypatch.setattr(training_data, "prepare", failing)
    with pytest.raises(FileExistsError, match="something else"):
        training_data.default_corpus(301)
