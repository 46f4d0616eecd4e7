"""Floating-point operations and kept activations of a step, with and without recomputation.

    python benchmarks/recompute.py --out results/recompute.json

Counted on tensors without content, so at full size in seconds: one forward and backward pass of a
sequence in float32, eager. Operations are those of matrix products; bytes are what autograd keeps
of the forward pass, weights left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.presets import PRESETS

LENGTH = 2048


def main() -> None:
    """Count for each preset, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="*", default=["falcon-h1-0.5b", "llama-0.5b"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for preset in options.presets:
        keeps, recomputes = counted(preset, recompute=False), counted(preset, recompute=True)
        rows += [keeps, recomputes]
        print(
            f"{preset}: {keeps['tflop']:.2f} -> {recomputes['tflop']:.2f} TFLOP "
            f"({recomputes['tflop'] / keeps['tflop'] - 1:+.1%}), kept "
            f"{keeps['kept_gib']:.2f} -> {recomputes['kept_gib']:.2f} GiB "
            f"({keeps['kept_gib'] / recomputes['kept_gib']:.1f} times fewer)"
        )
    if options.out:
        result = {"torch": torch.__version__, "length": LENGTH, "counts": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def counted(preset: str, *, recompute: bool) -> dict[str, Any]:
    """Count one pass over one sequence."""
    with FakeTensorMode(), FlopCounterMode(display=False) as operations:
        model = HybridLM(PRESETS[preset])
        if recompute:
            model.recompute_layers_()
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model.loss(torch.zeros(1, LENGTH + 1, dtype=torch.long), 1e-4).total
        num_bytes = sum(s.nbytes() for at, s in kept.items() if at not in weights)
        kept.clear()
        loss.backward()
    return {
        "model": preset,
        "recompute": "layers" if recompute else "none",
        "tflop": round(operations.get_total_flops() / 1e12, 4),
        "kept_gib": round(num_bytes / 2**30, 4),
    }


if __name__ == "__main__":
    main()
