"""The command `lrm`: a table of commands, each in a file of its own."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

# Command -> what it does, in the order a newcomer meets them.
COMMANDS = {
    "demo": "train a tiny model without and with multipliers, and open a report on both",
    "data prepare": "turn text into token shards to train on",
    "train": "train a language model: lrm train 20m --data.path DATA",
    "plan": "show which multipliers each matrix of a model would carry, and why",
    "export": "turn a trained model into a Hugging Face folder",
    "report": "make one page about one or several runs",
}
_INSTALL = "pip install 'learnable-multipliers[pretrain]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"lrm {version('learnable-multipliers')}")
        return
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return
    command = next((name for name in COMMANDS if given[: len(name.split())] == name.split()), None)
    if command is None:
        _refuse(given)
    rest = given[len(command.split()) :]
    try:
        module = importlib.import_module(f"{__name__}.{command.replace(' ', '_')}")
    except ModuleNotFoundError as error:
        sys.exit(f"lrm {command} needs {error.name}, which is not installed: {_INSTALL}")
    try:
        module.run(rest)
    # What users can cause is said in one line; LRM_TRACEBACK=1 shows where it comes from.
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("LRM_TRACEBACK"):
            raise
        sys.exit(f"lrm {command}: {error}")


def _help() -> str:
    width = max(map(len, COMMANDS))
    listed = [f"  lrm {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "lrm: learn the scale of every weight matrix from data.",
            "",
            *listed,
            "",
            "Each command explains itself: lrm train --help. New here? lrm demo",
        ]
    )


def _refuse(given: Sequence[str]) -> NoReturn:
    words = [name.split()[0] for name in COMMANDS]
    if given[0] == "data":
        sys.exit("lrm data: there is one command, lrm data prepare")
    close = difflib.get_close_matches(given[0], words, n=1)
    hint = f"did you mean lrm {close[0]}?" if close else "lrm --help lists the commands"
    print(f"lrm: unknown command {given[0]!r}; {hint}", file=sys.stderr)
    sys.exit(2)
