"""What multipliers cost on a CPU: a training step of a small model, with and without.

    python benchmarks/cpu_step.py --out results/cpu-step.json

About 5M parameters and 2,048 tokens, two threads, alternated pairs; the peer is the same optimizer
of this library without multipliers, and torch's own AdamW with clip_grad_norm_.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from llama import Llama, Size

import learnable_multipliers as lrm

SIZE = Size(width=256, hidden=704, heads=4, layers=4, vocabulary=4096)


def trainer(name: str) -> Callable[[], None]:
    """Return a training step."""
    torch.manual_seed(0)
    model = Llama(SIZE)
    ids = torch.randint(0, SIZE.vocabulary, (8, 256))
    if name == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    else:
        nothing = [lrm.Rule("norm"), lrm.Rule("weight$", "none")]
        plan = lrm.plan(model, "full", nothing if name == "without" else ())
        optimizer = lrm.AdamW(lrm.param_groups(model, plan), lr=1e-4, max_grad_norm=1.0)

    def step() -> None:
        model(ids).backward()
        if name == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Alternate the steps and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    steps = {name: trainer(name) for name in ("torch", "without", "with")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in times.items()}
    pairs = zip(times["with"], times["without"], strict=True)
    against_torch = zip(times["with"], times["torch"], strict=True)
    results = {
        "parameters": sum(p.numel() for p in Llama(SIZE).parameters()),
        "tokens": 2048,
        "threads": 2,
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "with_over_without_percent": round(
            100 * (statistics.median(a / b for a, b in pairs) - 1), 2
        ),
        "with_over_torch_percent": round(
            100 * (statistics.median(a / b for a, b in against_torch) - 1), 2
        ),
    }
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
