"""The scan of Mamba2 in Triton, chunk by chunk.

Notation, for one head and one chunk: a_i is the sum of dt A up to step i (kept in base-2 logs),
L_ij = exp(a_i - a_j) for j <= i, G = C B^T, S the state that enters the chunk. Then

    y_i   = sum_j G_ij L_ij dt_j x_j + exp(a_i) S^T C_i + D x_i
    S_out = exp(a_last) S + sum_j exp(a_last - a_j) dt_j B_j x_j^T

and the backward pass is its transpose. Matrices of chunk by chunk never leave the chip; states
cross it once per kernel, as (state, head_dim). Exponents are never positive. Sums over heads
use a fixed order of programs, without atomics, so results are deterministic. Steps beyond
the length are read as zeros, with dt = 0: they neither decay a state nor write to it.

A program with a single head still runs a loop, whose length is the argument `one`: without a loop,
the ptxas of CUDA 12.8 in Triton 3.6 computes addresses of operands in shared memory from an
uninitialized register.
"""

# Triton's block sizes are upper case, and A, B, C and D are the letters of the paper.
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(matrix, rows, stride, cols, inside):
    """Load a tile of a matrix, zeros for rows that are not inside."""
    places = matrix + rows[:, None] * stride + cols[None, :]
    return tl.load(places, mask=inside[:, None], other=0.0)


