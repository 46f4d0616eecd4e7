"""`lrm demo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from learnable_multipliers import demo
from learnable_multipliers.cli.arguments import read
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.report.records import Run


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How long, and where."""

    out: Path = Path("demo")
    """Folder of the two runs and of report.html; an earlier demo there is replaced."""
    tokens: int = RECIPES["tiny"][1].schedule.tokens
    """Length of each run, in tokens."""
    seed: int = 0
    """Of weights and batches."""


def run(arguments: Sequence[str]) -> None:
    """Run the demo and say where the report is."""
    config = read(
        DemoConfig,
        "demo",
        arguments,
        description="Train a tiny language model on the sources of Python's standard library, "
        "without and with multipliers, and write one page about both. A few minutes on a laptop's "
        "CPU.",
    )
    try:
        page = demo.run(training(config), config.out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no report was written; lrm demo starts afresh") from None
    for name in demo.RUNS:
        last = Run.load(config.out / name).last("eval")
        assert last is not None
        print(
            f"{name:12} held-out loss {last['loss']:.4f} nats per token, "
            f"{last['bits_per_byte']:.4f} bits per byte"
        )
    print(f"Report: {page}")


def training(config: DemoConfig) -> TrainConfig:
    """Return the recipe of both runs: that of `lrm train tiny`, as long as asked for."""
    base = RECIPES["tiny"][1]
    part = config.tokens / base.schedule.tokens
    schedule = replace(
        base.schedule,
        tokens=config.tokens,
        warmup_tokens=int(base.schedule.warmup_tokens * part),
        decay_tokens=int(base.schedule.decay_tokens * part),
    )
    return replace(base, seed=config.seed, schedule=schedule)
