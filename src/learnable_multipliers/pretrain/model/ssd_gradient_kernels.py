"""The kernels that the backward pass of the scan alone runs, in the notation of `ssd_kernels`."""

# Triton's block sizes are upper case, and A, B and C are the letters of the paper.
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    x,
    dy,
    B,
    C,
    decays,
    steps,
    mixed,
    direct,
    skips,
    b_partials,
    c_partials,
    x_batch,
    x_time,
    x_head,
    dy_batch,
    dy_time,
    dy_head,
    b_batch,
    b_time,
    b_group,
    c_batch,
    c_time,
    c_group,
    length,
    heads,
    groups,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum the part of dB and dC within chunks over some heads, and write what dt, A and D need.

    A program has all rows of the chunk by a block of its columns: dC and `mixed` are in parts.
    With T_ij = (dy_i . x_j) L_ij G_ij, per head: `mixed` is sum_j T_ij dt_j, `direct` sum_i T_ij
    and `skips` the sum of dy_i . x_i. `mixed` and `direct` come from one float32 matrix: running
    sums of the two cancel.
    """
    splits: tl.constexpr = PER_GROUP // NUM_HEADS
    col_blocks: tl.constexpr = CHUNK // BLOCK_COLS
    pid = tl.program_id(0)
    col_block = pid % col_blocks
    split = (pid // col_blocks) % splits
    group = (pid // (col_blocks * splits)).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    start = (chunk * CHUNK).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, CHUNK)
    cols = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    dims = tl.arange(0, HEAD_DIM)
    cells = tl.arange(0, STATE)
    rows_inside = (start + rows < length)[:, None]
    cols_inside = (start + cols < length)[:, None]
    x += batch * x_batch + start * x_time
    dy += batch * dy_batch + start * dy_time
    B += batch * b_batch + start * b_time + group * b_group
    C += batch * c_batch + start * c_time + group * c_group
    mixed += col_block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks * CHUNK)
    skips += col_block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks)
    b_B = tl.load(B + cols[:, None] * b_time + cells[None, :], mask=cols_inside, other=0.0)
    b_C = tl.load(C + rows[:, None] * c_time + cells[None, :], mask=rows_inside, other=0.0)
    b_scores = tl.dot(b_C, tl.trans(b_B), input_precision=PRECISION)
    b_scores = tl.where(rows[:, None] >= cols[None, :], b_scores, 0.0)
    b_grads = tl.zeros((CHUNK, BLOCK_COLS), tl.float32)
    for index in range(0, NUM_HEADS):
        head = group * PER_GROUP + split * NUM_HEADS + index
        row = (batch * heads + head) * num_chunks * CHUNK + start
        b_dy = tl.load(
            dy + head * dy_head + rows[:, None] * dy_time + dims[None, :],
            mask=rows_inside,
            other=0.0,
        )
        b_x = tl.load(
            x + head * x_head + cols[:, None] * x_time + dims[None, :], mask=cols_inside, other=0.0
        )
        b_tile = tl.dot(b_dy, tl.trans(b_x), input_precision=PRECISION)
        b_skip = tl.sum(tl.where(rows[:, None] == cols[None, :], b_tile, 0.0), 1)
        tl.store(skips + (batch * num_chunks + chunk) * heads + head, tl.sum(b_skip, 0))
        b_row_decay = tl.load(decays + row + rows)
        b_col_decay = tl.load(decays + row + cols)
        b_step = tl.load(steps + row + cols)
        b_tile = b_tile * tl.exp2(tl.minimum(b_row_decay[:, None] - b_col_decay[None, :], 0.0))
        b_grads += b_tile * b_step[None, :]
        b_tile = b_tile * b_scores
        tl.store(direct + row + cols, tl.sum(b_tile, 0))
        tl.store(mixed + row + rows, tl.sum(b_tile * b_step[None, :], 1))
    b_grads = tl.where(rows[:, None] >= cols[None, :], b_grads, 0.0).to(b_B.dtype)
    size = tl.num_programs(2).to(tl.int64) * length * groups * STATE
    here = ((batch * length + start) * groups + group) * STATE
    b_sum = tl.dot(b_grads, b_B, input_precision=PRECISION)
    tl.store(
        c_partials
        + (split * col_blocks + col_block) * size
        + here
        + rows[:, None] * (groups * STATE)
        + cells[None, :],
        b_sum,
        mask=rows_inside,
    )
    b_sum = tl.dot(tl.trans(b_grads), b_C, input_precision=PRECISION)
    tl.store(
        b_partials + split * size + here + cols[:, None] * (groups * STATE) + cells[None, :],
        b_sum,
        mask=cols_inside,
    )


@triton.jit
def keys_kernel(
    values,
    keys,
    states,
    state_grads,
    decays,
    steps,
    reached,
    crossings,
    partials,
    values_batch,
    values_time,
    values_head,
    keys_batch,
    keys_time,
    keys_group,
    length,
    heads,
    groups,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum the part of dC (of queries, from dy and S) or dB (from x and dS_out) over some heads.

    A program has a block of the state: `reached` and `crossings` are in parts. Per head,
    `reached` is exp(a_i) dy_i . S^T C_i or exp(a_last - a_j) x_j . dS_out^T B_j, and
    `crossings`, written with dB, is exp(a_last) <S, dS_out>.
    """
    splits: tl.constexpr = PER_GROUP // NUM_HEADS
    blocks: tl.constexpr = STATE // BLOCK_STATE
    pid = tl.program_id(0)
    block = pid % blocks
    split = (pid // blocks) % splits
    group = (pid // (blocks * splits)).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    start = (chunk * CHUNK).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, CHUNK)
    dims = tl.arange(0, HEAD_DIM)
    cells = block * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
    inside = (start + rows < length)[:, None]
    values += batch * values_batch + start * values_time
    keys += batch * keys_batch + start * keys_time + group * keys_group
    key_offsets = rows[:, None] * keys_time + cells[None, :]
    state_offsets = cells[:, None] * HEAD_DIM + dims[None, :]
    b_keys = tl.load(keys + key_offsets, mask=inside, other=0.0)
    reached += block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks * CHUNK)
    crossings += block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks)
    b_sum = tl.zeros((CHUNK, BLOCK_STATE), tl.float32)
    for index in range(0, NUM_HEADS):
        head = group * PER_GROUP + split * NUM_HEADS + index
        row = (batch * heads + head) * num_chunks * CHUNK + start
        here = ((batch * num_chunks + chunk) * heads + head) * (STATE * HEAD_DIM)
        b_values = tl.load(
            values + head * values_head + rows[:, None] * values_time + dims[None, :],
            mask=inside,
            other=0.0,
        )
        b_decay = tl.load(decays + row + rows)
        b_state = tl.load(states + here + state_offsets)
        if QUERIES:
            b_part = tl.dot(b_values, tl.trans(b_state), input_precision=PRECISION)
            b_part = b_part * tl.exp2(b_decay)[:, None]
            b_sum += b_part
        else:
            b_grad = tl.load(state_grads + here + state_offsets)
            last = tl.load(decays + row + CHUNK - 1)
            b_cross = tl.sum(b_grad.to(tl.float32) * b_state.to(tl.float32), 1)
            crossing = tl.sum(b_cross, 0) * tl.exp2(last)
            tl.store(crossings + (batch * num_chunks + chunk) * heads + head, crossing)
            b_part = tl.dot(b_values, tl.trans(b_grad), input_precision=PRECISION)
            b_part = b_part * tl.exp2(last - b_decay)[:, None]
            b_sum += b_part * tl.load(steps + row + rows)[:, None]
        tl.store(reached + row + rows, tl.sum(b_part * b_keys.to(tl.float32), 1))
    size = tl.num_programs(2).to(tl.int64) * length * groups * STATE
    partials += split * size + ((batch * length + start) * groups + group) * STATE
    tl.store(partials + rows[:, None] * (groups * STATE) + cells[None, :], b_sum, mask=inside)


