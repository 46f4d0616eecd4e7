"""The order of samples: a pure function of the seed and the global sample index.

A split of T tokens holds n = (T - 1) // L samples of L + 1 tokens; sample i is
tokens[i * L : i * L + L + 1]. Global index g belongs to epoch g // n, and its sample is a
permutation, keyed by (seed, epoch), of g % n. The permutation is a Feistel network on the smallest
power of two that holds n, walked until it lands below n: nothing is stored, and integers alone make
it the same on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_UINT64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Four give a pseudo-random permutation for wide halves; the rest mix the halves of a few bits.
_NUM_ROUNDS = 8


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Return how many samples of `sequence_length` inputs and targets fit into the tokens."""
    if sequence_length < 1:
        raise ValueError(f"a sequence has at least 1 token, got {sequence_length}")
    count = (num_tokens - 1) // sequence_length
    if count < 1:
        raise ValueError(
            f"a sequence of {sequence_length} tokens and its last target is longer than the data "
            f"({num_tokens} tokens); shorten the sequence or prepare more text"
        )
    return count


def sample_order(indices: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.int64]:
    """Return the sample at each global index: a fresh permutation of the samples every epoch."""
    epoch, position = (part.astype(np.uint64) for part in np.divmod(indices, num_samples))
    keys = _mix(epoch + _mix(np.array([(seed + _GOLDEN) & _UINT64], np.uint64)))
    bits = (num_samples - 1).bit_length()
    samples = _feistel(position, keys, bits)
    # Cycle walking: outside is less than half of the domain, so this takes a few short turns.
    outside = np.flatnonzero(samples >= num_samples)
    while outside.size:
        samples[outside] = _feistel(samples[outside], keys[outside], bits)
        outside = outside[samples[outside] >= num_samples]
    return samples.astype(np.int64)


def _feistel(value: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Permute 0 .. 2**bits - 1; each round changes one half by a function of the other."""
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    high, low = value >> low_bits, value & low_mask
    for turn in range(_NUM_ROUNDS):
        round_keys = keys + np.uint64((turn + 1) * _GOLDEN & _UINT64)
        if turn % 2:
            low = low ^ (_mix(high + round_keys) & low_mask)
        else:
            high = high ^ (_mix(low + round_keys) & high_mask)
    return (high << low_bits) | low


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits (the finalizer of SplitMix64)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
