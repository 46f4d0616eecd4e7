"""The loss of an n-gram model on the demo's held-out text: 5-grams of bytes and of tokens.

    python benchmarks/ngrams.py                  # the data of `lrm demo`
    python benchmarks/ngrams.py --data DATA --max-tokens 0

Interpolated modified Kneser-Ney (Chen and Goodman 1998) over token ids, in sorted arrays. An n-gram
is identified by the rank of its first n-1 tokens among all (n-1)-grams and its last token, so that
any vocabulary fits into 64-bit keys.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from learnable_multipliers.pretrain.data.shards import TRAIN, VALID
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.recipes import RECIPES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Discounts = tuple[float, float, float]
Unit = Literal["bytes", "tokens"]

# What an order is discounted by where its counts of counts say nothing (few or very many tokens
# of each kind): half of what there is to take from a count of 1, 2, and 3 or more.
FALLBACK_DISCOUNTS: Discounts = (0.5, 1.0, 1.5)

_UNKNOWN = -1


def main() -> None:
    """Print the loss of both models, in nats per token and bits per byte."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="default: the Python standard library")
    parser.add_argument("--order", type=int, default=5)
    tiny = RECIPES["tiny"][1]
    parser.add_argument("--max-tokens", type=int, default=tiny.log.evaluate_tokens)
    options = parser.parse_args()
    vocab_size = 0 if options.data else tiny.model.vocab_size
    data = TrainingData.open(replace(tiny.data, path=options.data), vocab_size, tiny.seed)
    num_tokens = data.num_held_out(options.max_tokens)
    bits = num_tokens / data.held_out_bytes(num_tokens) / math.log(2)
    for unit in ("bytes", "tokens"):
        loss = kneser_ney_loss(data, options.order, unit, max_tokens=options.max_tokens)
        print(f"{options.order}-gram of {unit}: {loss:.4f} nats per token, {loss * bits:.4f} bpb")


def kneser_ney_loss(
    data: TrainingData, order: int, unit: Unit = "bytes", *, max_tokens: int = 0
) -> float:
    """Return the held-out loss of a Kneser-Ney model of bytes or of tokens, in nats per token.

    Fitted to all training text, however little of it a run reads, and tried on the tokens that an
    evaluation with the same `max_tokens` reads. Over bytes it is the loss of their bytes, so that
    it stands beside a model's loss; the ends of documents, which have none, cost it nothing.
    """
    num_tokens = data.num_held_out(max_tokens)
    if unit == "tokens":
        model = KneserNey.fit(data.tokens(TRAIN), order, data.manifest.vocab_size)
        first, stream = 1, data.tokens(VALID)[: num_tokens + 1]
    else:
        model = KneserNey.fit(text_bytes(data, TRAIN), order, 256)
        valid = text_bytes(data, VALID)
        # The first token of all is read, never asked for, and so are its bytes.
        first = len(valid) - round(data.held_out_bytes(len(data.tokens(VALID)) - 1))
        stream = valid[: first + round(data.held_out_bytes(num_tokens))]
    return -float(np.log(model.probabilities(stream)[first:]).sum()) / num_tokens


def text_bytes(data: TrainingData, split: str) -> NDArray[np.uint8]:
    """Return the text of a split as UTF-8, its documents one after another."""
    tokens = data.tokens(split)
    documents = np.split(tokens, np.flatnonzero(tokens == data.eos))
    text = "".join(data.decode(part.tolist()) for part in documents)
    return np.frombuffer(text.encode(), np.uint8)


@dataclass(frozen=True, kw_only=True)
class _Level:
    """The n-grams of one order: P(w | h) = alpha(h w) + gamma(h) P(w | h without its first)."""

    keys: Ints
    """rank(h) * vocab_size + w, sorted; the place of an n-gram here is its rank."""
    alpha: Floats
    """Discounted share of each n-gram among those with its history."""
    gamma: Floats
    """What is left to the order below, by the rank of the history; 1 for one never continued."""
    discounts: Discounts


