"""The flat bank of multipliers says what the pure functions say, for any mix of matrices."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learnable_multipliers._multiplier import effective, split_gradient
from learnable_multipliers.optim._packed_multipliers import Extent, MultiplierBank
from test_multiplier import far_values, matrices, plain


def check(found, seed):
    extents = [Extent.whole(matrix) for matrix in found]
    bank = MultiplierBank(found, extents, torch.float64, torch.device("cpu"))
    wanted = []
    for i, matrix in enumerate(found):
        for name, value in far_values(matrix, seed + i).items():
            bank.state_views(i)[name].copy_(value)
    bank.write_factors_()
    for i, matrix in enumerate(found):
        values = far_values(matrix, seed + i)
        raw, grad = torch.randn(2, *matrix.shape, dtype=torch.float64)
        out = bank.out_view(bank.out_factors, i).unsqueeze(-1)
        into = bank.in_view(bank.in_factors, i).unsqueeze(-2)
        weight = effective(matrix, raw, values)
        raw, grad, weight = (t.mT if matrix.transposed else t for t in (raw, grad, weight))
        torch.testing.assert_close((out * raw * into).view(weight.shape), weight)
        bank.out_view(bank.out_sums, i).copy_((raw * into * grad).sum(-1).view(out.shape[:-1]))
        sums = (out * raw * grad).sum(-2)
        bank.in_view(bank.in_sums, i).copy_(sums.view(into.shape[0], -1))
        raw, grad = (t.mT if matrix.transposed else t for t in (raw, grad))
        wanted.append(split_gradient(matrix, raw, values, grad)[1])
    grads = bank.gradients()
    for i, expected in enumerate(wanted):
        views = bank.views_of(grads, i)
        assert views.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(views[name], value)


@settings(max_examples=150)
@given(st.lists(matrices(), min_size=1, max_size=4), st.integers(0, 99))
def test_bank_equals_the_pure_functions(found, seed):
    check(found, seed)


def test_bank_equals_the_pure_functions_where_values_lie_like_factors():
    check([plain((4, 3), row=True, col=True), plain((2, 5, 3), row=True, col=True)], 0)


def test_long_runs_of_a_scalar_are_summed_in_lines():
    check([plain((1000, 2), scalar=True), plain((3, 2), scalar=True)], 0)
