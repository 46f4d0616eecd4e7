"""The kernels in Triton: two passes over a matrix, one launch for many matrices.

Pass one reads G and W once and gives row sums, column sums and the squared norm of the raw
gradient. Pass two updates raw weight and moments and writes the effective weight, with the clip
factor folded in. A table of addresses lets one launch serve several hundred matrices. There are no
atomic sums, so results repeat bit for bit. Nothing waits for the host: a skipped step (`go` is 0)
changes no tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table of addresses, a row per parameter.
GRAD, WEIGHT, RAW, FIRST = (tl.constexpr(i) for i in range(4))
SECOND, UPDATE, ROW, COL = (tl.constexpr(i) for i in range(4, 8))
ROW_NEXT, COL_NEXT, ROW_SUM, COL_SUM = (tl.constexpr(i) for i in range(8, 12))
NUM_COLS, FIELDS = tl.constexpr(12), tl.constexpr(13)
# Columns of the table of hyper-parameters, a row per parameter.
LR, DECAY, TOWARDS, BETA2 = (tl.constexpr(i) for i in range(4))
EPS, STEP_SIZE, ROOT_BIAS2, HYPERS = (tl.constexpr(i) for i in range(4, 8))
# Columns of the tables of programs: a block of rows, or a run of numbers.
SLOT, START, STOP, STACK = (tl.constexpr(i) for i in range(4))
PARTIAL, NUM_BLOCKS, PROGRAM = (tl.constexpr(i) for i in range(4, 7))
# Columns from one sampled entry to the next: a prime, as in the reference.
SAMPLE_STEP = tl.constexpr(7919)


@triton.jit
def _pointer(table, slot, field: tl.constexpr, dtype: tl.constexpr):
    return tl.load(table + slot * FIELDS + field).to(tl.pointer_type(dtype))


@triton.jit
def _matrix(table, slot, field: tl.constexpr, dtype: tl.constexpr, first, ALIGNED: tl.constexpr):
    """Return the address of a program's first number in a large tensor."""
    pointer = _pointer(table, slot, field, dtype) + first
    if ALIGNED:
        # What the compiler cannot know of an address it reads from a table. Four numbers at a
        # time for every type, so that all tensors of a tile are laid out alike in registers.
        pointer = tl.multiple_of(pointer, 16 if dtype == tl.float32 else 8)
    return pointer


