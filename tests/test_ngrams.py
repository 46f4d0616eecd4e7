"""The n-gram benchmark: a distribution, the textbook's numbers, and the tokens of an evaluation."""

import sys
import sysconfig
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.training_data import TrainingData

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from ngrams import FALLBACK_DISCOUNTS, KneserNey, discounts_of, kneser_ney_loss, text_bytes

LENGTH = 16


class Textbook:
    """Interpolated modified Kneser-Ney with dictionaries, one n-gram at a time."""

    def __init__(self, ids, order, vocab_size):
        self.order, self.vocab_size = order, vocab_size
        grams = {
            n: [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)] for n in range(1, order + 1)
        }
        self.counts = {order: Counter(grams[order])}
        for n in range(1, order):
            preceding = defaultdict(set)
            for first, *rest in grams[n + 1]:
                preceding[tuple(rest)].add(first)
            self.counts[n] = Counter({gram: len(tokens) for gram, tokens in preceding.items()})
        self.discounts = {n: self._discounts(counts) for n, counts in self.counts.items()}
        self.followers = {n: defaultdict(dict) for n in self.counts}
        for n, counts in self.counts.items():
            for gram, count in counts.items():
                self.followers[n][gram[:-1]][gram[-1]] = count

    @staticmethod
    def _discounts(counts):
        n = Counter(counts.values())
        if not all(n[k] for k in (1, 2, 3, 4)):
            return FALLBACK_DISCOUNTS
        y = n[1] / (n[1] + 2 * n[2])
        found = tuple(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))
        return found if all(0 < d <= k + 1 for k, d in enumerate(found)) else FALLBACK_DISCOUNTS

    def probability(self, token, history):
        history = tuple(history)[max(0, len(history) - self.order + 1) :]
        lower = self.probability(token, history[1:]) if history else 1 / self.vocab_size
        n = len(history) + 1
        followers = self.followers[n].get(history)
        if not followers:
            return lower
        total = sum(followers.values())

        def discount(count):
            return self.discounts[n][min(count, 3) - 1] if count else 0.0

        count = followers.get(token, 0)
        left = sum(discount(c) for c in followers.values()) / total
        return (count - discount(count)) / total + left * lower


def random_text(length, vocab_size, seed=0):
    """Tokens of a skewed Markov chain, so that every order has something to learn."""
    rng = np.random.default_rng(seed)
    skew = 1 / np.arange(1, vocab_size + 1) ** 1.5
    following = [rng.permutation(skew / skew.sum()) for _ in range(vocab_size)]
    ids = [0]
    while len(ids) < length:
        ids.append(int(rng.choice(vocab_size, p=following[ids[-1]])))
    return np.array(ids)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize(("length", "vocab_size"), [(3000, 23), (400, 40), (7, 4)])
def test_equals_the_textbook(order, length, vocab_size):
    # The last tokens of the vocabulary never occur.
    train = random_text(length, vocab_size - 2)
    valid = random_text(150, vocab_size, seed=1)
    model = KneserNey.fit(train, order, vocab_size)
    slow = Textbook(train.tolist(), order, vocab_size)
    expected = [slow.probability(token, valid[:i].tolist()) for i, token in enumerate(valid)]
    np.testing.assert_allclose(model.probabilities(valid), expected, rtol=1e-9)
    assert model.loss(valid) == pytest.approx(-np.mean(np.log(expected)), rel=1e-9)
    if length == 3000:
        assert model.levels[-1].discounts == pytest.approx(slow.discounts[order], rel=1e-12)
        assert order == 1 or model.levels[-1].discounts != FALLBACK_DISCOUNTS


@pytest.mark.parametrize("vocab_size", [23, 128_000])
@pytest.mark.parametrize(
    "history", [[], [3], [22], [5, 9, 2, 3, 4], [22, 22, 22, 22], [0, 1, 22, 2, 2, 1]]
)
def test_probabilities_sum_to_one_over_the_vocabulary(vocab_size, history):
    train = random_text(3000, 20)
    model = KneserNey.fit(train, 5, vocab_size)
    # Histories of each kind: as given, seen, and the end of the stream, which nothing follows.
    for given in (history, train[100:104], train[-4:]):
        distribution = model.distribution(np.array(given, dtype=np.int64))
        assert distribution.min() > 0
        assert distribution.sum() == pytest.approx(1, abs=1e-9)


def test_stream_and_distribution_agree():
    model = KneserNey.fit(random_text(3000, 20), 4, 23)
    valid = random_text(40, 23, seed=2)
    one_by_one = [model.distribution(valid[:i])[token] for i, token in enumerate(valid)]
    np.testing.assert_allclose(model.probabilities(valid), one_by_one, rtol=1e-12)


def test_each_order_helps_on_real_text():
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "dataclasses", "inspect", "textwrap", "typing", "tarfile")
    text = b"".join((folder / f"{name}.py").read_bytes() for name in names)
    ids = np.frombuffer(text, dtype=np.uint8)
    train, valid = ids[: -len(ids) // 20], ids[-len(ids) // 20 :]
    shares = np.bincount(valid, minlength=256) / len(valid)
    entropy = -np.sum(shares[shares > 0] * np.log(shares[shares > 0]))
    losses = [KneserNey.fit(train, order, 256).loss(valid) for order in (1, 2, 3, 5)]
    # Counting bytes cannot beat the entropy of the held-out bytes; their histories do, by far.
    assert losses[0] > entropy
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * entropy


def test_discounts_by_hand():
    # n1..n4 = 4, 2, 1, 1: Y = 1/2, D = 1 - 1/2, 2 - 3/4, 3 - 2.
    assert discounts_of(np.array([1, 1, 1, 1, 2, 2, 3, 4, 9])) == (0.5, 1.25, 1.0)
    assert discounts_of(np.array([1, 1, 2, 3])) == FALLBACK_DISCOUNTS
    # n1..n4 = 4, 1, 1, 3: D3 would be below zero.
    assert discounts_of(np.array([1, 1, 1, 1, 2, 3, 4, 4, 4])) == FALLBACK_DISCOUNTS


def test_bad_input_is_refused():
    model = KneserNey.fit(np.array([0, 1, 2, 1]), 2, 4)
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        model.loss(np.array([1, 4]))
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        model.loss(np.array([-1]))
    with pytest.raises(ValueError, match="integers"):
        model.loss(np.array([0.5]))
    with pytest.raises(ValueError, match="no tokens"):
        model.loss(np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="too few"):
        KneserNey.fit(np.array([1, 2]), 3)
    with pytest.raises(ValueError, match="order"):
        KneserNey.fit(np.array([1, 2]), 0)


# -- beside a model's loss --------------------------------------------------------------------


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
    train = text_bytes(data, "train")
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
