"""Launches the Triton kernels of the scan, as operators that torch.compile does not look into.

The backward pass keeps the inputs and the state that enters each chunk, in the dtype of x: the
recurrence of states runs in float32 registers, and whatever reads a state multiplies it on tensor
cores in that dtype, so a wider copy would be rounded all the same. All else is computed again.
"""

# A, B, C and D are the letters of the paper.
# ruff: noqa: N803, N806

from __future__ import annotations

import copy
from typing import Any

import torch
import triton
from torch import Tensor

from learnable_multipliers.pretrain.model.ssd_gradient_kernels import (
    keys_kernel,
    rates_kernel,
    scores_kernel,
    sums_kernel,
)
from learnable_multipliers.pretrain.model.ssd_kernels import (
    decays_kernel,
    rows_kernel,
    states_kernel,
)

_STATES = {
    2: {"block_dim": 64, "block_state": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    4: {"block_dim": 32, "block_state": 32, "num_warps": 4, "num_stages": 1},
}
_ROWS = {
    2: {"block_rows": 64, "heads": 12, "num_warps": 4, "num_stages": 2},
    4: {"block_rows": 32, "heads": 6, "num_warps": 8, "num_stages": 1},
}
SETTINGS: dict[str, dict[int, dict[str, int]]] = {
    "states": _STATES,
    "state_grads": copy.deepcopy(_STATES),
    "outputs": _ROWS,
    "inputs": copy.deepcopy(_ROWS),
    "scores": {
        2: {"block_cols": 64, "heads": 24, "num_warps": 4, "num_stages": 2},
        4: {"block_cols": 32, "heads": 24, "num_warps": 8, "num_stages": 1},
    },
    "queries": {
        2: {"block_state": 64, "heads": 12, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
        4: {"block_state": 32, "heads": 24, "num_warps": 8, "num_stages": 1},
    },
    "keys": {
        2: {"block_state": 64, "heads": 24, "num_warps": 8, "num_stages": 2},
        4: {"block_state": 32, "heads": 24, "num_warps": 8, "num_stages": 1},
    },
}
"""How each kernel runs, by bytes of a number of x: tiles, most heads in one program, options.

Chosen for sm_90 by registers and shared memory of the compiled kernels, with next to no spills
in 16 bits at head_dim 64, state 128 and chunk 128. `maxnreg` bounds registers per thread.
"""

_OPTIONS = ("num_warps", "num_stages", "maxnreg")
_BLOCK_HEADS = 8
_BLOCK_SUM = 1024


@torch.library.custom_op("learnable_multipliers::ssd_scan", mutates_args=())
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return y and the states that enter the chunks, (batch, chunks, heads, state, head_dim).

    dt, A and D are float32; x, B and C share a dtype and may be strided views.
    """
    x, B, C = (_readable(tensor) for tensor in (x, B, C))
    steps, decays = _decays(dt, A, chunk_size)
    states = _states("states", x, B, steps, decays, chunk_size)
    return _rows("outputs", x, C, B, states, steps, decays, D, chunk_size), states


@ssd_scan.register_fake
def _(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    batch, length, heads, head_dim = x.shape
    chunks = (length + chunk_size - 1) // chunk_size
    return x.new_empty(x.shape), x.new_empty(batch, chunks, heads, B.shape[-1], head_dim)


@torch.library.custom_op("learnable_multipliers::ssd_scan_backward", mutates_args=())
def ssd_scan_backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    states: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and D."""
    dy, x, B, C = (_readable(tensor) for tensor in (dy, x, B, C))
    steps, decays = _decays(dt, A, chunk_size)
    state_grads = _states("state_grads", dy, C, steps, decays, chunk_size)
    dx = _rows("inputs", dy, B, C, state_grads, steps, decays, D, chunk_size)
    return dx, *_key_grads(dy, x, A, B, C, states, state_grads, steps, decays, chunk_size)


@ssd_scan_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    states: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # What the kernels write is contiguous, whatever the strides of the inputs.
    dx, ddt, dB, dC = (t.new_empty(t.shape) for t in (x, dt, B, C))
    return dx, ddt, A.new_empty(A.shape), dB, dC, D.new_empty(D.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    return (*ssd_scan_backward(dy, *ctx.saved_tensors, ctx.chunk_size), None)


ssd_scan.register_autograd(_backward, setup_context=_keep)


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous; strides of the others are the kernels' own."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


def _decays(dt: Tensor, A: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return dt and its decays' running base-2 logs, (batch, heads, chunks * chunk)."""
    batch, length, heads = dt.shape
    chunks = triton.cdiv(length, chunk)
    steps = dt.new_empty(batch, heads, chunks * chunk)
    decays = torch.empty_like(steps)
    grid = (triton.cdiv(heads, _BLOCK_HEADS), chunks, batch)
    decays_kernel[grid](
        dt,
        A,
        steps,
        decays,
        *dt.stride(),
        length,
        chunks * chunk,
        heads,
        CHUNK=chunk,
        BLOCK_HEADS=_BLOCK_HEADS,
    )
    return steps, decays


def _states(
    name: str, values: Tensor, keys: Tensor, steps: Tensor, decays: Tensor, chunk: int
) -> Tensor:
    batch, length, heads, head_dim = values.shape
    groups, state = keys.shape[2:]
    setting = SETTINGS[name][values.element_size()]
    chunks = triton.cdiv(length, chunk)
    block_dim = min(setting["block_dim"], head_dim)
    block_state = min(setting["block_state"], state)
    states = values.new_empty(batch, chunks, heads, state, head_dim)
    grid = ((head_dim // block_dim) * (state // block_state), heads, batch)
    states_kernel[grid](
        values,
        keys,
        decays,
        steps,
        states,
        *values.stride()[:3],
        *keys.stride()[:3],
        length,
        chunks,
        heads,
        heads // groups,
        CHUNK=chunk,
        HEAD_DIM=head_dim,
        STATE=state,
        BLOCK_DIM=block_dim,
        BLOCK_STATE=block_state,
        REVERSE=name == "state_grads",
        PRECISION=_precision(values),
        **_options(setting),
    )
    return states


def _rows(
    name: str,
    values: Tensor,
    lefts: Tensor,
    rights: Tensor,
    states: Tensor,
    steps: Tensor,
    decays: Tensor,
    D: Tensor,
    chunk: int,
) -> Tensor:
    batch, length, heads, head_dim = values.shape
    groups, state = lefts.shape[2:]
    setting = SETTINGS[name][values.element_size()]
    block_rows = min(setting["block_rows"], chunk)
    num_heads = _most_heads(heads // groups, setting["heads"])
    outputs = values.new_empty(values.shape)
    grid = ((chunk // block_rows) * (heads // num_heads), triton.cdiv(length, chunk), batch)
    rows_kernel[grid](
        values,
        lefts,
        rights,
        states,
        decays,
        steps,
        D,
        outputs,
        *values.stride()[:3],
        *lefts.stride()[:3],
        *rights.stride()[:3],
        length,
        heads,
        CHUNK=chunk,
        HEAD_DIM=head_dim,
        STATE=state,
        BLOCK_ROWS=block_rows,
        NUM_HEADS=num_heads,
        PER_GROUP=heads // groups,
        TRANSPOSED=name == "inputs",
        PRECISION=_precision(values),
        **_options(setting),
    )
    return outputs


def _key_grads(
    dy: Tensor,
    x: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    state_grads: Tensor,
    steps: Tensor,
    decays: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of dt, A, B, C and D."""
    # Each program writes its part of a sum, and another kernel adds the parts in order.
    mixed, direct, skips, *partials = _scores(dy, x, B, C, steps, decays, chunk)
    both = states, state_grads, steps, decays
    reads, _, c_partials = _keys("queries", dy, C, *both, chunk)
    writes, crossings, b_partials = _keys("keys", x, B, *both, chunk)
    ddt, rates = _rates(A, steps, mixed, direct, reads, writes, crossings, x.shape[1], chunk)
    dB, dC = _summed(partials[0], b_partials, B.dtype), _summed(partials[1], c_partials, C.dtype)
    return ddt, rates.sum((0, 1)), dB, dC, skips.sum((0, 1, 2))


def _scores(
    dy: Tensor, x: Tensor, B: Tensor, C: Tensor, steps: Tensor, decays: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """Return `mixed`, `direct`, `skips` and the parts of dB and dC within chunks."""
    batch, length, heads, head_dim = x.shape
    groups, state = B.shape[2:]
    setting = SETTINGS["scores"][x.element_size()]
    chunks = triton.cdiv(length, chunk)
    blocks = chunk // min(setting["block_cols"], chunk)
    num_heads = _most_heads(heads // groups, setting["heads"])
    splits = heads // groups // num_heads
    mixed, direct = steps.new_empty(blocks, *steps.shape), torch.empty_like(steps)
    skips = steps.new_empty(blocks, batch, chunks, heads)
    b_partials = steps.new_empty(splits, *B.shape)
    c_partials = steps.new_empty(splits * blocks, *C.shape)
    scores_kernel[(groups * splits * blocks, chunks, batch)](
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
        *x.stride()[:3],
        *dy.stride()[:3],
        *B.stride()[:3],
        *C.stride()[:3],
        length,
        heads,
        groups,
        CHUNK=chunk,
        HEAD_DIM=head_dim,
        STATE=state,
        BLOCK_COLS=chunk // blocks,
        NUM_HEADS=num_heads,
        PER_GROUP=heads // groups,
        PRECISION=_precision(x),
        **_options(setting),
    )
    return mixed, direct, skips, b_partials, c_partials


def _keys(
    name: str,
    values: Tensor,
    keys: Tensor,
    states: Tensor,
    state_grads: Tensor,
    steps: Tensor,
    decays: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `reached`, `crossings` (of keys alone) and the parts of dC or dB through states."""
    batch, length, heads, head_dim = values.shape
    groups, state = keys.shape[2:]
    setting = SETTINGS[name][values.element_size()]
    chunks = triton.cdiv(length, chunk)
    blocks = state // min(setting["block_state"], state)
    num_heads = _most_heads(heads // groups, setting["heads"])
    reached = steps.new_empty(blocks, *steps.shape)
    crossings = steps.new_empty(blocks, batch, chunks, heads)
    partials = steps.new_empty(heads // groups // num_heads, *keys.shape)
    keys_kernel[(heads // num_heads * blocks, chunks, batch)](
        values,
        keys,
        states,
        state_grads,
        decays,
        steps,
        reached,
        crossings,
        partials,
        *values.stride()[:3],
        *keys.stride()[:3],
        length,
        heads,
        groups,
        CHUNK=chunk,
        HEAD_DIM=head_dim,
        STATE=state,
        BLOCK_STATE=state // blocks,
        NUM_HEADS=num_heads,
        PER_GROUP=heads // groups,
        QUERIES=name == "queries",
        PRECISION=_precision(values),
        **_options(setting),
    )
    return reached, crossings, partials


def _rates(
    A: Tensor,
    steps: Tensor,
    mixed: Tensor,
    direct: Tensor,
    reads: Tensor,
    writes: Tensor,
    crossings: Tensor,
    length: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of dt, and that of A by batch and chunk."""
    batch, heads, padded = steps.shape
    chunks = padded // chunk
    ddt = steps.new_empty(batch, length, heads)
    rates = steps.new_empty(batch, chunks, heads)
    rates_kernel[(triton.cdiv(heads, _BLOCK_HEADS), chunks, batch)](
        A,
        steps,
        mixed,
        direct,
        reads,
        writes,
        crossings,
        ddt,
        rates,
        length,
        padded,
        heads,
        CHUNK=chunk,
        MIXED_PARTS=mixed.shape[0],
        READS_PARTS=reads.shape[0],
        WRITES_PARTS=writes.shape[0],
        BLOCK_HEADS=_BLOCK_HEADS,
    )
    return ddt, rates


def _summed(within: Tensor, through: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of two lists of parts."""
    sums = within.new_empty(within.shape[1:], dtype=dtype)
    sums_kernel[(triton.cdiv(sums.numel(), _BLOCK_SUM),)](
        within,
        through,
        sums,
        sums.numel(),
        WITHIN=within.shape[0],
        THROUGH=through.shape[0],
        BLOCK=_BLOCK_SUM,
    )
    return sums


def _options(setting: dict[str, int]) -> dict[str, int]:
    """Return what Triton itself is told."""
    return {name: setting[name] for name in _OPTIONS if name in setting}


def _most_heads(per_group: int, limit: int) -> int:
    """Return the largest number of heads up to a limit that divides a group evenly."""
    return max(n for n in range(1, min(limit, per_group) + 1) if per_group % n == 0)
