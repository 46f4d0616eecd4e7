"""What it costs that ranks with replicas agree on skipping: an optimizer step with it and without.

    python benchmarks/agreement.py --out results/agreement.json

Two ranks of one CPU that speak by gloo, one thread each. A step without agreement is measured in
CPU time, which other work on the machine does not change; agreeing, which mostly waits, in wall
time between ranks that are ready, of which the median and the quickest tenth are given.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from llama import Llama, Size

import learnable_multipliers as lrm

SIZES = {
    "20M": Size(width=384, hidden=1024, heads=6, layers=8, vocabulary=8192),
    "tiny": Size(width=32, hidden=64, heads=2, layers=2, vocabulary=64),
}


def measure(rank: int, meet: str, rounds: int, found: Any) -> None:
    """Measure on one rank; the first one reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    for name, size in SIZES.items():
        result = _measure(size, rounds if name == "20M" else 20 * rounds)
        if rank == 0:
            found.put((name, result))
    dist.destroy_process_group()


def _measure(size: Size, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = Llama(size)
    optimizer = lrm.AdamW.from_model(
        model, lr=1e-4, max_grad_norm=1.0, process_group=dist.group.WORLD
    )
    for p in model.parameters():
        p.grad = torch.randn_like(p)

    optimizer.step()
    replicas, optimizer._replicas = optimizer._replicas, None
    states, yes = optimizer._cached_binding().states, torch.tensor(True)
    assert replicas is not None
    steps, agreed, checked = [], [], []
    for _ in range(rounds):
        start = time.process_time()
        optimizer.step()
        steps.append(time.process_time() - start)
        # A check of the weights is due every 100 steps.
        for number, taken in ((1, agreed), (100, checked)):
            replicas._num_steps = number
            dist.barrier()
            start = time.perf_counter()
            replicas.agree(yes, yes, states)
            taken.append(time.perf_counter() - start)
    step, median = 1e3 * statistics.median(steps), 1e3 * statistics.median(agreed)
    quick, check = (1e3 * statistics.quantiles(times, n=10)[0] for times in (agreed, checked))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": rounds,
        "step_ms": step,
        "agree_ms": quick,
        "agree_median_ms": median,
        "check_ms": check - quick,
        "ratio": 1 + (quick + (check - quick) / 100) / step,
    }


def main() -> None:
    """Start two ranks and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/meet", given.rounds, found), nprocs=2)
    results = dict(found.get() for _ in SIZES)
    for name, result in results.items():
        print(
            f"{name:5} {result['step_ms']:8.2f} ms a step, {result['agree_ms']:.3f} ms to agree "
            f"(median {result['agree_median_ms']:.3f}), {result['check_ms']:.2f} ms for a check "
            f"every 100 steps: {result['ratio']:.3f} times"
        )
    if given.out is not None:
        machine = {"torch": torch.__version__, "machine": platform.machine()}
        given.out.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
