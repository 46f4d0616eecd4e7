"""Packed multipliers compute what the pure functions do, for any mix of matrices."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from learnable_multipliers._multiplier import effective, split_gradient
from learnable_multipliers.optim._packed_multipliers import PackedMultipliers
from learnable_multipliers.optim._sharding import shard_from_chunks
from test_multiplier import far_values, matrices, plain


def check(matrices, seed):
    whole = [shard_from_chunks(matrix.shape, matrix, []) for matrix in matrices]
    packed = PackedMultipliers(dict(enumerate(matrices)), whole, torch.float64, torch.device("cpu"))
    wanted = []
    for i, matrix in enumerate(matrices):
        for name, value in far_values(matrix, seed + i).items():
            packed.state_views(i)[name].copy_(value)
    packed.write_factors_()
    for i, matrix in enumerate(matrices):
        values = far_values(matrix, seed + i)
        raw, grad = torch.randn(2, *matrix.shape, dtype=torch.float64)
        (rows, cols), _, (row_sums, col_sums) = packed.feature_views(i)
        factors = rows.unsqueeze(-1) * cols.unsqueeze(-2)
        weight = effective(matrix, raw, values)
        torch.testing.assert_close((factors * raw).view(weight.shape), weight)
        row_sums.copy_((raw * cols.unsqueeze(-2) * grad).sum(-1))
        col_sums.copy_((rows.unsqueeze(-1) * raw * grad).sum(-2))
        wanted.append(split_gradient(matrix, raw, values, grad)[1])
    grads = packed.gradients()
    for i, expected in enumerate(wanted):
        views = packed.views_of(grads, i)
        assert views.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(views[name], value)


@settings(max_examples=150)
@given(st.lists(matrices(), min_size=1, max_size=4), st.integers(0, 99))
def test_packed_multipliers_equal_the_pure_functions(several, seed):
    assume(any(matrix.carries for matrix in several))
    check(several, seed)


def test_packed_multipliers_equal_the_pure_functions_where_values_lie_like_factors():
    check([plain((4, 3), row=True, col=True), plain((2, 5, 3), row=True, col=True)], 0)


def test_long_runs_of_a_scalar_are_summed_in_lines():
    check([plain((1000, 2), scalar=True), plain((3, 2), scalar=True)], 0)
