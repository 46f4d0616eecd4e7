"""The command `lrm`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from learnable_multipliers import demo


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="lrm",
        description="Learnable multipliers: learn the scale of every weight matrix from data.",
    )
    parser.add_argument(
        "--version", action="version", version=f"lrm {version('learnable-multipliers')}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    show = commands.add_parser(
        "demo",
        help="train a tiny model without and with multipliers, and show what they learned",
        description="Train a tiny byte-level transformer on the Python standard library's own "
        "sources, without and with multipliers, from the same start. About a minute on a laptop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    show.add_argument("--steps", type=_positive, default=300, help="training steps of each run")
    show.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    show.set_defaults(run=lambda options: demo.run(options.steps, options.seed))

    options = parser.parse_args(arguments)
    options.run(options)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number
