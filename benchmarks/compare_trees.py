"""The speed of two source trees, alternated (A B A B ...) in one command on one GPU.

    git worktree add ../before COMMIT
    python benchmarks/compare_trees.py --before ../before --out results/compare-trees.json

Runs `optimizers.py` and `pretrain.py` of each tree on that tree's own sources. For every time the
two have in common it prints the medians, their ratio, and how far the runs of the first tree differ
among themselves: a ratio within that spread is no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
BENCHMARKS = {
    "optimizers.py": ["--only", "adamw", "adamw_bfloat16", "muon"],
    "pretrain.py": ["--no-peer", "--steps", "50"],
}


def main() -> None:
    """Run both trees in turn and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="root of the other tree")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each tree")
    parser.add_argument("--only", nargs="*", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": HERE}
    rows: dict[str, dict[str, list[float]]] = {}
    for script in options.only:
        for _ in range(options.rounds):
            for label, tree in trees.items():
                for name, value in run(tree, script):
                    times = rows.setdefault(f"{script} {name}", {"before": [], "after": []})
                    times[label].append(value)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for name, times in rows.items():
        if times["before"] and times["after"]:
            print(f"{name:70} {described(times)}")


def run(tree: Path, script: str) -> list[tuple[str, float]]:
    """Run a benchmark of a tree; return its times by name, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(tree / "benchmarks" / script), *BENCHMARKS[script]]
        subprocess.run(
            [*command, "--out", str(out)],
            check=True,
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
            stdout=subprocess.DEVNULL,
        )
        return list(times_in(json.loads(out.read_text())))


def times_in(figures: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the times of a benchmark's figures: keys that are, or end in, `ms`."""
    if isinstance(figures, list):
        # Runs of several models carry their names; repeated times are one time.
        for entry in figures:
            yield from times_in(entry, f"{name} {entry['model']}".strip())
        return
    for key, value in figures.items():
        if key == "ms" or key.endswith("_ms"):
            if isinstance(value, list):
                if key == "times_ms" or key == "spread_ms":
                    continue
                value = min(value)
            yield f"{name} {key}", float(value)
        elif isinstance(value, dict) or (key == "runs" and isinstance(value, list)):
            yield from times_in(value, f"{name} {key}".strip())


def described(times: dict[str, list[float]]) -> str:
    """Return medians, ratio and the first tree's own spread."""
    before, after = (statistics.median(times[label]) for label in ("before", "after"))
    spread = (max(times["before"]) - min(times["before"])) / before
    return f"{before:9.3f} {after:9.3f} ms  {after / before - 1:+7.2%}  (own {spread:.2%})"


if __name__ == "__main__":
    main()