@triton.jit
def _store(matrix, rows, stride, cols, inside, tile):
    """Store the rows of a tile that are inside."""
    places = matrix + rows[:, None] * stride + cols[None, :]
    tl.store(places, tile.to(matrix.dtype.element_ty), mask=inside[:, None])


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
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    PER_GROUP: tl.constexpr,
    REVERSE: tl.constexpr,
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
    keys += batch * keys_batch + (head // PER_GROUP) * keys_group
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
        inside = start + times < length
        b_values = _load(values + start * values_time, times, values_time, dims, inside)
        b_keys = _load(keys + start * keys_time, times, keys_time, cells, inside)
        b_decay = tl.load(decays + row + start + times)
        last = tl.load(decays + row + start + CHUNK - 1)
        if REVERSE:
            b_weight = tl.exp2(b_decay)
        else:
            b_weight = tl.exp2(last - b_decay) * tl.load(steps + row + start + times)
        b_values = (b_values.to(tl.float32) * b_weight[:, None]).to(values.dtype.element_ty)
        b_state = tl.dot(
            tl.trans(b_keys), b_values, b_state * tl.exp2(last), input_precision="ieee"
        )
    chunk = num_chunks - 1
    if REVERSE:
        chunk = 0
    where = tl.cast(chunk, tl.int64) * heads * (STATE * HEAD_DIM)
    tl.store(states + where + cell_offsets, b_state.to(states.dtype.element_ty))


@triton.jit(do_not_specialize=["one"])
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
    one,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Write y for a block of steps and some heads of a group, from x, C, B and S.

    Transposed, write dx from dy, B, C and the gradient of S_out: the same sums the other way.
    """
    row_blocks: tl.constexpr = CHUNK // BLOCK_ROWS
    splits: tl.constexpr = PER_GROUP // NUM_HEADS
    dim_blocks: tl.constexpr = HEAD_DIM // BLOCK_DIM
    pid = tl.program_id(0)
    rows = (pid % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = (pid // row_blocks) % splits
    group = (pid // (row_blocks * splits)).to(tl.int64)
    num_chunks = tl.num_programs(1)
    start = (tl.program_id(1) * CHUNK).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    cols = tl.arange(0, CHUNK)
    cells = tl.arange(0, STATE)
    rows_inside = start + rows < length
    cols_inside = start + cols < length
    lefts += batch * lefts_batch + start * lefts_time + group * lefts_group
    rights += batch * rights_batch + start * rights_time + group * rights_group
    b_left = _load(lefts, rows, lefts_time, cells, rows_inside)
    b_right = _load(rights, cols, rights_time, cells, cols_inside)
    b_scores = tl.dot(b_left, tl.trans(b_right), input_precision="ieee")
    if TRANSPOSED:
        b_scores = tl.where(rows[:, None] <= cols[None, :], b_scores, 0.0)
    else:
        b_scores = tl.where(rows[:, None] >= cols[None, :], b_scores, 0.0)
    values += batch * values_batch + start * values_time
    outputs += (batch * length + start) * heads * HEAD_DIM
    states += (batch * num_chunks + tl.program_id(1)) * heads * (STATE * HEAD_DIM)
    first = group * PER_GROUP + split * NUM_HEADS
    passes: tl.constexpr = NUM_HEADS * dim_blocks
    for index in range(0, one if passes == 1 else passes):
        head = first + index // dim_blocks
        dims = (index % dim_blocks) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
        row = (batch * heads + head) * num_chunks * CHUNK + start
        value = values + head * values_head
        b_state = tl.load(
            states + head * (STATE * HEAD_DIM) + cells[:, None] * HEAD_DIM + dims[None, :]
        )
        b_values = _load(value, cols, values_time, dims, cols_inside)
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
        b_out = tl.dot(b_left, b_state, input_precision="ieee") * b_reach[:, None]
        b_out = tl.dot(b_mix.to(b_values.dtype), b_values, b_out, input_precision="ieee")
        if TRANSPOSED:
            b_out = b_out * tl.load(steps + row + rows)[:, None]
        b_same = _load(value, rows, values_time, dims, rows_inside)
        b_out += tl.load(D + head) * b_same.to(tl.float32)
        _store(outputs + head * HEAD_DIM, rows, heads * HEAD_DIM, dims, rows_inside, b_out)


# -- the backward pass alone ----------------------------------------------------------------------


@triton.jit(do_not_specialize=["one"])
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
    one,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
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
    rows_inside = start + rows < length
    cols_inside = start + cols < length
    x += batch * x_batch + start * x_time
    dy += batch * dy_batch + start * dy_time
    B += batch * b_batch + start * b_time + group * b_group
    C += batch * c_batch + start * c_time + group * c_group
    mixed += col_block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks * CHUNK)
    skips += col_block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks)
    b_scores = tl.zeros((CHUNK, BLOCK_COLS), tl.float32)
    for block in tl.static_range(STATE // BLOCK_STATE):
        cells = block * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
        b_B = _load(B, cols, b_time, cells, cols_inside)
        b_C = _load(C, rows, c_time, cells, rows_inside)
        b_scores = tl.dot(b_C, tl.trans(b_B), b_scores, input_precision="ieee")
    b_scores = tl.where(rows[:, None] >= cols[None, :], b_scores, 0.0)
    b_grads = tl.zeros((CHUNK, BLOCK_COLS), tl.float32)
    for index in range(0, one if NUM_HEADS == 1 else NUM_HEADS):
        head = group * PER_GROUP + split * NUM_HEADS + index
        row = (batch * heads + head) * num_chunks * CHUNK + start
        b_dy = _load(dy + head * dy_head, rows, dy_time, dims, rows_inside)
        b_x = _load(x + head * x_head, cols, x_time, dims, cols_inside)
        b_tile = tl.dot(b_dy, tl.trans(b_x), input_precision="ieee")
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
    b_grads = tl.where(rows[:, None] >= cols[None, :], b_grads, 0.0).to(B.dtype.element_ty)
    size = tl.num_programs(2).to(tl.int64) * length * groups * STATE
    here = ((batch * length + start) * groups + group) * STATE
    b_partials += split * size + here
    c_partials += (split * col_blocks + col_block) * size + here
    for block in tl.static_range(STATE // BLOCK_STATE):
        cells = block * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
        b_B = _load(B, cols, b_time, cells, cols_inside)
        b_sum = tl.dot(b_grads, b_B, input_precision="ieee")
        _store(c_partials, rows, groups * STATE, cells, rows_inside, b_sum)
        b_C = _load(C, rows, c_time, cells, rows_inside)
        b_sum = tl.dot(tl.trans(b_grads), b_C, input_precision="ieee")
        _store(b_partials, cols, groups * STATE, cells, cols_inside, b_sum)


@triton.jit(do_not_specialize=["one"])
def bc_grad_kernel(
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
    one,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    FOR_C: tl.constexpr,
):
    """Sum the part of dC (FOR_C, from dy and S) or dB (from x and dS_out) over some heads.

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
    inside = start + rows < length
    values += batch * values_batch + start * values_time
    keys += batch * keys_batch + start * keys_time + group * keys_group
    state_offsets = cells[:, None] * HEAD_DIM + dims[None, :]
    b_keys = _load(keys, rows, keys_time, cells, inside)
    reached += block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks * CHUNK)
    crossings += block * (tl.num_programs(2).to(tl.int64) * heads * num_chunks)
    b_sum = tl.zeros((CHUNK, BLOCK_STATE), tl.float32)
    for index in range(0, one if NUM_HEADS == 1 else NUM_HEADS):
        head = group * PER_GROUP + split * NUM_HEADS + index
        row = (batch * heads + head) * num_chunks * CHUNK + start
        here = ((batch * num_chunks + chunk) * heads + head) * (STATE * HEAD_DIM)
        b_values = _load(values + head * values_head, rows, values_time, dims, inside)
        b_decay = tl.load(decays + row + rows)
        b_state = tl.load(states + here + state_offsets)
        if FOR_C:
            b_part = tl.dot(b_values, tl.trans(b_state), input_precision="ieee")
            b_part = b_part * tl.exp2(b_decay)[:, None]
            b_sum += b_part
        else:
            b_grad = tl.load(state_grads + here + state_offsets)
            last = tl.load(decays + row + CHUNK - 1)
            b_cross = tl.sum(b_grad.to(tl.float32) * b_state.to(tl.float32), 1)
            crossing = tl.sum(b_cross, 0) * tl.exp2(last)
            tl.store(crossings + (batch * num_chunks + chunk) * heads + head, crossing)
            b_part = tl.dot(b_values, tl.trans(b_grad), input_precision="ieee")
            b_part = b_part * tl.exp2(last - b_decay)[:, None]
            b_sum += b_part * tl.load(steps + row + rows)[:, None]
        tl.store(reached + row + rows, tl.sum(b_part * b_keys.to(tl.float32), 1))
    size = tl.num_programs(2).to(tl.int64) * length * groups * STATE
    partials += split * size + ((batch * length + start) * groups + group) * STATE
    _store(partials, rows, groups * STATE, cells, inside, b_sum)


@triton.jit
def dt_grad_kernel(
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
def reduce_parts_kernel(
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
