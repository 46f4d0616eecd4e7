"""The kernels in PyTorch: the specification, and the implementation on devices without Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from learnable_multipliers.kernels._parameter import (
    ParameterSet,
    ParameterState,
    RowsCols,
    as_stack,
    gradient_of,
    raw_gradient,
    write_effective_,
)

decides_on_host = True
"""Whether the host reads the result of checks before it updates; `go` is then always true."""

_CHUNK = 1 << 16
"""Elements per chunk: temporaries of this size stay in a core's cache."""

_SAMPLE_STEP = 7919
"""Columns from one sampled entry to the next: a prime, so that all columns are sampled."""


def reduce(active: ParameterSet, each: Tensor | None = None) -> Tensor:
    """Write the row and column sums of every matrix; return the squared norm of the gradients.

    The norm is that of the raw gradients, `rows_i cols_j G_ij`, without those of multipliers. If
    `each` is given, every parameter's own squared norm is written there, at its index.
    """
    squares = []
    for state in active:
        if state.factors is None or state.sums is None:
            squares.append(gradient_of(state).to(state.raw.dtype).square().sum())
            continue
        (rows, cols), (row_sums, col_sums) = state.factors, state.sums
        grad, raw = as_stack(gradient_of(state), state.factors), as_stack(state.raw, state.factors)
        col_sums.zero_()
        total = raw.new_zeros(())
        for e, some in _chunks(raw):
            g = grad[e, some].to(raw.dtype)
            product = raw[e, some] * g
            row_sums[e, some] = product @ cols[e]
            col_sums[e] += rows[e, some] @ product
            total += rows[e, some].square() @ (g.square() @ cols[e].square())
        squares.append(total)
    stacked = torch.stack(squares)
    if each is not None:
        each[active.indices] = stacked.to(each.dtype)
    return stacked.sum()