@triton.jit
def _block(table, programs, BLOCK_ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a program's parameter, first number, rows left, columns and where factors start."""
    pid = tl.program_id(0)
    slot = tl.load(programs + pid * PROGRAM + SLOT)
    start = tl.load(programs + pid * PROGRAM + START)
    rows_left = (tl.load(programs + pid * PROGRAM + STOP) - start).to(tl.int32)
    num_cols = tl.load(table + slot * FIELDS + NUM_COLS)
    first_col = tl.load(programs + pid * PROGRAM + STACK) * num_cols
    first = start * num_cols
    num_cols = num_cols.to(tl.int32)
    if ALIGNED:
        num_cols = tl.multiple_of(num_cols, 16)
    return slot, start, rows_left, num_cols, first, first_col


@triton.jit
def reduce_kernel(
    table,
    programs,
    partials,
    squares,
    grad_type: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Row sums, partial column sums and partial squared norm of a block of rows."""
    pid = tl.program_id(0)
    slot, start, rows_left, num_cols, first, first_col = _block(
        table, programs, BLOCK_ROWS, ALIGNED
    )
    partial = partials + tl.load(programs + pid * PROGRAM + PARTIAL)
    grad = _matrix(table, slot, GRAD, grad_type, first, ALIGNED)
    raw = _matrix(table, slot, RAW, tl.float32, first, ALIGNED)
    rows = tl.arange(0, BLOCK_ROWS)
    inside = rows < rows_left
    b_row = tl.load(_pointer(table, slot, ROW, tl.float32) + start + rows, mask=inside, other=0.0)
    col = _pointer(table, slot, COL, tl.float32) + first_col
    b_sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    b_squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for column in range(0, num_cols, BLOCK_COLS):
        cols = column + tl.arange(0, BLOCK_COLS)
        valid = cols < num_cols
        mask = inside[:, None] & valid[None, :]
        offsets = rows[:, None] * num_cols + cols[None, :]
        b_grad = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        b_raw = tl.load(raw + offsets, mask=mask, other=0.0)
        b_col = tl.load(col + cols, mask=valid, other=0.0)
        b_scaled = b_grad * b_col[None, :]
        b_sums += b_raw * b_scaled
        b_squares += b_scaled * b_scaled
        b_down = tl.sum(b_row[:, None] * (b_raw * b_grad), 0)
        tl.store(partial + cols, b_down, mask=valid)
    sums = _pointer(table, slot, ROW_SUM, tl.float32) + start
    tl.store(sums + rows, tl.sum(b_sums, 1), mask=inside)
    tl.store(squares + pid, tl.sum(tl.sum(b_squares, 1) * b_row * b_row, 0))


@triton.jit
def column_sums_kernel(table, programs, partials, BLOCK_COLS: tl.constexpr):
    """Add up the partial column sums of a matrix, in order of its rows."""
    pid = tl.program_id(0)
    slot = tl.load(programs + pid * PROGRAM + SLOT)
    num_cols = tl.load(table + slot * FIELDS + NUM_COLS)
    cols = tl.load(programs + pid * PROGRAM + START) + tl.arange(0, BLOCK_COLS)
    valid = cols < num_cols
    partial = partials + tl.load(programs + pid * PROGRAM + PARTIAL)
    b_sums = tl.zeros((BLOCK_COLS,), tl.float32)
    for block in range(0, tl.load(programs + pid * PROGRAM + NUM_BLOCKS)):
        b_sums += tl.load(partial + block * num_cols + cols, mask=valid, other=0.0)
    first = tl.load(programs + pid * PROGRAM + STACK) * num_cols
    tl.store(_pointer(table, slot, COL_SUM, tl.float32) + first + cols, b_sums, mask=valid)


@triton.jit
def squares_kernel(table, programs, squares, grad_type: tl.constexpr, BLOCK: tl.constexpr):
    """Partial squared norm of a run of numbers without factors."""
    pid = tl.program_id(0)
    slot = tl.load(programs + pid * PROGRAM + SLOT)
    stop = tl.load(programs + pid * PROGRAM + STOP)
    grad = _pointer(table, slot, GRAD, grad_type)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.load(programs + pid * PROGRAM + START), stop, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        b_grad = tl.load(grad + offsets, mask=offsets < stop, other=0.0).to(tl.float32)
        b_sum += b_grad * b_grad
    tl.store(squares + pid, tl.sum(b_sum, 0))


@triton.jit
def tabulate_kernel(rates, class_of, steps, table, multiplier_table, size, BLOCK: tl.constexpr):
    """Write the hyper-parameters of raw weights and of multipliers, from float64 arithmetic."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = slot < size
    row = rates + tl.load(class_of + slot, mask=mask, other=0) * 7
    step = tl.load(steps + slot, mask=mask, other=1.0).to(tl.float64)
    beta1, beta2 = tl.load(row + 4), tl.load(row + 5)
    bias1 = 1.0 - tl.exp(step * tl.log(beta1))
    root_bias2 = tl.sqrt(1.0 - tl.exp(step * tl.log(beta2)))
    for kind in tl.static_range(2):
        out = (table if kind == 0 else multiplier_table) + slot * HYPERS
        lr = tl.load(row + 2 * kind)
        tl.store(out + LR, lr.to(tl.float32), mask=mask)
        tl.store(out + DECAY, tl.load(row + 2 * kind + 1).to(tl.float32), mask=mask)
        tl.store(out + TOWARDS, (1.0 - beta1).to(tl.float32), mask=mask)
        tl.store(out + BETA2, beta2.to(tl.float32), mask=mask)
        tl.store(out + EPS, tl.load(row + 6).to(tl.float32), mask=mask)
        tl.store(out + STEP_SIZE, (lr / bias1).to(tl.float32), mask=mask)
        tl.store(out + ROOT_BIAS2, root_bias2.to(tl.float32), mask=mask)


@triton.jit
def _settings(hypers, slot):
    """Return the hyper-parameters of AdamW for one parameter."""
    row = hypers + slot * HYPERS
    keep = 1.0 - tl.load(row + LR) * tl.load(row + DECAY)
    towards, beta2 = tl.load(row + TOWARDS), tl.load(row + BETA2)
    eps, step_size = tl.load(row + EPS), tl.load(row + STEP_SIZE)
    return keep, towards, beta2, eps, step_size, tl.load(row + ROOT_BIAS2)


@triton.jit
def _adamw(b_raw, b_grad, b_first, b_second, keep, towards, beta2, eps, step_size, root_bias2):
    """One step of AdamW; returns raw weight and both moments."""
    b_first += (b_grad - b_first) * towards
    b_second = b_second * beta2 + (1.0 - beta2) * b_grad * b_grad
    b_raw = b_raw * keep
    b_raw -= step_size * b_first / (tl.sqrt(b_second) / root_bias2 + eps)
    return b_raw, b_first, b_second


@triton.jit
def adamw_kernel(
    table,
    programs,
    hypers,
    clip,
    go,
    grad_type: tl.constexpr,
    weight_type: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Update a block of rows by AdamW and write its effective weight."""
    if tl.load(go) != 0:
        slot, start, rows_left, num_cols, first, first_col = _block(
            table, programs, BLOCK_ROWS, ALIGNED
        )
        keep, towards, beta2, eps, step_size, root_bias2 = _settings(hypers, slot)
        grad = _matrix(table, slot, GRAD, grad_type, first, ALIGNED)
        weight = _matrix(table, slot, WEIGHT, weight_type, first, ALIGNED)
        raw = _matrix(table, slot, RAW, tl.float32, first, ALIGNED)
        moment = _matrix(table, slot, FIRST, tl.float32, first, ALIGNED)
        square = _matrix(table, slot, SECOND, tl.float32, first, ALIGNED)
        rows = tl.arange(0, BLOCK_ROWS)
        inside = rows < rows_left
        row = _pointer(table, slot, ROW, tl.float32) + start
        row_next = _pointer(table, slot, ROW_NEXT, tl.float32) + start
        b_row = tl.load(row + rows, mask=inside, other=0.0) * tl.load(clip)
        b_row_next = tl.load(row_next + rows, mask=inside, other=0.0)
        col = _pointer(table, slot, COL, tl.float32) + first_col
        col_next = _pointer(table, slot, COL_NEXT, tl.float32) + first_col
        for column in range(0, num_cols, BLOCK_COLS):
            cols = column + tl.arange(0, BLOCK_COLS)
            valid = cols < num_cols
            mask = inside[:, None] & valid[None, :]
            offsets = rows[:, None] * num_cols + cols[None, :]
            b_col = tl.load(col + cols, mask=valid, other=0.0)
            b_col_next = tl.load(col_next + cols, mask=valid, other=0.0)
            b_grad = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
            b_grad = b_row[:, None] * b_grad * b_col[None, :]
            b_raw, b_first, b_second = _adamw(
                tl.load(raw + offsets, mask=mask, other=0.0),
                b_grad,
                tl.load(moment + offsets, mask=mask, other=0.0),
                tl.load(square + offsets, mask=mask, other=0.0),
                keep,
                towards,
                beta2,
                eps,
                step_size,
                root_bias2,
            )
            tl.store(raw + offsets, b_raw, mask=mask)
            tl.store(moment + offsets, b_first, mask=mask)
            tl.store(square + offsets, b_second, mask=mask)
            b_weight = b_row_next[:, None] * b_raw * b_col_next[None, :]
            tl.store(weight + offsets, b_weight.to(weight_type), mask=mask)


@triton.jit
def adamw_flat_kernel(
    table,
    programs,
    hypers,
    clip,
    go,
    grad_type: tl.constexpr,
    weight_type: tl.constexpr,
    OWNS_RAW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a run of numbers without factors by AdamW."""
    if tl.load(go) != 0:
        pid = tl.program_id(0)
        slot = tl.load(programs + pid * PROGRAM + SLOT)
        begin = tl.load(programs + pid * PROGRAM + START)
        left = (tl.load(programs + pid * PROGRAM + STOP) - begin).to(tl.int32)
        factor = tl.load(clip)
        keep, towards, beta2, eps, step_size, root_bias2 = _settings(hypers, slot)
        grad = _matrix(table, slot, GRAD, grad_type, begin, ALIGNED)
        weight = _matrix(table, slot, WEIGHT, weight_type, begin, ALIGNED)
        raw = _matrix(table, slot, RAW, tl.float32, begin, ALIGNED)
        moment = _matrix(table, slot, FIRST, tl.float32, begin, ALIGNED)
        square = _matrix(table, slot, SECOND, tl.float32, begin, ALIGNED)
        for start in range(0, left, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < left
            b_grad = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * factor
            b_raw, b_first, b_second = _adamw(
                tl.load(raw + offsets, mask=mask, other=0.0),
                b_grad,
                tl.load(moment + offsets, mask=mask, other=0.0),
                tl.load(square + offsets, mask=mask, other=0.0),
                keep,
                towards,
                beta2,
                eps,
                step_size,
                root_bias2,
            )
            tl.store(raw + offsets, b_raw, mask=mask)
            tl.store(moment + offsets, b_first, mask=mask)
            tl.store(square + offsets, b_second, mask=mask)
            if OWNS_RAW:
                tl.store(weight + offsets, b_raw.to(weight_type), mask=mask)


@triton.jit
def momentum_kernel(
    table,
    programs,
    clip,
    go,
    momentum,
    grad_type: tl.constexpr,
    update_type: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Update the momentum of a block of rows and write the update before orthogonalization."""
    allowed = tl.load(go) != 0
    slot, start, rows_left, num_cols, first, first_col = _block(
        table, programs, BLOCK_ROWS, ALIGNED
    )
    grad = _matrix(table, slot, GRAD, grad_type, first, ALIGNED)
    buffer = _matrix(table, slot, FIRST, tl.float32, first, ALIGNED)
    update = _matrix(table, slot, UPDATE, update_type, first, ALIGNED)
    rows = tl.arange(0, BLOCK_ROWS)
    inside = rows < rows_left
    b_row = tl.zeros((BLOCK_ROWS,), tl.float32) + tl.load(clip)
    if HAS_FACTORS:
        row = _pointer(table, slot, ROW, tl.float32) + start
        b_row = b_row * tl.load(row + rows, mask=inside, other=0.0)
        col = _pointer(table, slot, COL, tl.float32) + first_col
    for column in range(0, num_cols, BLOCK_COLS):
        cols = column + tl.arange(0, BLOCK_COLS)
        valid = cols < num_cols
        mask = inside[:, None] & valid[None, :]
        offsets = rows[:, None] * num_cols + cols[None, :]
        b_grad = b_row[:, None] * tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_FACTORS:
            b_grad = b_grad * tl.load(col + cols, mask=valid, other=0.0)[None, :]
        b_buffer = tl.load(buffer + offsets, mask=mask, other=0.0)
        b_buffer += (b_grad - b_buffer) * (1.0 - momentum)
        b_update = b_buffer
        if NESTEROV:
            b_update = b_grad + (b_buffer - b_grad) * momentum
        if allowed:
            tl.store(buffer + offsets, b_buffer, mask=mask)
        tl.store(update + offsets, b_update.to(update_type), mask=mask)


@triton.jit
def apply_kernel(
    table,
    programs,
    hypers,
    adjust,
    go,
    update_type: tl.constexpr,
    weight_type: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    OWNS_RAW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Decay a block of rows, take the orthogonalized step, write the effective weight."""
    if tl.load(go) != 0:
        slot, start, rows_left, num_cols, first, first_col = _block(
            table, programs, BLOCK_ROWS, ALIGNED
        )
        lr = tl.load(hypers + slot * HYPERS + LR)
        keep = 1.0 - lr * tl.load(hypers + slot * HYPERS + DECAY)
        lr = lr * tl.load(adjust + slot)
        update = _matrix(table, slot, UPDATE, update_type, first, ALIGNED)
        weight = _matrix(table, slot, WEIGHT, weight_type, first, ALIGNED)
        raw = _matrix(table, slot, RAW, tl.float32, first, ALIGNED)
        rows = tl.arange(0, BLOCK_ROWS)
        inside = rows < rows_left
        if HAS_FACTORS:
            row_next = _pointer(table, slot, ROW_NEXT, tl.float32) + start
            b_row_next = tl.load(row_next + rows, mask=inside, other=0.0)
            col_next = _pointer(table, slot, COL_NEXT, tl.float32) + first_col
        for column in range(0, num_cols, BLOCK_COLS):
            cols = column + tl.arange(0, BLOCK_COLS)
            valid = cols < num_cols
            mask = inside[:, None] & valid[None, :]
            offsets = rows[:, None] * num_cols + cols[None, :]
            b_update = tl.load(update + offsets, mask=mask, other=0.0).to(tl.float32)
            b_raw = tl.load(raw + offsets, mask=mask, other=0.0) * keep - lr * b_update
            tl.store(raw + offsets, b_raw, mask=mask)
            if OWNS_RAW:
                b_weight = b_raw
                if HAS_FACTORS:
                    b_col_next = tl.load(col_next + cols, mask=valid, other=0.0)
                    b_weight = b_row_next[:, None] * b_raw * b_col_next[None, :]
                tl.store(weight + offsets, b_weight.to(weight_type), mask=mask)


@triton.jit
def touched_kernel(
    table,
    programs,
    flags,
    weight_type: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compare a sample of a weight, an entry in every row and column, with what was written."""
    pid = tl.program_id(0)
    slot = tl.load(programs + pid * PROGRAM + SLOT)
    sample = tl.load(programs + pid * PROGRAM + START) + tl.arange(0, BLOCK)
    num_rows = tl.load(programs + pid * PROGRAM + STOP)
    stack = tl.load(programs + pid * PROGRAM + STACK)
    num_cols = tl.load(table + slot * FIELDS + NUM_COLS)
    longer = tl.maximum(num_rows, num_cols)
    mask = sample < longer
    row = sample % num_rows + stack * num_rows
    col = sample * SAMPLE_STEP % num_cols
    weight = _pointer(table, slot, WEIGHT, weight_type)
    b_raw = tl.load(
        _pointer(table, slot, RAW, tl.float32) + row * num_cols + col, mask=mask, other=0.0
    )
    if HAS_FACTORS:
        b_row = tl.load(_pointer(table, slot, ROW, tl.float32) + row, mask=mask, other=0.0)
        cols = _pointer(table, slot, COL, tl.float32) + stack * num_cols
        b_raw = b_row * b_raw * tl.load(cols + col, mask=mask, other=0.0)
    b_found = tl.load(weight + row * num_cols + col, mask=mask, other=0.0).to(tl.float32)
    b_expected = b_raw.to(weight_type).to(tl.float32)
    # NaN is not equal to itself, but counts as equal if it was written.
    same = (b_expected == b_found) | ((b_expected != b_expected) & (b_found != b_found))
    tl.store(flags + pid, tl.max((mask & (same == 0)).to(tl.int32), 0))


@triton.jit
def multiplier_adamw_kernel(
    values,
    first,
    second,
    grads,
    owner,
    trained,
    active,
    hypers,
    clip,
    go,
    size,
    BLOCK: tl.constexpr,
):
    """AdamW on the multipliers of all matrices."""
    if tl.load(go) != 0:
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        slot = tl.load(owner + offsets, mask=mask, other=0)
        moved = mask & (tl.load(trained + offsets, mask=mask, other=0) != 0)
        moved = moved & (tl.load(active + slot, mask=mask, other=0) != 0)
        b_grad = tl.load(grads + offsets, mask=moved, other=0.0) * tl.load(clip)
        keep, towards, beta2, eps, step_size, root_bias2 = _settings(hypers, slot)
        b_value, b_first, b_second = _adamw(
            tl.load(values + offsets, mask=moved, other=0.0),
            b_grad,
            tl.load(first + offsets, mask=moved, other=0.0),
            tl.load(second + offsets, mask=moved, other=0.0),
            keep,
            towards,
            beta2,
            eps,
            step_size,
            root_bias2,
        )
        tl.store(values + offsets, b_value, mask=moved)
        tl.store(first + offsets, b_first, mask=moved)
        tl.store(second + offsets, b_second, mask=moved)
