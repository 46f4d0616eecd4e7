import numpy as np
import pytest

from learnable_multipliers.pretrain.data.order import num_samples, sample_order


@pytest.mark.parametrize("sizes", [range(1, 301), (1000, 1024, 1025, 4095, 7919)])
def test_every_epoch_visits_every_sample_once(sizes):
    for size in sizes:
        for seed in (0, 1):
            order = sample_order(np.arange(3 * size), size, seed).reshape(3, size)
            assert (np.sort(order) == np.arange(size)).all()


def test_order_is_a_function_of_seed_and_index_alone():
    whole = sample_order(np.arange(2000), 777, seed=3)
    for size in (5, 64, 500):
        parts = [
            sample_order(np.arange(start, min(start + size, 2000)), 777, seed=3)
            for start in range(0, 2000, size)
        ]
        assert (np.concatenate(parts) == whole).all()
    shuffled = np.random.default_rng(0).permutation(2000)
    assert (sample_order(shuffled, 777, seed=3) == whole[shuffled]).all()


def test_order_is_the_same_on_every_machine():
    # Written down once: a change of these numbers breaks every run that resumes.
    assert sample_order(range(10), 10, seed=0).tolist() == [5, 9, 6, 7, 3, 2, 1, 4, 0, 8]
    assert sample_order([0, 10**12, 2**62], 10**11 + 7, seed=-1).tolist() == [
        60681288415,
        28085199706,
        12101693970,
    ]


def test_order_is_well_mixed():
    size, epochs = 64, 4000
    order = sample_order(np.arange(size * epochs), size, seed=0).reshape(epochs, size)
    # Each (position, sample) pair is met epochs / size times: chi-square per position.
    counts = np.stack([(order == sample).sum(0) for sample in range(size)])
    expected = epochs / size
    chi_square = ((counts - expected) ** 2 / expected).sum(0) / (size - 1)
    assert abs(chi_square.mean() - 1) < 0.1
    assert chi_square.max() < 2
    # Neither the place, nor the neighbour, nor the epoch before says anything about a sample.
    long = sample_order(np.arange(200_000), 100_000, seed=0).reshape(2, -1)
    place = np.arange(100_000)
    for pair in ((long[0], place), (long[0, 1:], long[0, :-1]), (long[0], long[1])):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.015
    other = sample_order(place, 100_000, seed=1)
    assert abs(np.corrcoef(long[0], other)[0, 1]) < 0.015
    # Steps between neighbours are as spread out as those of a random permutation (mean 1/3).
    assert abs(np.abs(np.diff(long[0])).mean() / 100_000 - 1 / 3) < 0.005


def test_samples_share_only_their_border():
    assert [num_samples(tokens, 8) for tokens in (9, 16, 17, 24, 25)] == [1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match=r"sequence of 8 tokens .* longer than the data \(8 tok"):
        num_samples(8, 8)
