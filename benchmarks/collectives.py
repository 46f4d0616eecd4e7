"""Collectives of one train step, counted on gloo ranks and predicted by formula.

    python benchmarks/collectives.py --model tiny

Prints a line for each layout, optimizer and kind of collective: how many, the bytes of their
buffers on the first rank, and the same from `pretrain/scaling`. Exits with 1 where a rank differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.distributed import Axes, init_world
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.model.parallelize import parallelize
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.scaling.exchange import muon_work
from learnable_multipliers.pretrain.scaling.traffic import (
    fsdp_backward,
    fsdp_forward,
    packed_sums,
    tensor_backward,
    tensor_forward,
)
from learnable_multipliers.pretrain.scaling.weights import weights_of

LAYOUTS = {
    2: {"FSDP2": Axes(1, 2, 1), "TP": Axes(1, 1, 2)},
    4: {"FSDP2": Axes(1, 4, 1), "HSDP": Axes(2, 2, 1), "FSDP2 x TP": Axes(1, 2, 2)},
}
OPTIMIZERS = {"adamw": lrm.AdamW, "muon": lrm.Muon}
KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
}
SEQUENCES, LENGTH = 2, 64
_FLOAT = 4
Totals = dict[str, tuple[int, int]]
"""Number of collectives and bytes of their buffers, by kind."""


class Counting(TorchDispatchMode):
    """Counts collectives and the bytes of their buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and function._opname in KINDS:
            kind = KINDS[function._opname]
            self.number[kind] += 1
            self.bytes[kind] += sum(t.nbytes for t in tree_leaves(args) if torch.is_tensor(t))
        return function(*args, **(kwargs or {}))


def counted(preset: str, axes: Axes, optimizer: str, placement: Any) -> Totals:
    """Take two steps; return the collectives of the second."""
    world = init_world(**axes._asdict(), timeout=120, device_type="cpu")
    model = build(PRESETS[preset])
    shared = parallelize(model, world)
    made = OPTIMIZERS[optimizer].from_model(model, placement, lr=1e-3, max_grad_norm=1.0)
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, LENGTH + 1))
    counting = Counting()
    for _ in range(2):
        counting = Counting()
        with counting:
            shared.loss(tokens, 0.0).total.backward()
            made.step()
        made.zero_grad()
    world.destroy()
    return {kind: (n, counting.bytes[kind]) for kind, n in counting.number.items()}


def predicted(preset: str, axes: Axes, optimizer: str, placement: Any, rank: int) -> Totals:
    """Return the same from shapes."""
    config = PRESETS[preset]
    with torch.device("meta"):
        model = HybridLM(config)
    weights = weights_of(model, lrm.plan(model, placement))
    tokens, tensor_rank = SEQUENCES * LENGTH, rank % axes.tensor
    number: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for one in (
        *fsdp_forward(weights, axes, tensor_rank),
        *fsdp_backward(weights, axes, tensor_rank),
        *tensor_forward(config, axes, tokens, _FLOAT),
        *tensor_backward(config, axes, tokens),
        *packed_sums(weights, axes),
    ):
        number[one.kind] += 1
        # Gathering and scattering have a shard beside the whole tensor.
        size[one.kind] += one.num_bytes
        size[one.kind] += 0 if one.kind == "all-reduce" else one.num_bytes // axes.shard
    if optimizer == "muon":
        work = muon_work(weights, axes)
        for exchange in (work.there, work.back):
            number["all-to-all"] += 1
            # Of both buffers, so a rank's own numbers count twice.
            both = sum(n * pair.count(rank) for pair, n in exchange.numbers.items())
            size["all-to-all"] += _FLOAT * both
    return {kind: (n, size[kind]) for kind, n in number.items()}


def measure(rank: int, meet: str, ranks: int, preset: str, found: Any) -> None:
    """Count and predict on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    for layout, axes in LAYOUTS[ranks].items():
        for optimizer in OPTIMIZERS:
            for placement in ("none", "full"):
                case = (preset, axes, optimizer, placement)
                both = (counted(*case), predicted(*case, rank))
                found.put(((ranks, layout, optimizer, placement), rank, both))
    dist.destroy_process_group()


def main() -> None:
    """Count on two and on four ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--model", choices=sorted(PRESETS), default="tiny")
    preset = parser.parse_args().model
    differs = False
    for ranks, layouts in LAYOUTS.items():
        found: Any = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (f"{folder}/meet", ranks, preset, found), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
        for _ in range(ranks * len(layouts) * len(OPTIMIZERS) * 2):
            case, rank, (seen, expected) = found.get()
            differs |= seen != expected
            if rank == 0:
                for kind in sorted(seen.keys() | expected.keys()):
                    one, other = seen.get(kind, (0, 0)), expected.get(kind, (0, 0))
                    print(*case, kind, f"{one[0]} x, {one[1]:,} bytes", sep=" | ", end="")
                    print(f" | {other[0]} x, {other[1]:,} bytes")
    print("some rank differs" if differs else "every rank sends what was predicted")
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