@triton.jit
def rates_kernel(
    A,
    steps,
    mixed,
    direct,
    reads,
    writes,
    crossings,
    dt_grads,
    rate_partials,
    length,
    padded,
    heads,
    CHUNK: tl.constexpr,
    MIXED_PARTS: tl.constexpr,
    READS_PARTS: tl.constexpr,
    WRITES_PARTS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Write the gradient of dt, and that of A summed over a chunk.

    The gradient of (dt A)_t is that of every a_i with i >= t in the chunk; what a_last alone
    receives from `writes` leaves the sum over j < t.
    """
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    chunk = tl.program_id(1)
    time = chunk * CHUNK + tl.arange(0, CHUNK)
    batch = tl.program_id(2).to(tl.int64)
    known = head < heads
    mask = known[:, None] & (time < length)[None, :]
    source = (batch * heads + head[:, None]) * padded + time[None, :]
    per_chunk = (batch * tl.num_programs(1) + chunk) * heads + head
    size = tl.num_programs(2).to(tl.int64) * heads * padded
    num_crossings = tl.num_programs(2).to(tl.int64) * heads * tl.num_programs(1)
    b_step = tl.load(steps + source, mask=mask, other=0.0)
    b_direct = tl.load(direct + source, mask=mask, other=0.0)
    b_grown = -b_step * b_direct
    for part in tl.static_range(MIXED_PARTS):
        b_grown += tl.load(mixed + part * size + source, mask=mask, other=0.0)
    for part in tl.static_range(READS_PARTS):
        b_grown += tl.load(reads + part * size + source, mask=mask, other=0.0)
    b_write = tl.zeros((BLOCK_HEADS, CHUNK), tl.float32)
    b_crossing = tl.zeros((BLOCK_HEADS,), tl.float32)
    for part in tl.static_range(WRITES_PARTS):
        b_write += tl.load(writes + part * size + source, mask=mask, other=0.0)
        b_crossing += tl.load(crossings + part * num_crossings + per_chunk, mask=known, other=0.0)
    b_written = b_step * b_write
    b_rate = tl.cumsum(b_grown, 1, reverse=True) + (tl.cumsum(b_written, 1) - b_written)
    b_rate += b_crossing[:, None]
    b_A = tl.load(A + head, mask=known, other=0.0)
    target = (batch * length + time[None, :]) * heads + head[:, None]
    tl.store(dt_grads + target, b_direct + b_write + b_A[:, None] * b_rate, mask=mask)
    tl.store(rate_partials + per_chunk, tl.sum(b_rate * b_step, 1), mask=known)


@triton.jit
def sums_kernel(
    within,
    through,
    sums,
    size,
    WITHIN: tl.constexpr,
    THROUGH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the parts of dB or dC within chunks and through states, in order of programs."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    size = tl.cast(size, tl.int64)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(WITHIN):
        b_sum += tl.load(within + part * size + offsets, mask=mask, other=0.0)
    for part in tl.static_range(THROUGH):
        b_sum += tl.load(through + part * size + offsets, mask=mask, other=0.0)
    tl.store(sums + offsets, b_sum.to(sums.dtype.element_ty), mask=mask)
