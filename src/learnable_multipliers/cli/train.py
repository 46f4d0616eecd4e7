"""`lrm train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape

from learnable_multipliers.pretrain import dry_run
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.interrupt import Interrupt
from learnable_multipliers.pretrain.progress import Display, duration, in_short
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.train import Trainer


def run(arguments: Sequence[str]) -> None:
    """Train a model by a named recipe, any of its settings overridden."""
    config = tyro.extras.overridable_config_cli(
        RECIPES,
        prog="lrm train",
        description="Train a language model. Choose a recipe; every setting of it can be "
        "overridden: lrm train 20m --data.path DATA --optimizer.lr 2e-3. "
        "lrm train RECIPE --help lists the settings with the recipe's values.",
        args=arguments,
    )
    if config.dry_run:
        print(dry_run.describe(config))
        return
    train(config, Console())


def train(config: TrainConfig, console: Console) -> None:
    """Train with a live line on the terminal; Ctrl-C saves and ends."""
    shown: list[Display] = []

    def observe(record: dict[str, Any]) -> None:
        if record["kind"] == "warning":
            console.print(f"[yellow]{record['text']}[/]")
        elif record["kind"] == "sample":
            text = escape(record["prompt"] + record["text"])
            shown[0].say(f"[dim]sample at step {record['step']:,}:[/]\n{text}")
        elif shown:
            shown[0].record(name, record)

    trainer = Trainer(config, observe)
    name = trainer.config.name
    _announce(trainer, console)
    with Interrupt() as interrupt, Display([name], trainer.total_steps, console) as display:
        shown.append(display)
        for step in trainer.going():
            display.advance(name, step)
            if interrupt.received:
                path = trainer.save()
                break
        else:
            path = None
    if path is not None:
        console.print(f"{interrupt.received}: saved step {trainer.step:,} to {path}")
        console.print("Go on with the same command and --resume")
        return
    console.print(f"Done in {duration(trainer.seconds)}. Metrics and checkpoints: {config.out}")
    console.print(f"Next: lrm report {config.out}; lrm export {config.out} OUT")


def _announce(trainer: Trainer, console: Console) -> None:
    config, device = trainer.config, trainer.device
    precision = str(device.dtype).removeprefix("torch.")
    carried = (
        f"{trainer.plan.num_multipliers:,} multipliers ({config.optimizer.placement})"
        if trainer.plan.num_multipliers
        else "no multipliers"
    )
    console.print(
        f"{config.name}: {in_short(trainer.model.num_parameters)} parameters, {carried}, "
        f"{config.optimizer.kind}, on {device.name} in {precision}"
        f"{', compiled' if device.compiled else ''}"
        f"{f', going on from step {trainer.step:,}' if trainer.step else ''}",
        highlight=False,
    )