@dataclass(frozen=True, kw_only=True)
class KneserNey:
    """A fitted model; make one with `KneserNey.fit`."""

    order: int
    vocab_size: int
    levels: tuple[_Level, ...]
    """Orders 1, 2, ..., `order`."""

    @classmethod
    def fit(cls, train_ids: np.ndarray, order: int = 5, vocab_size: int | None = None) -> KneserNey:
        """Count a stream of token ids; the vocabulary is up to the largest id unless given.

        The highest order goes by how often an n-gram occurs, those below by how many different
        tokens precede it (continuation counts).
        """
        if order < 1:
            raise ValueError(f"the order of an n-gram model is at least 1, got {order}")
        if vocab_size is None:
            vocab_size = int(np.max(train_ids, initial=0)) + 1
        ids = _checked(train_ids, vocab_size)
        if len(ids) < order:
            raise ValueError(f"{len(ids)} training tokens are too few for {order}-grams")
        keys = np.arange(vocab_size, dtype=np.int64)
        counts = np.bincount(ids, minlength=vocab_size)
        # The rank of the n-gram that starts at each position.
        grams = ids
        levels: list[_Level] = []
        for n in range(2, order + 1):
            longer, first, longer_grams, longer_counts = np.unique(
                grams[:-1] * vocab_size + ids[n - 1 :],
                return_index=True,
                return_inverse=True,
                return_counts=True,
            )
            continuations = np.bincount(grams[first + 1], minlength=len(keys))
            levels.append(_level(keys, continuations, levels, vocab_size))
            keys, grams, counts = longer, longer_grams, longer_counts
        levels.append(_level(keys, counts, levels, vocab_size))
        return cls(order=order, vocab_size=vocab_size, levels=tuple(levels))

    def loss(self, valid_ids: np.ndarray) -> float:
        """Return the mean loss over a stream, in nats per token."""
        if len(valid_ids) == 0:
            raise ValueError("there is no loss over no tokens")
        return -float(np.log(self.probabilities(valid_ids)).mean())

    def probabilities(self, ids: np.ndarray) -> Floats:
        """Return the probability of each token of a stream after those before it.

        The first tokens have short histories; documents are not kept apart.
        """
        stream = _checked(ids, self.vocab_size)
        probability = np.full(len(stream), 1 / self.vocab_size)
        histories = np.zeros_like(stream)
        for level in self.levels:
            grams = self._find(level, histories, stream)
            probability = _mix(level, histories, grams, probability)
            # The n-gram that ends before a token is its history at the next order.
            histories = np.concatenate([[_UNKNOWN], grams[:-1]])
        return probability

    def distribution(self, history: np.ndarray) -> Floats:
        """Return the probability of every token of the vocabulary after a history."""
        recent = _checked(history, self.vocab_size)
        tokens = np.arange(self.vocab_size)
        probability = np.full(self.vocab_size, 1 / self.vocab_size)
        for n, level in enumerate(self.levels):
            if n > len(recent):
                break
            rank = np.zeros(1, dtype=np.int64)
            for below, token in zip(self.levels, recent[len(recent) - n :], strict=False):
                rank = self._find(below, rank, token[None])
            histories = np.repeat(rank, self.vocab_size)
            grams = self._find(level, histories, tokens)
            probability = _mix(level, histories, grams, probability)
        return probability

    def _find(self, level: _Level, histories: Ints, tokens: Ints) -> Ints:
        """Return the rank of each n-gram (history, token), or -1 where it is unknown."""
        # An unknown history gives a key below zero, which no n-gram has.
        wanted = histories * self.vocab_size + tokens
        places = np.minimum(np.searchsorted(level.keys, wanted), len(level.keys) - 1)
        return np.where(level.keys[places] == wanted, places, _UNKNOWN)


def discounts_of(counts: np.ndarray) -> Discounts:
    """Return what to take from a count of 1, of 2, and of 3 or more, from the counts of counts.

    D_k = k - (k+1) Y n_{k+1} / n_k with Y = n_1 / (n_1 + 2 n_2), where all n_k > 0 and
    0 < D_k <= k; else `FALLBACK_DISCOUNTS`.
    """
    n1, n2, n3, n4 = (int((counts == k).sum()) for k in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) == 0:
        return FALLBACK_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    # All positive: each history that was seen then leaves something to the order below.
    sane = all(0 < discount <= k for k, discount in enumerate(found, start=1))
    return found if sane else FALLBACK_DISCOUNTS


def _level(keys: Ints, counts: np.ndarray, below: list[_Level], vocab_size: int) -> _Level:
    discounts = discounts_of(counts)
    # 0 for an n-gram that only the start of the stream has, which nothing precedes.
    taken = np.array([0.0, *discounts])[np.minimum(counts, 3)]
    history = keys // vocab_size
    num_histories = len(below[-1].keys) if below else 1
    total = np.bincount(history, weights=counts, minlength=num_histories)
    left = np.bincount(history, weights=taken, minlength=num_histories)
    seen = total > 0
    gamma = np.divide(left, total, out=np.ones(num_histories), where=seen)
    total[~seen] = 1.0
    alpha = (counts - taken) / total[history]
    return _Level(keys=keys, alpha=alpha, gamma=gamma, discounts=discounts)


def _mix(level: _Level, histories: Ints, grams: Ints, lower: Floats) -> Floats:
    alpha = np.where(grams == _UNKNOWN, 0.0, level.alpha[grams])
    gamma = np.where(histories == _UNKNOWN, 1.0, level.gamma[histories])
    return alpha + gamma * lower


def _checked(ids: np.ndarray, vocab_size: int) -> Ints:
    ids = np.asarray(ids)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"token ids are a row of integers, got {ids.dtype} of shape {ids.shape}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"token ids must lie in [0, {vocab_size}), got {ids.min()} to {ids.max()}: is the "
            "vocab_size that of the tokenizer?"
        )
    return ids.astype(np.int64)


if __name__ == "__main__":
    main()
