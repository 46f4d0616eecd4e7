"""The yardstick stands beside a model's loss: the same tokens, the same unit."""

import numpy as np
import pytest

from learnable_multipliers.pretrain.baseline import kneser_ney_loss
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.ngram import KneserNey

LENGTH = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    (root / "train.txt").write_text("".join(f"{n} and {n * n}. " for n in range(300)))
    (root / "valid").mkdir()
    # The second document is far harder, and longer.
    (root / "valid" / "a.txt").write_text("".join(f"{n} and {n * n}. " for n in range(40)))
    (root / "valid" / "b.txt").write_text("\u00e4\u00f6\u00fc?! " * 200)
    prepare(
        PrepareConfig(
            sources=(str(root / "train.txt"),),
            valid_sources=(str(root / "valid"),),
            out=root / "data",
            vocab_size=280,
        )
    )
    return TrainingData(root / "data", LENGTH, seed=0)


@pytest.mark.parametrize("max_tokens", [64, 0])
def test_bytes_are_those_of_the_tokens_an_evaluation_reads(data, max_tokens):
    num_tokens = data.num_held_out(max_tokens)
    valid = data.tokens("valid")
    first, rest = (
        data.decode(part.tolist()).encode() for part in (valid[:1], valid[: num_tokens + 1])
    )
    train = np.frombuffer(data.text("train"), np.uint8)
    each = KneserNey.fit(train, 3, 256).probabilities(np.frombuffer(rest, np.uint8))
    expected = -np.log(each[len(first) :]).sum() / num_tokens
    assert kneser_ney_loss(data, 3, max_tokens=max_tokens) == pytest.approx(expected, rel=1e-12)


def test_tokens_are_those_an_evaluation_reads(data):
    model = KneserNey.fit(data.tokens("train"), 3, data.manifest.vocab_size)
    each = model.probabilities(data.tokens("valid")[:65])
    expected = -np.log(each[1:]).mean()
    found = kneser_ney_loss(data, 3, "tokens", max_tokens=64)
    assert found == pytest.approx(expected, rel=1e-12)


def test_easy_text_is_not_judged_by_hard_text(data):
    easy, all_of_it = (kneser_ney_loss(data, 3, max_tokens=n) for n in (64, 0))
    assert easy < all_of_it / 2
