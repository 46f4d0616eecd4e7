"""Tokens over wall-clock of eight runs in one command, start-up and evaluation included.

    lrm data prepare --sources TRAIN... --valid-sources VALID --tokenizer TOKENIZER --out DATA
    python benchmarks/eight_runs.py --data DATA --out results/eight-runs-h200.json

Eight seeds of a recipe are trained as an experiment trains its runs: one after another in as many
processes as `--jobs` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from learnable_multipliers.experiments.record import Record
from learnable_multipliers.experiments.run import Run
from learnable_multipliers.experiments.runner import default_threads, prepared, train_missing
from learnable_multipliers.experiments.worker import Failure, Job
from learnable_multipliers.pretrain.recipes import RECIPES


class Lines:
    """Prints each run as it ends."""

    def added(self, count: int) -> None:
        """Nothing follows."""

    def started(self, job: Job) -> None:
        """Nothing to say yet."""

    def ended(self, job: Job, found: Record | Failure, seconds_left: float | None) -> None:
        """Print what became of a run."""
        if isinstance(found, Failure):
            raise RuntimeError(found.text)
        print(
            f"seed {job.run.labels['seed']}: {found.seconds:.1f} s, "
            f"{found.tokens_per_second:,.0f} tokens/s, loss {found.loss:.4f}",
            flush=True,
        )


def main() -> None:
    """Train, print one line a run and the total, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", choices=RECIPES, default="20m-llama")
    parser.add_argument("--tokens", type=int, help="of a run; default: the recipe's")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    base = RECIPES[options.recipe][1]
    if options.tokens:
        tokens = options.tokens
        base = replace(
            base,
            schedule=replace(
                base.schedule, tokens=tokens, warmup_tokens=tokens // 20, decay_tokens=tokens // 5
            ),
        )
    log = replace(base.log, evaluate_every=0, sample_tokens=0, tensorboard=False, drift=False)
    jobs = []
    for seed in range(options.runs):
        run = Run(labels={"seed": seed}, config=replace(base, seed=seed, log=log))
        run = prepared(run, "gpu", options.data)
        jobs.append(Job(experiment="eight-runs", run=run, ledger={}))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        result = train_missing(
            jobs,
            Path(out),
            Lines(),
            num_workers=options.jobs,
            num_threads=default_threads("gpu", options.jobs),
        )
    wall = time.perf_counter() - began
    total = sum(record.tokens for record in result.records)
    print(f"{options.runs} runs, {options.jobs} at a time: {total / wall:,.0f} tokens/s")
    if options.out:
        found = {
            "recipe": options.recipe,
            "runs": options.runs,
            "jobs": options.jobs,
            "tokens": total,
            "wall_s": round(wall, 1),
            "tokens_per_second": round(total / wall),
            "steady_tokens_per_second": [r.tokens_per_second for r in result.records],
            "run_s": [round(r.seconds, 1) for r in result.records],
            "device": result.records[0].device,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
