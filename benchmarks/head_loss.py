"""Head and loss of a step on one GPU: time and memory of ours, Liger's and PyTorch's.

    python benchmarks/head_loss.py --peers LIGER --out results/head-loss-h200.json

Forward and backward of cross-entropy with z-loss from features and head, bfloat16 features and a
float32 head under autocast, as in a training step. Distances are of the gradient of the features
from float64. Liger's kernels are imported from the folder that `--peers` names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from timing import milliseconds
from torch import Tensor

from learnable_multipliers.pretrain.model.loss import head_loss, head_loss_reference

Z_LOSS = 1e-4
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure every way, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32784)
    parser.add_argument("--peers", nargs="*", type=Path, default=[], help="folders of packages")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    peers.add_folders(options.peers)
    compiled = torch.compile(head_loss_reference)
    ways: dict[str, Loss] = {
        "ours": lambda x, head, targets: head_loss(x, head, 1.0, targets, Z_LOSS).total,
        "PyTorch, compiled": lambda x, head, targets: compiled(x, head, 1.0, targets, Z_LOSS).total,
    }
    if options.peers:
        ways["Liger"] = peers.liger_loss(Z_LOSS)
    inputs = tensors(options)
    expected = gradient(ways["PyTorch, compiled"], *(x.double() for x in inputs[:2]), inputs[2])
    rows = {name: measured(way, inputs, expected) for name, way in ways.items()}
    for name, row in rows.items():
        print(f"{name:20} {row}", flush=True)
    if options.out:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        sizes = {name: getattr(options, name) for name in ("tokens", "width", "vocabulary")}
        options.out.write_text(json.dumps(machine | sizes | {"ways": rows}, indent=1) + "\n")


def tensors(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, head and targets."""
    torch.manual_seed(0)
    features = torch.randn(options.tokens, options.width, device="cuda").bfloat16()
    head = 0.02 * torch.randn(options.vocabulary, options.width, device="cuda")
    return features, head, torch.randint(options.vocabulary, (options.tokens,), device="cuda")


def gradient(way: Loss, features: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the features, in double precision if they are."""
    features, head = (x.detach().requires_grad_() for x in (features, head))
    with torch.autocast("cuda", torch.bfloat16, enabled=features.dtype != torch.float64):
        loss = way(features, head, targets)
    return torch.autograd.grad(loss, [features, head])[0]


def measured(way: Loss, inputs: tuple[Tensor, ...], expected: Tensor) -> dict[str, Any]:
    """Return milliseconds, memory beyond the inputs, and the distance from float64."""

    def step() -> Tensor:
        return gradient(way, *inputs)

    found = step().double()
    distance = ((found - expected).norm() / expected.norm()).item()
    del found
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = [milliseconds(step, 20) for _ in range(2)]
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "ms": [round(each, 4) for each in times],
        "peak_mib": round(peak / 2**20, 1),
        "distance": round(distance, 6),
    }


if __name__ == "__main__":
    main()
