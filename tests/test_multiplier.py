"""Equations 2-4, in float64, against autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learnable_multipliers._multiplier import (
    Block,
    Matrix,
    all_rows,
    carried_rows,
    effective,
    initial_values,
    multiplier,
    split_gradient,
)
from tolerance import TOLERANCE

F64 = TOLERANCE[torch.float64]


def plain(shape, *, row=False, col=False, scalar=False, **kwargs):
    rows = shape[-1] if kwargs.get("transposed") else shape[-2]
    block = Block(role="unknown", size=rows, row=row, scalar=scalar)
    return Matrix(shape=shape, blocks=(block,), col=col, **kwargs)


@st.composite
def matrices(draw):
    """Any matrix a plan can describe: blocks, repeats, stacks, both axes, both scales."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    repeats = draw(st.integers(1, 3))
    blocks = tuple(draw(any_block(f"part{i}", size)) for i, size in enumerate(sizes))
    out, into = repeats * sum(sizes), draw(st.integers(1, 5))
    transposed = draw(st.booleans())
    stack = draw(st.sampled_from([(), (1,), (3,)]))
    return Matrix(
        shape=(*stack, *((into, out) if transposed else (out, into))),
        blocks=blocks,
        repeats=repeats,
        col=draw(st.booleans()),
        transposed=transposed,
        scale=draw(st.sampled_from(["linear", "log"])),
    )


@st.composite
def any_block(draw, role, size):
    head_dim = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0] or [None]))
    scalar = draw(st.booleans())
    per_head = scalar and head_dim is not None and draw(st.booleans())
    row = draw(st.booleans())
    return Block(role=role, size=size, row=row, scalar=scalar, per_head=per_head, head_dim=head_dim)


def far_values(matrix, seed=0, zero=True):
    """Stored values of multipliers spread over 0.1 to 10, some negative, one zero."""
    generator = torch.Generator().manual_seed(seed)
    values = initial_values(matrix, dtype=torch.float64)
    for name, value in values.items():
        log = (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1) * 2.3
        if matrix.scale == "log":
            far = log
        else:
            far = log.exp() * torch.where(torch.rand(value.shape, generator=generator) < 0.3, -1, 1)
            if zero and far.numel():
                far.view(-1)[0] = 0.0
        if name == "row":
            far = all_rows(matrix, carried_rows(matrix, far)) if far.numel() else far
        values[name] = far
    return values


def by_definition(matrix, raw, values):
    """row_i s_block(i) W_ij col_j, one number at a time."""
    numbers = {name: multiplier(matrix, value).tolist() for name, value in values.items()}
    result = raw.clone()
    for index in torch.cartesian_prod(*(torch.arange(n) for n in raw.shape)).tolist():
        *stack, i, j = index
        i, j = (j, i) if matrix.transposed else (i, j)
        repeat, place = divmod(i, matrix.row_pattern[1])
        factor, scalars = 1.0, 0
        for block in matrix.blocks:
            inside = 0 <= place < block.size
            if inside and block.row:
                factor *= at(numbers["row"], [*stack, i])
            if inside and block.scalar:
                one = matrix.num_scalars == 1
                head = 0
                if block.per_head:
                    head = (repeat * block.size + place) // block.head_dim
                where = ([*stack] or [0]) if one else [*stack, scalars + head]
                factor *= at(numbers["scalar"], where)
            heads = matrix.repeats * block.size // block.head_dim if block.per_head else 1
            scalars += heads if block.scalar else 0
            place -= block.size
        if matrix.col:
            factor *= at(numbers["col"], [*stack, j])
        result[tuple(index)] *= factor
    return result


def at(nested, index):
    for i in index:
        nested = nested[i]
    return nested


@settings(max_examples=150)
@given(matrices(), st.integers(0, 1000))
def test_effective_weight_is_the_product_written_out(matrix, seed):
    raw = torch.randn(matrix.shape, dtype=torch.float64)
    values = far_values(matrix, seed)
    if raw.numel():
        torch.testing.assert_close(
            effective(matrix, raw, values), by_definition(matrix, raw, values), **F64
        )


@settings(max_examples=300)
@given(matrices(), st.integers(0, 1000))
def test_gradient_split_equals_autograd(matrix, seed):
    compare_with_autograd(matrix, seed)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (37, 199), (0, 5), (3, 37, 19), (2, 0, 4)])
@pytest.mark.parametrize("kind", ["scalar", "row", "col", "row+col"])
@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_split_equals_autograd_on_awkward_shapes(shape, kind, scale, transposed):
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    carried = {name: name in kind for name in ("row", "col", "scalar")}
    compare_with_autograd(plain(shape, **carried, scale=scale, transposed=transposed))


