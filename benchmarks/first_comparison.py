"""Plain, scalar and vector multipliers at 20M parameters: every run, whatever comes out.

    lrm data prepare --sources TRAIN... --valid-sources VALID --tokenizer TOKENIZER --out DATA
    python benchmarks/first_comparison.py --shape 20m-llama --data DATA \
        --records results/first-comparison.jsonl

Runs that are in the records already are left out, so it can be stopped and started. A part of the
grid, a rate beyond it or another seed is chosen with `--lrs`, `--placements`, `--lr-scales` and
`--seed`; `--set section.field=value` changes any other setting of the runs. `--queue FILE` makes
the runs of a file, one line of options a run. `--table` prints the records as tables for the docs,
`--plot PATH` draws them:

    python benchmarks/first_comparison.py --queue benchmarks/baseline_search.txt --data DATA \
        --records results/baseline-search.jsonl
    python benchmarks/first_comparison.py --records results/first-comparison.jsonl \
        --plot docs/first_comparison.svg
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from learnable_multipliers.pretrain.config import OptimizerConfig, TrainConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.trainer import Trainer

LEARNING_RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (2e-3, 4e-3, 8e-3)}
MULTIPLIER_LR_SCALES = (1.0, 4.0)
PLACEMENTS = {"plain": "none", "scalar": "scalar", "vector": "full"}
# Placement, learning rate of the multipliers relative to the matrices, color, style and label.
PLOT_LINES = (
    ("none", 1.0, "black", "o-", "plain"),
    ("scalar", 1.0, "tab:blue", "s:", "scalar"),
    ("scalar", 4.0, "tab:blue", "s-", "scalar, 4x rate"),
    ("full", 1.0, "tab:orange", "^:", "vector"),
    ("full", 4.0, "tab:orange", "^-", "vector, 4x rate"),
)


def main() -> None:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=("20m-llama", "20m"), default="20m-llama")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--optimizers", nargs="*", default=["adamw", "muon"])
    parser.add_argument("--placements", nargs="*", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--lrs", nargs="*", type=float, help="default: three for each optimizer")
    parser.add_argument("--lr-scales", nargs="*", type=float, default=MULTIPLIER_LR_SCALES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=80_000_000)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.field=value")
    parser.add_argument("--queue", type=Path, help="file of options, one run or more a line")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw the records to this .svg or .png")
    options = parser.parse_args()
    queue = [options]
    if options.queue is not None:
        given = ["--records", str(options.records)]
        lines = options.queue.read_text().splitlines()
        wanted = [shlex.split(line, comments=True) for line in lines]
        queue = [parser.parse_args([*given, *words]) for words in wanted if words]
    known = _read(options.records)
    if options.table:
        print(table([record for record in known if record["seed"] == 0]))
        print(table_of_seeds(known))
    if options.plot:
        plot(known, options.plot)
    if options.table or options.plot:
        return
    start = time.perf_counter()
    done = {record["command"] for record in known}
    longest = 0.0
    for chosen, config in [(one, config) for one in queue for config in runs(one)]:
        command = command_of(chosen, config)
        left = options.seconds - (time.perf_counter() - start)
        if command in done:
            continue
        if left < 1.2 * longest:
            print(f"{left:.0f} s left: stopping before {command}")
            break
        begin = time.perf_counter()
        record = train(config, options.data) | {"shape": chosen.shape, "command": command}
        longest = max(longest, time.perf_counter() - begin)
        with options.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{record['valid_loss']:.4f} {record['tokens_per_second']:,.0f} tok/s "
            f"{record['wall_s']:.0f} s  {command}",
            flush=True,
        )


def runs(options: argparse.Namespace) -> Iterator[TrainConfig]:
    """Yield every run that is asked for."""
    base, tokens = RECIPES[options.shape][1], options.tokens
    schedule = replace(
        base.schedule, tokens=tokens, warmup_tokens=tokens // 20, decay_tokens=tokens // 5
    )
    # One evaluation, at the end, on all held-out text.
    log = replace(base.log, every=20, weights_every=0, evaluate_every=0, evaluate_tokens=0)
    log = replace(log, sample_tokens=0, tensorboard=False, drift=False)
    base = replace(base, schedule=schedule, log=log, seed=options.seed)
    for kind in options.optimizers:
        for lr in options.lrs or LEARNING_RATES[kind]:
            for placement in [PLACEMENTS[name] for name in options.placements]:
                for scale in options.lr_scales if placement != "none" else (1.0,):
                    optimizer = OptimizerConfig(
                        kind=kind,  # pyright: ignore[reportArgumentType]
                        placement=placement,  # pyright: ignore[reportArgumentType]
                        lr=lr,
                        multiplier_lr_scale=scale,
                    )
                    yield changed(replace(base, optimizer=optimizer), options.set)


def changed(config: TrainConfig, settings: list[str]) -> TrainConfig:
    """Return a config with settings of the form section.field=value."""
    for setting in settings:
        name, _, value = setting.partition("=")
        section, _, field = name.partition(".")
        fields = replace(getattr(config, section), **{field: json.loads(value)})
        config = replace(config, **{section: fields})
    return config


def command_of(options: argparse.Namespace, config: TrainConfig) -> str:
    """Return the command that makes the same run."""
    chosen, schedule = config.optimizer, config.schedule
    extra = "".join(
        f" --{name.replace('_', '-')} {value.strip('[]').replace(',', ' ')}"
        for name, _, value in (setting.partition("=") for setting in options.set)
        if not name.startswith("schedule.")
    )
    seed = f" --seed {config.seed}" if config.seed else ""
    return (
        f"lrm train {options.shape} --data.path DATA --optimizer.kind {chosen.kind} "
        f"--optimizer.placement {chosen.placement} --optimizer.lr {chosen.lr:g} "
        f"--optimizer.multiplier-lr-scale {chosen.multiplier_lr_scale:g} "
        f"--schedule.tokens {schedule.tokens} --schedule.warmup-tokens {schedule.warmup_tokens} "
        f"--schedule.decay-tokens {schedule.decay_tokens} --log.evaluate-tokens 0{seed}{extra}"
    )


def train(config: TrainConfig, data: Path) -> dict[str, Any]:
    """Train one run in a folder of its own and return what came out."""
    folder = Path(tempfile.mkdtemp())
    begin = time.perf_counter()
    config = replace(config, out=folder / "run", data=replace(config.data, path=data))
    trainer = Trainer(config)
    for _ in trainer.steps():
        pass
    records = read_metrics(config.out)
    speeds = [r["tokens_per_second"] for r in records if r["kind"] == "train"][1:]
    last = [r for r in records if r["kind"] == "eval"][-1]
    losses = [r["loss"] for r in records if r["kind"] == "train"][-5:]
    shutil.rmtree(folder)
    return {
        "optimizer": config.optimizer.kind,
        "placement": config.optimizer.placement,
        "lr": config.optimizer.lr,
        "multiplier_lr_scale": config.optimizer.multiplier_lr_scale,
        "seed": config.seed,
        "tokens": trainer.tokens,
        "parameters": trainer.model.num_parameters,
        "multipliers": trainer.plan.num_multipliers,
        "valid_loss": last["loss"],
        "bits_per_byte": last["bits_per_byte"],
        "train_loss": statistics.mean(losses),
        "skipped_steps": trainer.optimizer.num_skipped,
        "tokens_per_second": statistics.median(speeds),
        "wall_s": round(time.perf_counter() - begin, 1),
        "device": trainer.device.name,
        "torch": torch.__version__,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as Markdown, one table for each shape and optimizer."""
    names = {placement: name for name, placement in PLACEMENTS.items()}
    lines = []
    for shape, kind in sorted({(r["shape"], r["optimizer"]) for r in records}):
        chosen = [r for r in records if (r["shape"], r["optimizer"]) == (shape, kind)]
        rates = sorted({r["lr"] for r in chosen})
        lines += [f"**{shape}, {kind}**", "", "| multipliers | lr scale | "]
        lines[-1] += " | ".join(f"lr {lr:g}" for lr in rates) + " | best | tokens/s |"
        lines.append("|---|---|" + "---|" * (len(rates) + 2))
        for placement, name in names.items():
            for scale in MULTIPLIER_LR_SCALES:
                row = {
                    r["lr"]: r
                    for r in chosen
                    if r["placement"] == placement and r["multiplier_lr_scale"] == scale
                }
                if row:
                    losses = [f"{row[lr]['valid_loss']:.4f}" if lr in row else "" for lr in rates]
                    best = min(r["valid_loss"] for r in row.values())
                    speed = statistics.median(r["tokens_per_second"] for r in row.values())
                    shown = "" if placement == "none" else f"{scale:g}"
                    lines.append(
                        f"| {name} | {shown} | {' | '.join(losses)} | {best:.4f} | {speed:,.0f} |"
                    )
        lines.append("")
    return "\n".join(lines)


