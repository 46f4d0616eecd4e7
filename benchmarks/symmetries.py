"""How long it takes to find the symmetries of a preset, and how many there are.

python benchmarks/symmetries.py --presets tiny falcon-h1-0.5b --out results/symmetries.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.presets import PRESETS


def main() -> None:
    """Find the symmetries of each preset under each placement; print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="*", choices=PRESETS, default=["tiny", "falcon-h1-0.5b"])
    parser.add_argument("--placements", nargs="*", default=["full", "symmetry-aware"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for preset in options.presets:
        model = build(PRESETS[preset])
        for placement in options.placements:
            rows.append({"preset": preset, "placement": placement, **measure(model, placement)})
            print(rows[-1], flush=True)
    if options.out:
        machine = {"cpu": platform.machine(), "threads": options.threads}
        options.out.write_text(json.dumps({**machine, "runs": rows}, indent=1) + "\n")


def measure(model: torch.nn.Module, placement: Any) -> dict[str, Any]:
    """Return counts and seconds for one model and placement."""
    begin, processor = time.perf_counter(), time.process_time()
    symmetries = lrm.find_symmetries(model, lrm.plan(model, placement))
    return {
        "symmetries": len(symmetries),
        "rescalings": symmetries.nullity,
        "kinds": dict(Counter(symmetry.kind for symmetry in symmetries)),
        "wall_s": round(time.perf_counter() - begin, 1),
        "cpu_s": round(time.process_time() - processor, 1),
    }


if __name__ == "__main__":
    main()