def compare_with_autograd(matrix, seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(matrix.shape, dtype=torch.float64, generator=generator).requires_grad_()
    values = {name: value.requires_grad_() for name, value in far_values(matrix, seed).items()}
    grad = torch.randn(matrix.shape, dtype=torch.float64, generator=generator)

    expected = torch.autograd.grad(
        (effective(matrix, raw, values) * grad).sum(), [raw, *values.values()], allow_unused=True
    )
    raw_grad, grads = split_gradient(matrix, raw.detach(), detached(values), grad)

    torch.testing.assert_close(raw_grad, expected[0], **F64)
    assert list(sorted(grads)) == sorted(values)
    for name, wanted in zip(values, expected[1:], strict=True):
        wanted = torch.zeros_like(values[name]) if wanted is None else wanted
        if name == "row":
            # Autograd of the full-length row also sees rows that carry nothing.
            wanted = all_zero_where_not_carried(matrix, wanted)
        torch.testing.assert_close(grads[name], wanted, **F64)


def detached(values):
    return {name: value.detach() for name, value in values.items()}


def all_zero_where_not_carried(matrix, row):
    carried = initial_values(matrix, dtype=torch.float64)["row"].zero_()
    mask = all_rows(matrix, torch.full_like(carried_rows(matrix, carried), 7.0)) == 7.0
    return torch.where(mask, row, torch.zeros_like(row))


def test_gradients_obey_eulers_identity():
    """Scaling rows by a and columns by 1/a changes nothing: sum row*g_row = sum col*g_col."""
    matrix = plain((37, 199), row=True, col=True)
    raw, grad = torch.randn(2, 37, 199, dtype=torch.float64)
    values = far_values(matrix, zero=False)
    _, grads = split_gradient(matrix, raw, values, grad)
    along_rows = (values["row"] * grads["row"]).sum()
    along_cols = (values["col"] * grads["col"]).sum()
    torch.testing.assert_close(along_rows, along_cols, rtol=1e-10, atol=1e-10)


def test_gradient_split_is_finite_where_every_multiplier_is_zero():
    matrix = plain((5, 3), row=True, col=True)
    raw, grad = torch.randn(2, 5, 3, dtype=torch.float64)
    zeros = {"row": torch.zeros(5).double(), "col": torch.zeros(3).double()}
    raw_grad, grads = split_gradient(matrix, raw, zeros, grad)
    assert (raw_grad == 0).all()
    assert (grads["row"] == 0).all()
    assert (grads["col"] == 0).all()


@given(matrices())
@settings(max_examples=100)
def test_carried_rows_and_all_rows_are_inverse(matrix):
    if not matrix.row:
        return
    carried = carried_rows(matrix, torch.randn(matrix.value_shapes()["row"]))
    torch.testing.assert_close(carried_rows(matrix, all_rows(matrix, carried)), carried)
    assert matrix.num_multipliers >= carried.numel()


def test_initial_values_have_the_given_product():
    blocks = (
        Block(role="query", size=2, row=True, init=3.0),
        Block(role="key", size=1, scalar=True, init=0.5),
        Block(role="value", size=1, row=True, scalar=True, init=2.0),
    )
    raw = torch.randn(8, 3, dtype=torch.float64)
    expected = torch.tensor([3.0, 3.0, 0.5, 2.0] * 2, dtype=torch.float64)[:, None] * raw
    for scale in ("linear", "log"):
        matrix = Matrix(shape=(8, 3), blocks=blocks, repeats=2, col=True, scale=scale)
        values = initial_values(matrix, dtype=torch.float64)
        torch.testing.assert_close(effective(matrix, raw, values), expected, **F64)
        assert (multiplier(matrix, values["col"]) == 1).all()


def test_columns_take_the_initial_value_where_nothing_else_is_carried():
    block = Block(role="key", size=4, init=0.25)
    values = initial_values(Matrix(shape=(4, 3), blocks=(block,), col=True))
    assert values["col"].tolist() == [0.25] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (4,)}, "need a matrix"),
        ({"shape": (5, 3)}, "cover 4 rows"),
        ({"scale": "cubic"}, "unknown scale"),
        ({"blocks": (Block(role="up", size=4, row=True, init=0.0),)}, "must be finite, not zero"),
        (
            {"blocks": (Block(role="up", size=4, row=True, init=-1.0),), "scale": "log"},
            "needs a positive one",
        ),
        (
            {"blocks": (Block(role="up", size=2, init=2.0), Block(role="up", size=2)), "col": True},
            "share one column multiplier",
        ),
    ],
)
def test_impossible_matrices_raise(change, message):
    arguments = {"shape": (4, 3), "blocks": (Block(role="up", size=4),), **change}
    with pytest.raises(ValueError, match=message):
        Matrix(**arguments)
