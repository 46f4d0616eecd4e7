"""The kernels in PyTorch: the specification, and the path of every device without Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learnable_multipliers.kernels._work import Factors, Hyper, Rates, Work

decides_on_host = True
"""Whether the optimizer looks at a step's numbers before it goes on; `go` is then always true."""

_CHUNK = 1 << 16
"""Numbers worked on at a time: temporaries of this size stay in a core's cache."""


def reduce(works: Sequence[Work], each: Tensor | None = None) -> Tensor:
    """Write the row and column sums of every matrix; return the squared norm of the gradients.

    The norm is that of the raw gradients, `rows_i cols_j G_ij`; multipliers are not in it. Where
    `each` is given, every parameter's own squared norm is written there, at its index.
    """
    squares = []
    for work in works:
        if work.factors is None:
            squares.append(work.grad.to(work.raw.dtype).square().sum())
            continue
        factors = work.factors
        grad, raw = _stacked(work.grad, factors), _stacked(work.raw, factors)
        factors.col_sums.zero_()
        total = raw.new_zeros(())
        for e, rows in _chunks(raw):
            g = grad[e, rows].to(raw.dtype)
            product = raw[e, rows] * g
            factors.row_sums[e, rows] = product @ factors.cols[e]
            factors.col_sums[e] += factors.rows[e, rows] @ product
            total += factors.rows[e, rows].square() @ (g.square() @ factors.cols[e].square())
        squares.append(total)
    stacked = torch.stack(squares)
    if each is not None:
        each[[work.index for work in works]] = stacked.to(each.dtype)
    return stacked.sum()


def tabulate(rates: Rates) -> tuple[Hyper, Hyper]:
    """Return the hyper-parameters of all raw weights, and those of their multipliers."""
    columns = rates.table[rates.class_of].unbind(1)
    lr, decay, multiplier_lr, multiplier_decay, beta1, beta2, eps = columns
    steps = rates.steps.double()
    shared = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "bias1": 1 - beta1**steps,
        "bias2": 1 - beta2**steps,
    }
    return (
        Hyper(lr=lr, weight_decay=decay, **shared),
        Hyper(lr=multiplier_lr, weight_decay=multiplier_decay, **shared),
    )


def adamw_(works: Sequence[Work], hyper: Hyper, clip: Tensor, go: Tensor) -> None:
    """Update raw weights by AdamW and write the effective weights."""
    table = _rows_of(hyper)
    factor = clip.item()
    for work in works:
        lr, decay, beta1, beta2, eps, bias1, bias2 = table[work.index]
        for raw, g, weight, new_rows, new_cols, (exp_avg, exp_avg_sq) in _parts(work, factor):
            raw.mul_(1 - lr * decay)
            exp_avg.lerp_(g, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            denominator = exp_avg_sq.sqrt().div_(bias2**0.5).add_(eps)
            raw.addcdiv_(exp_avg, denominator, value=-lr / bias1)
            if weight is not None:
                weight.copy_(_times(new_rows, raw, new_cols))
        if work.owns_raw and not work.weight.is_contiguous():
            write_effective(work)


def muon_momentum_(
    works: Sequence[Work],
    updates: Sequence[Tensor],
    clip: Tensor,
    momentum: float,
    nesterov: bool,
    go: Tensor,
) -> None:
    """Update the momentum of every raw gradient and write what is to be orthogonalized."""
    for work, update in zip(works, updates, strict=True):
        g = raw_gradient(work, clip)
        buffer = work.moments[0].lerp_(g, 1 - momentum)
        update.copy_(g.lerp(buffer, momentum) if nesterov else buffer)


def muon_apply_(
    works: Sequence[Work],
    updates: Sequence[Tensor],
    hyper: Hyper,
    adjust: Sequence[float],
    go: Tensor,
) -> None:
    """Decay the raw weights, take the orthogonalized step and write the effective weights.

    `adjust` scales each matrix's learning rate; decay goes by the rate itself.
    """
    table = _rows_of(hyper)
    for work, update, scale in zip(works, updates, adjust, strict=True):
        lr, decay, *_ = table[work.index]
        work.raw.mul_(1 - lr * decay).sub_(update.to(work.raw.dtype), alpha=lr * scale)
        if work.owns_raw:
            write_effective(work)


def multipliers_(
    state: tuple[Tensor, Tensor, Tensor],
    grads: Tensor,
    owner: Tensor,
    trained: Tensor,
    active: Tensor,
    hyper: Hyper,
    clip: Tensor,
    go: Tensor,
) -> None:
    """AdamW on all multipliers; `owner` tells each one's row in the hyper-parameters."""
    values, exp_avg, exp_avg_sq = state

    def own(column: Tensor) -> Tensor:
        return column[owner].to(values.dtype)

    moved = active[owner].bool() & trained
    grad = grads * clip
    first = exp_avg.lerp(grad, 1 - own(hyper.beta1))
    second = exp_avg_sq * own(hyper.beta2) + (1 - own(hyper.beta2)) * grad * grad
    denominator = second.sqrt() / own(hyper.bias2.sqrt()) + own(hyper.eps)
    kept = values * (1 - own(hyper.lr * hyper.weight_decay))
    new = kept - own(hyper.lr / hyper.bias1) * first / denominator
    for target, moved_to in ((values, new), (exp_avg, first), (exp_avg_sq, second)):
        torch.where(moved, moved_to, target, out=target)


def raw_gradient(work: Work, clip: Tensor) -> Tensor:
    """Return the clipped gradient of a raw weight, `clip rows_i cols_j G_ij`."""
    g = work.grad.to(work.raw.dtype)
    clip = clip.to(g.dtype)
    if work.factors is None:
        return g * clip
    rows, cols = work.factors.rows.unsqueeze(-1) * clip, work.factors.cols.unsqueeze(-2)
    return (rows * _stacked(g, work.factors) * cols).view(work.raw.shape)


def write_effective(work: Work) -> None:
    """Write the effective weight of one parameter from its raw weight and next factors."""
    if work.factors is None:
        work.weight.copy_(work.raw)
        return
    work.weight.copy_(effective_of(work))


def effective_of(work: Work) -> Tensor:
    """Return `rows_i W_ij cols_j` in the raw dtype, multiplied in this order."""
    if work.factors is None:
        return work.raw
    raw = _stacked(work.raw, work.factors)
    weight = work.factors.rows_next.unsqueeze(-1) * raw * work.factors.cols_next.unsqueeze(-2)
    return weight.view(work.raw.shape)


def touched_from_outside(works: Sequence[Work]) -> Tensor:
    """Tell for each parameter whether it still is what was written, on a sample of entries.

    The sample has an entry in every row and every column, so that a copy into the parameter, or
    into a row or a column of it, shows.
    """
    flags = [_differs(work) for work in works]
    return torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool)


