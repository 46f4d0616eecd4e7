"""Launches the Triton kernels of the scan, as operators that are opaque to torch.compile.

The backward pass saves the inputs and the state that enters each chunk, in the dtype of x: the
recurrence of states runs in float32 registers, and every product with a state runs on tensor cores
in that dtype, so a wider copy would be rounded anyway. Everything else is recomputed.
"""

# A, B, C and D are the letters of the paper.
# ruff: noqa: N803, N806

from __future__ import annotations

import copy
from typing import Any

import torch
import triton
from torch import Tensor

from learnable_multipliers.pretrain.model.ssd_kernels import (
    bc_grad_kernel,
    decays_kernel,
    dt_grad_kernel,
    reduce_parts_kernel,
    rows_kernel,
    scores_kernel,
    states_kernel,
)
from learnable_multipliers.pretrain.model.triton_support import last_dim_contiguous

_STATES = {
    2: {"BLOCK_DIM": 64, "BLOCK_STATE": 128, "num_warps": 4, "num_stages": 2},
    4: {"BLOCK_DIM": 32, "BLOCK_STATE": 32, "num_warps": 4, "num_stages": 1},
}
_ROWS = {
    2: {"BLOCK_ROWS": 128, "BLOCK_DIM": 64, "NUM_HEADS": 24, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_ROWS": 32, "BLOCK_DIM": 64, "NUM_HEADS": 6, "num_warps": 8, "num_stages": 1},
}
SETTINGS: dict[str, dict[int, dict[str, int]]] = {
    "states": _STATES,
    "state_grads": copy.deepcopy(_STATES),
    "outputs": _ROWS,
    "inputs": copy.deepcopy(_ROWS),
    "scores": {
        2: {"BLOCK_COLS": 64, "BLOCK_STATE": 64, "NUM_HEADS": 24, "num_warps": 4, "num_stages": 2},
        4: {"BLOCK_COLS": 32, "BLOCK_STATE": 32, "NUM_HEADS": 24, "num_warps": 8, "num_stages": 1},
    },
    "c_grads": {
        2: {"BLOCK_STATE": 64, "NUM_HEADS": 24, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
        4: {"BLOCK_STATE": 32, "NUM_HEADS": 24, "num_warps": 8, "num_stages": 1},
    },
    "b_grads": {
        2: {"BLOCK_STATE": 128, "NUM_HEADS": 24, "num_warps": 8, "num_stages": 3},
        4: {"BLOCK_STATE": 32, "NUM_HEADS": 24, "num_warps": 8, "num_stages": 1},
    },
}
"""How each kernel runs, by bytes of a number of x: largest tiles, most heads, Triton's options.

In 16 bits the fastest that `benchmarks/ssd.py` found on an H200 for heads of 64 in chunks of
128, with 24 heads and a state of 128 and with 48 and 256. `scores` spills some registers, which is
faster than more warps. `maxnreg` bounds registers per thread.
"""

# Tile of a setting -> the dimension that it divides.
_WHOLES = {
    "BLOCK_DIM": "HEAD_DIM",
    "BLOCK_STATE": "STATE",
    "BLOCK_ROWS": "CHUNK",
    "BLOCK_COLS": "CHUNK",
    "NUM_HEADS": "PER_GROUP",
}
_BLOCK_HEADS = 8
_BLOCK_SUM = 1024


@torch.library.custom_op("learnable_multipliers::ssd_scan", mutates_args=())
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return y and the states that enter the chunks, (batch, chunks, heads, state, head_dim).

    dt, A and D are float32; x, B and C share a dtype and may be strided views.
    """
    x, B, C = (last_dim_contiguous(tensor) for tensor in (x, B, C))
    scan = Scan(x, dt, A, B, chunk_size)
    states = scan.states("states", x, B)
    return scan.rows("outputs", x, C, B, states, D), states


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
    dy, x, B, C = (last_dim_contiguous(tensor) for tensor in (dy, x, B, C))
    scan = Scan(x, dt, A, B, chunk_size)
    state_grads = scan.states("state_grads", dy, C)
    dx = scan.rows("inputs", dy, B, C, state_grads, D)
    # Each program writes its part of a sum; another kernel adds the parts in a fixed order.
    mixed, direct, skips, b_within, c_within = scan.scores(x, dy, B, C)
    reads, _, c_through = scan.bc_grads("c_grads", dy, C, states, state_grads)
    writes, crossings, b_through = scan.bc_grads("b_grads", x, B, states, state_grads)
    ddt, rates = scan.dt_grads(A, mixed, direct, reads, writes, crossings)
    dB, dC = add_parts(b_within, b_through, B.dtype), add_parts(c_within, c_through, C.dtype)
    return dx, ddt, rates.sum((0, 1)), dB, dC, skips.sum((0, 1, 2))


@ssd_scan_backward.register_fake
def _(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    # The kernels write contiguous tensors for any strides of the inputs.
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:6])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    return (*ssd_scan_backward(dy, *ctx.saved_tensors, ctx.chunk_size), None)


ssd_scan.register_autograd(_backward, setup_context=_setup_context)


class Scan:
    """The launches of one scan: a method for each kernel, and the tensors they share."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, chunk: int):
        self.batch, self.length, self.heads, head_dim = x.shape
        self.groups, state = B.shape[2:]
        self.chunk, self.chunks = chunk, triton.cdiv(self.length, chunk)
        self.element_size = x.element_size()
        per_group = self.heads // self.groups
        self.constants = {"HEAD_DIM": head_dim, "STATE": state, "PER_GROUP": per_group}
        self.by_heads = {"CHUNK": chunk, "BLOCK_HEADS": _BLOCK_HEADS}
        # dt, and the running base-2 logs of its decays.
        self.steps = dt.new_empty(self.batch, self.heads, self.chunks * chunk)
        self.decays = torch.empty_like(self.steps)
        tensors = dt, A, self.steps, self.decays
        sizes = self.length, self.chunks * chunk, self.heads
        grid = self._grid(triton.cdiv(self.heads, _BLOCK_HEADS))
        decays_kernel[grid](*tensors, *dt.stride(), *sizes, **self.by_heads)

    def states(self, name: str, values: Tensor, keys: Tensor) -> Tensor:
        """Return the states that enter the chunks, or the gradients of those that leave them."""
        options = self._options(name)
        head_dim, state = options["HEAD_DIM"], options["STATE"]
        states = values.new_empty(self.batch, self.chunks, self.heads, state, head_dim)
        tiles = (head_dim // options["BLOCK_DIM"]) * (state // options["BLOCK_STATE"])
        tensors = values, keys, self.decays, self.steps, states
        sizes = self.length, self.chunks, self.heads
        states_kernel[(tiles, self.heads, self.batch)](
            *tensors, *_strides(values, keys), *sizes, REVERSE=name == "state_grads", **options
        )
        return states

    def rows(
        self, name: str, values: Tensor, lefts: Tensor, rights: Tensor, states: Tensor, D: Tensor
    ) -> Tensor:
        """Return y, or the gradient of x."""
        options = self._options(name)
        outputs = values.new_empty(values.shape)
        blocks = self.chunk // options["BLOCK_ROWS"]
        tensors = values, lefts, rights, states, self.decays, self.steps, D, outputs
        strides = _strides(values, lefts, rights)
        rows_kernel[self._grid(blocks * (self.heads // options["NUM_HEADS"]))](
            *tensors, *strides, self.length, self.heads, 1, TRANSPOSED=name == "inputs", **options
        )
        return outputs

    def scores(self, x: Tensor, dy: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
        """Return `mixed`, `direct`, `skips` and the parts of dB and dC within chunks."""
        options = self._options("scores")
        blocks = self.chunk // options["BLOCK_COLS"]
        splits = options["PER_GROUP"] // options["NUM_HEADS"]
        new = self.steps.new_empty
        results = (
            new(blocks, *self.steps.shape),
            new(self.steps.shape),
            new(blocks, self.batch, self.chunks, self.heads),
            new(splits, *B.shape),
            new(splits * blocks, *C.shape),
        )
        tensors = x, dy, B, C, self.decays, self.steps, *results
        sizes = self.length, self.heads, self.groups, 1
        scores_kernel[self._grid(self.groups * splits * blocks)](
            *tensors, *_strides(x, dy, B, C), *sizes, **options
        )
        return results

    def bc_grads(
        self, name: str, values: Tensor, keys: Tensor, states: Tensor, state_grads: Tensor
    ) -> tuple[Tensor, ...]:
        """Return `reached`, `crossings` (only for B) and the parts of dC or dB through states."""
        options = self._options(name)
        blocks = options["STATE"] // options["BLOCK_STATE"]
        splits = options["PER_GROUP"] // options["NUM_HEADS"]
        new = self.steps.new_empty
        results = (
            new(blocks, *self.steps.shape),
            new(blocks, self.batch, self.chunks, self.heads),
            new(splits, *keys.shape),
        )
        tensors = values, keys, states, state_grads, self.decays, self.steps, *results
        sizes = self.length, self.heads, self.groups, 1
        bc_grad_kernel[self._grid(self.groups * splits * blocks)](
            *tensors, *_strides(values, keys), *sizes, FOR_C=name == "c_grads", **options
        )
        return results

    def dt_grads(self, A: Tensor, *sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of dt, and that of A by batch and chunk.

        `sums` are `mixed`, `direct`, `reached` of C and of B, and `crossings`.
        """
        mixed, _, reads, writes, _ = sums
        ddt = self.steps.new_empty(self.batch, self.length, self.heads)
        rates = self.steps.new_empty(self.batch, self.chunks, self.heads)
        tensors = A, self.steps, *sums, ddt, rates
        sizes = self.length, self.chunks * self.chunk, self.heads
        dt_grad_kernel[self._grid(triton.cdiv(self.heads, _BLOCK_HEADS))](
            *tensors,
            *sizes,
            MIXED_PARTS=len(mixed),
            READS_PARTS=len(reads),
            WRITES_PARTS=len(writes),
            **self.by_heads,
        )
        return ddt, rates

    def _grid(self, programs: int) -> tuple[int, int, int]:
        return programs, self.chunks, self.batch

    def _options(self, name: str) -> dict[str, int]:
        """Return a kernel's constants and options, with tiles that divide their dimensions."""
        options = self.constants | {"CHUNK": self.chunk} | SETTINGS[name][self.element_size]
        for tile, whole in _WHOLES.items():
            if tile in options:
                most = min(options[tile], options[whole])
                options[tile] = next(n for n in range(most, 0, -1) if options[whole] % n == 0)
        return options


def add_parts(within: Tensor, through: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over two stacks of parts."""
    sums = within.new_empty(within.shape[1:], dtype=dtype)
    size = sums.numel()
    parts = {"WITHIN": len(within), "THROUGH": len(through)}
    reduce_parts_kernel[(triton.cdiv(size, _BLOCK_SUM),)](
        within, through, sums, size, BLOCK=_BLOCK_SUM, **parts
    )
    return sums


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, time and heads (or groups) of all tensors."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]
