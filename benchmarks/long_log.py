"""Size of a long run's metrics, and time and memory of its page.

    python benchmarks/long_log.py [--steps 1000000] [--out FOLDER]

Writes the log of a model of 36 layers that is logged at every step, with its weights every 100
steps, as a run writes it; then makes its page in a process of its own. `--whole` keeps every
record, as if nothing were thinned.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from learnable_multipliers import _planner
from learnable_multipliers._checksum import add_checksum
from learnable_multipliers.pretrain.metrics.log import FILE_NAME, MetricLog
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.report import Run, write_page

EVERY = {"train": 1, "eval": 250, "weights": 100, "health": 100}
_NORMAL = (-3.0, -1.6, -0.7, 0.0, 0.7, 1.6, 3.0)


def write_log(folder: Path, steps: int, *, whole: bool) -> None:
    """Write the metrics of a run of so many steps."""
    noise, weights = random.Random(0), _weights()
    with closing(MetricLog(folder, tensorboard=False, intervals={} if whole else EVERY)) as log:
        for step in range(1, steps + 1):
            for kind, every in EVERY.items():
                if step % every == 0 or step == 1:
                    values = weights if kind == "weights" else _values(kind, step, noise)
                    log.log(step, {"kind": kind, "tokens": step * 4096, **values})
        log.log(steps, {"kind": "end", "tokens": steps * 4096, "steps": steps, "seconds": 1e6})
    for name, content in (("config.json", {"name": "long"}), ("environment.json", {})):
        (folder / name).write_text(json.dumps(add_checksum(content)))


def _weights() -> dict[str, Any]:
    """Return a record of the weights, with as many digits as one of a run."""
    with torch.device("meta"):
        model = HybridLM(PRESETS["falcon-h1-0.5b"])
    matrices = {e.name: e.matrix for e in _planner.plan(model, "full").entries if e.matrix}
    quantiles = [math.exp(0.1234567 * z) for z in _NORMAL]
    return {
        "raw_rms": {name: 0.08765432109876543 for name in matrices},
        "predicted_rms": {name: 0.07654321098765432 for name in matrices},
        "multipliers": {
            name: {"row": quantiles, "col": quantiles} for name, m in matrices.items() if m.carries
        },
        "roles": {name: m.blocks[0].role for name, m in matrices.items()},
    }


def _values(kind: str, step: int, noise: random.Random) -> dict[str, Any]:
    loss = 2 + 5 * step**-0.3 + noise.gauss(0, 0.05)
    if kind == "health":
        names = [f"{a}/{b}" for a in ("trapped", "free", "noise") for b in ("matrices", "vectors")]
        drifts = [f"drift/rows of matrix {i} against columns of matrix {i + 1}" for i in range(8)]
        return dict.fromkeys([*names, *drifts], loss) | {"alarms": []}
    if kind == "eval":
        return {"loss": loss, "bits_per_byte": loss / 2.3, "evaluated_tokens": 499_712}
    return {
        "loss": loss,
        "loss_left_out": 0,
        "lr": 1e-3 * min(1.0, step / 1000),
        "grad_norm": noise.random(),
        "skipped_steps": 0,
        "tokens_per_second": 1e5 * noise.random(),
        "mfu": noise.random(),
        "seconds": step * 0.9876543210123,
    }


def make_page(folder: Path) -> None:
    """Make the page of a run; print its seconds, its size and the peak of memory."""
    began = time.process_time()
    page = write_page(folder / "report.html", [Run.load(folder)], title="A long run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"page: {time.process_time() - began:.1f} s of CPU, peak of memory {peak / 1e6:.0f} MB, "
        f"{page.stat().st_size / 1e6:.2f} MB"
    )


def main() -> None:
    """Write a log and make its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="an empty folder; none: a temporary one")
    parser.add_argument("--whole", action="store_true", help="keep every record")
    parser.add_argument("--page", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.page:
        make_page(given.page)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.process_time()
        write_log(folder, given.steps, whole=given.whole)
        written = (folder / FILE_NAME).stat().st_size
        print(f"log: {written / 1e6:.1f} MB, {time.process_time() - began:.0f} s of CPU to write")
        subprocess.run([sys.executable, __file__, "--page", str(folder)], check=True)


if __name__ == "__main__":
    main()