def _differs(work: Work) -> Tensor:
    if not work.owns_raw or work.raw.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=work.raw.device)
    if work.factors is None:
        count = min(work.raw.numel(), 4096)
        flat = torch.arange(count) * (work.raw.numel() - 1) // max(count - 1, 1)
        expected, found = work.raw.view(-1)[flat], work.weight.reshape(-1)[flat]
    else:
        raw, weight = (_stacked(t, work.factors) for t in (work.raw, work.weight))
        longer = torch.arange(max(raw.shape[1:]), device=raw.device)
        i, j = longer % raw.shape[1], longer % raw.shape[2]
        expected = work.factors.rows[:, i] * raw[:, i, j] * work.factors.cols[:, j]
        found = weight[:, i, j]
    same = (expected.to(found.dtype) == found) | (expected.isnan() & found.isnan())
    return ~same.all()


def _parts(work: Work, factor: float):
    """Yield a parameter's tensors piece by piece: raw, raw gradient, weight, factors, moments."""
    # Pieces of a weight that is not contiguous would be copies.
    weight = work.weight if work.owns_raw and work.weight.is_contiguous() else None
    if work.factors is None:
        g = work.grad.to(work.raw.dtype) * factor if factor != 1.0 else work.grad.to(work.raw.dtype)
        yield work.raw, g, weight, None, None, work.moments
        return
    f = work.factors
    raw, grad = _stacked(work.raw, f), _stacked(work.grad, f)
    effective = None if weight is None else _stacked(weight, f)
    moments = tuple(_stacked(moment, f) for moment in work.moments)
    for e, rows in _chunks(raw):
        scaled_rows = f.rows[e, rows, None] * factor
        g = scaled_rows * grad[e, rows].to(raw.dtype) * f.cols[e]
        yield (
            raw[e, rows],
            g,
            None if effective is None else effective[e, rows],
            f.rows_next[e, rows, None],
            f.cols_next[e],
            tuple(moment[e, rows] for moment in moments),
        )


def _times(rows: Tensor | None, raw: Tensor, cols: Tensor | None) -> Tensor:
    return raw if rows is None or cols is None else rows * raw * cols


def _stacked(tensor: Tensor, factors: Factors) -> Tensor:
    """Return a stored matrix as (stack, rows, cols)."""
    return tensor.reshape(factors.rows.shape[0], factors.rows.shape[1], factors.cols.shape[1])


def _chunks(stacked: Tensor):
    stack, rows, cols = stacked.shape
    step = max(1, _CHUNK // max(cols, 1))
    for e in range(stack):
        for start in range(0, rows, step):
            yield e, slice(start, min(start + step, rows))


def _rows_of(hyper: Hyper) -> list[list[float]]:
    columns = (
        hyper.lr,
        hyper.weight_decay,
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        hyper.bias1,
        hyper.bias2,
    )
    return torch.stack(columns, 1).tolist()
