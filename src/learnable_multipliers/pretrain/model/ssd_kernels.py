"""The scan of Mamba2 in Triton, chunk by chunk: the kernels that both passes run.

Notation, for one head and one chunk: a_i is the sum of dt A up to step i (kept in base-2 logs),
L_ij = exp(a_i - a_j) for j <= i, G = C B^T, S the state that enters the chunk. Then

    y_i   = sum_j G_ij L_ij dt_j x_j + exp(a_i) S^T C_i + D x_i
    S_out = exp(a_last) S + sum_j exp(a_last - a_j) dt_j B_j x_j^T

and the backward pass is its transpose. Matrices of chunk by chunk never leave the chip; states
cross it once per kernel, as (state, head_dim). Exponents are never positive. Sums over heads go
over a fixed order of programs, without atomics, so that results repeat bit for bit. Steps beyond
the length are read as zeros, with dt = 0: they neither decay a state nor write to it.
"""

# Triton's block sizes are upper case, and A and D are the letters of the paper.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decays_kernel(
    dt,
    A,
    steps,
    decays,
    dt_batch,
    dt_time,
    dt_head,
    length,
    padded,
    heads,
    CHUNK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Write dt and the sums of dt A within a chunk as (batch, heads, padded length)."""
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    time = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    batch = tl.program_id(2).to(tl.int64)
    known = head < heads
    source = batch * dt_batch + head[:, None] * dt_head + time[None, :].to(tl.int64) * dt_time
    b_dt = tl.load(dt + source, mask=known[:, None] & (time < length)[None, :], other=0.0)
    b_rate = tl.load(A + head, mask=known, other=0.0) * LOG2E
    target = (batch * heads + head[:, None]) * padded + time[None, :]
    tl.store(steps + target, b_dt, mask=known[:, None])
    tl.store(decays + target, tl.cumsum(b_dt * b_rate[:, None], 1), mask=known[:, None])


@triton.jit
def states_kernel(
    values,
    keys,
    decays,
    steps,
    states,
    values_batch,
    values_time,
    values_head,
    keys_batch,
    keys_time,
    keys_group,
    length,
    num_chunks,
    heads,
    per_group,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the state that enters every chunk, from x and B; a tile of it in float32 registers.

    In reverse, from dy and C: the gradient of the state that leaves every chunk.
    """
    tiles: tl.constexpr = HEAD_DIM // BLOCK_DIM
    dims = (tl.program_id(0) % tiles) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    cells = (tl.program_id(0) // tiles) * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    times = tl.arange(0, CHUNK)
    values += batch * values_batch + head * values_head
    keys += batch * keys_batch + (head // per_group) * keys_group
    row = (batch * heads + head) * num_chunks * CHUNK
    states += (batch * num_chunks * heads + head) * (STATE * HEAD_DIM)
    cell_offsets = cells[:, None] * HEAD_DIM + dims[None, :]
    b_state = tl.zeros((BLOCK_STATE, BLOCK_DIM), tl.float32)
    for index in range(0, num_chunks - 1):
        chunk = index
        if REVERSE:
            chunk = num_chunks - 1 - index
        where = chunk.to(tl.int64) * heads * (STATE * HEAD_DIM)
        tl.store(states + where + cell_offsets, b_state.to(states.dtype.element_ty))
        start = (chunk * CHUNK).to(tl.int64)
        inside = (start + times < length)[:, None]
        b_values = tl.load(
            values + start * values_time + times[:, None] * values_time + dims[None, :],
            mask=inside,
            other=0.0,
        )
        b_keys = tl.load(
            keys + start * keys_time + times[:, None] * keys_time + cells[None, :],
            mask=inside,
            other=0.0,
        )
        b_decay = tl.load(decays + row + start + times)
        last = tl.load(decays + row + start + CHUNK - 1)
        if REVERSE:
            b_weight = tl.exp2(b_decay)
        else:
            b_weight = tl.exp2(last - b_decay) * tl.load(steps + row + start + times)
        b_values = (b_values.to(tl.float32) * b_weight[:, None]).to(values.dtype.element_ty)
        b_state = tl.dot(
            tl.trans(b_keys), b_values, b_state * tl.exp2(last), input_precision=PRECISION
        )
    chunk = num_chunks - 1
    if REVERSE:
        chunk = 0
    where = tl.cast(chunk, tl.int64) * heads * (STATE * HEAD_DIM)
    tl.store(states + where + cell_offsets, b_state.to(states.dtype.element_ty))


@triton.jit
def rows_kernel(
    values,
    lefts,
    rights,
    states,
    decays,
    steps,
    D,
    outputs,
    values_batch,
    values_time,
    values_head,
    lefts_batch,
    lefts_time,
    lefts_group,
    rights_batch,
    rights_time,
    rights_group,
    length,
    heads,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write y for a block of steps and some heads of a group, from x, C, B and S.

    Transposed, write dx from dy, B, C and the gradient of S_out: the same sums the other way.
    """
    row_blocks: tl.constexpr = CHUNK // BLOCK_ROWS
    splits: tl.constexpr = PER_GROUP // NUM_HEADS
    pid = tl.program_id(0)
    rows = (pid % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = (pid // row_blocks) % splits
    group = (pid // (row_blocks * splits)).to(tl.int64)
    num_chunks = tl.num_programs(1)
    start = (tl.program_id(1) * CHUNK).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    cols = tl.arange(0, CHUNK)
    dims = tl.arange(0, HEAD_DIM)
    cells = tl.arange(0, STATE)
    rows_inside = (start + rows < length)[:, None]
    cols_inside = (start + cols < length)[:, None]
    lefts += batch * lefts_batch + start * lefts_time + group * lefts_group
    rights += batch * rights_batch + start * rights_time + group * rights_group
    b_left = tl.load(
        lefts + rows[:, None] * lefts_time + cells[None, :], mask=rows_inside, other=0.0
    )
    b_right = tl.load(
        rights + cols[:, None] * rights_time + cells[None, :], mask=cols_inside, other=0.0
    )
    b_scores = tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION)
    if TRANSPOSED:
        b_scores = tl.where(rows[:, None] <= cols[None, :], b_scores, 0.0)
    else:
        b_scores = tl.where(rows[:, None] >= cols[None, :], b_scores, 0.0)
    values += batch * values_batch + start * values_time
    outputs += (batch * length + start) * heads * HEAD_DIM
    states += (batch * num_chunks + tl.program_id(1)) * heads * (STATE * HEAD_DIM)
    first = group * PER_GROUP + split * NUM_HEADS
    for index in range(0, NUM_HEADS):
        head = first + index
        row = (batch * heads + head) * num_chunks * CHUNK + start
        value = values + head * values_head
        b_state = tl.load(
            states + head * (STATE * HEAD_DIM) + cells[:, None] * HEAD_DIM + dims[None, :]
        )
        b_values = tl.load(
            value + cols[:, None] * values_time + dims[None, :], mask=cols_inside, other=0.0
        )
        b_row_decay = tl.load(decays + row + rows)
        b_col_decay = tl.load(decays + row + cols)
        # Where the difference is positive the score is 0.
        if TRANSPOSED:
            last = tl.load(decays + row + CHUNK - 1)
            b_reach = tl.exp2(last - b_row_decay)
            b_mix = b_scores * tl.exp2(tl.minimum(b_col_decay[None, :] - b_row_decay[:, None], 0.0))
        else:
            b_reach = tl.exp2(b_row_decay)
            b_mix = b_scores * tl.exp2(tl.minimum(b_row_decay[:, None] - b_col_decay[None, :], 0.0))
            b_mix = b_mix * tl.load(steps + row + cols)[None, :]
        b_out = tl.dot(b_left, b_state, input_precision=PRECISION) * b_reach[:, None]
        b_out = tl.dot(b_mix.to(b_values.dtype), b_values, b_out, input_precision=PRECISION)
        if TRANSPOSED:
            b_out = b_out * tl.load(steps + row + rows)[:, None]
        b_same = tl.load(
            value + rows[:, None] * values_time + dims[None, :], mask=rows_inside, other=0.0
        )
        b_out += tl.load(D + head) * b_same.to(tl.float32)
        tl.store(
            outputs + rows[:, None] * (heads * HEAD_DIM) + head * HEAD_DIM + dims[None, :],
            b_out.to(outputs.dtype.element_ty),
            mask=rows_inside,
        )