def table_of_seeds(records: list[dict[str, Any]]) -> str:
    """Return the runs that have been made with more than one seed as Markdown."""
    by_run: dict[tuple[Any, ...], dict[int, float]] = {}
    for r in records:
        key = (r["shape"], r["optimizer"], r["lr"], r["placement"], r["multiplier_lr_scale"])
        by_run.setdefault(key, {})[r["seed"]] = r["valid_loss"]
    names = {placement: name for name, placement in PLACEMENTS.items()}
    lines = ["| model | optimizer | lr | multipliers | lr scale | by seed | mean |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (shape, kind, lr, placement, scale), losses in sorted(by_run.items()):
        if len(losses) > 1:
            shown = "" if placement == "none" else f"{scale:g}"
            each = ", ".join(f"{losses[seed]:.4f}" for seed in sorted(losses))
            lines.append(
                f"| {shape} | {kind} | {lr:g} | {names[placement]} | {shown} | {each} "
                f"| {statistics.mean(losses.values()):.4f} |"
            )
    return "\n".join(lines)


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw loss against learning rate: a panel for each model and optimizer, seed 0 as a line."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "first-comparison"  # the same file every time
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
    panels = sorted({(r["shape"], r["optimizer"]) for r in records}, key=lambda key: key[::-1])
    for axis, (shape, kind) in zip(axes, panels[::-1], strict=True):
        chosen = [r for r in records if (r["shape"], r["optimizer"]) == (shape, kind)]
        for placement, scale, color, style, label in PLOT_LINES:
            line = [
                r
                for r in chosen
                if r["placement"] == placement and r["multiplier_lr_scale"] == scale
            ]
            points = sorted((r["lr"], r["valid_loss"]) for r in line if r["seed"] == 0)
            axis.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4)
            other = [(r["lr"], r["valid_loss"]) for r in line if r["seed"] != 0]
            if other:
                axis.plot(*zip(*other, strict=True), "_", color=color, markersize=9)
        model = "Llama" if shape.endswith("llama") else "hybrid"
        axis.set_title({"adamw": "AdamW", "muon": "Muon"}[kind] + f", {model}", fontsize=10)
        rates = sorted({r["lr"] for r in chosen})
        axis.set_xscale("log")
        axis.set_xticks(rates, [f"{lr:.0e}".replace("e-0", "e-") for lr in rates], fontsize=8)
        axis.set_xticks([], minor=True)
        axis.tick_params("y", labelsize=8)
        axis.grid(color="0.9")
        axis.set_xlabel("learning rate", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("validation loss (nats)", fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