def tabulate(rates: Tensor, class_of: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hyper-parameters of all raw weights, and those of their multipliers.

    `rates` has a row of `Rates` per class of parameters, in float64. The results have a row per
    parameter: lr, decay, beta1, beta2, eps, 1 - beta1 ** step and 1 - beta2 ** step.
    """
    lr, decay, multiplier_lr, multiplier_decay, beta1, beta2, eps = rates[class_of].unbind(1)
    steps = steps.double()
    shared = (beta1, beta2, eps, 1 - beta1**steps, 1 - beta2**steps)
    return (
        torch.stack((lr, decay, *shared), 1),
        torch.stack((multiplier_lr, multiplier_decay, *shared), 1),
    )


def adamw_(active: ParameterSet, hyper: Tensor, clip: Tensor, go: Tensor) -> None:
    """Update raw weights by AdamW and write the effective weights."""
    table = hyper.tolist()
    factor = clip.item()
    for state in active:
        lr, decay, beta1, beta2, eps, bias1, bias2 = table[state.index]
        for raw, g, weight, next_factors, (exp_avg, exp_avg_sq) in _tensor_chunks(state, factor):
            raw.mul_(1 - lr * decay)
            exp_avg.lerp_(g, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            denominator = exp_avg_sq.sqrt().div_(bias2**0.5).add_(eps)
            raw.addcdiv_(exp_avg, denominator, value=-lr / bias1)
            if weight is not None:
                weight.copy_(_times(raw, next_factors))
        if state.owns_raw and not state.weight.is_contiguous():
            write_effective_(state)


def muon_momentum_(
    active: ParameterSet,
    updates: Sequence[Tensor],
    clip: Tensor,
    momentum: float,
    nesterov: bool,
    go: Tensor,
) -> None:
    """Update the momentum of every raw gradient; write the updates before orthogonalization."""
    for state, update in zip(active, updates, strict=True):
        g = raw_gradient(state, clip)
        buffer = state.moments[0].lerp_(g, 1 - momentum)
        update.copy_(g.lerp(buffer, momentum) if nesterov else buffer)


def muon_apply_(
    active: ParameterSet,
    updates: Sequence[Tensor],
    hyper: Tensor,
    adjust: Sequence[float],
    go: Tensor,
) -> None:
    """Decay the raw weights, take the orthogonalized step and write the effective weights.

    `adjust` scales each matrix's learning rate, but not its decay.
    """
    table = hyper.tolist()
    for state, update, scale in zip(active, updates, adjust, strict=True):
        lr, decay, *_ = table[state.index]
        state.raw.mul_(1 - lr * decay).sub_(update.to(state.raw.dtype), alpha=lr * scale)
        if state.owns_raw:
            write_effective_(state)


def multipliers_(
    state: tuple[Tensor, Tensor, Tensor],
    grads: Tensor,
    owner: Tensor,
    trained: Tensor,
    active: Tensor,
    hyper: Tensor,
    clip: Tensor,
    go: Tensor,
) -> None:
    """Update all multipliers by AdamW; `owner` is the row of `hyper` for each of them."""
    values, exp_avg, exp_avg_sq = state
    lr, decay, beta1, beta2, eps, bias1, bias2 = hyper.unbind(1)

    def own(column: Tensor) -> Tensor:
        return column[owner].to(values.dtype)

    moved = active[owner].bool() & trained
    grad = grads * clip
    first = exp_avg.lerp(grad, 1 - own(beta1))
    second = exp_avg_sq * own(beta2) + (1 - own(beta2)) * grad * grad
    denominator = second.sqrt() / own(bias2.sqrt()) + own(eps)
    kept = values * (1 - own(lr * decay))
    new = kept - own(lr / bias1) * first / denominator
    for target, moved_to in ((values, new), (exp_avg, first), (exp_avg_sq, second)):
        torch.where(moved, moved_to, target, out=target)


def touched_from_outside(states: ParameterSet) -> Tensor:
    """Return for each parameter whether a sample of entries differs from what was written.

    The sample has an entry in every row and every column, so that it detects a copy into the
    parameter, a row or a column of it. It is not a diagonal, which a triangle may leave unchanged.
    """
    flags = [_differs(state) for state in states]
    return torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool)


def _differs(state: ParameterState) -> Tensor:
    raw, weight = state.raw, state.weight
    if not state.owns_raw or raw.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=raw.device)
    if state.factors is None:
        count = min(raw.numel(), 4096)
        flat = torch.arange(count) * (raw.numel() - 1) // max(count - 1, 1)
        expected, actual = raw.view(-1)[flat], weight.reshape(-1)[flat]
    else:
        rows, cols = state.factors
        raw, weight = as_stack(raw, state.factors), as_stack(weight, state.factors)
        longer = torch.arange(max(raw.shape[1:]), device=raw.device)
        i, j = longer % raw.shape[1], longer * _SAMPLE_STEP % raw.shape[2]
        expected, actual = rows[:, i] * raw[:, i, j] * cols[:, j], weight[:, i, j]
    same = (expected.to(actual.dtype) == actual) | (expected.isnan() & actual.isnan())
    return ~same.all()


_Chunk = tuple[Tensor, Tensor, Tensor | None, RowsCols | None, tuple[Tensor, ...]]


def _tensor_chunks(state: ParameterState, factor: float) -> Iterator[_Chunk]:
    """Yield a parameter's tensors in chunks: raw, raw gradient, weight, factors, moments."""
    # Chunks of a weight that is not contiguous would be copies.
    weight = state.weight if state.owns_raw and state.weight.is_contiguous() else None
    if state.factors is None or state.next_factors is None:
        g = gradient_of(state).to(state.raw.dtype)
        yield state.raw, g * factor if factor != 1.0 else g, weight, None, state.moments
        return
    (rows, cols), (next_rows, next_cols) = state.factors, state.next_factors
    raw, grad = as_stack(state.raw, state.factors), as_stack(gradient_of(state), state.factors)
    effective = None if weight is None else as_stack(weight, state.factors)
    moments = tuple(as_stack(moment, state.factors) for moment in state.moments)
    for e, some in _chunks(raw):
        yield (
            raw[e, some],
            rows[e, some, None] * factor * grad[e, some].to(raw.dtype) * cols[e],
            None if effective is None else effective[e, some],
            (next_rows[e, some, None], next_cols[e]),
            tuple(moment[e, some] for moment in moments),
        )


def _times(raw: Tensor, factors: RowsCols | None) -> Tensor:
    return raw if factors is None else factors[0] * raw * factors[1]


def _chunks(stacked: Tensor) -> Iterator[tuple[int, slice]]:
    stack, rows, cols = stacked.shape
    step = max(1, _CHUNK // max(cols, 1))
    for e in range(stack):
        for start in range(0, rows, step):
            yield e, slice(start, min(start + step, rows))
