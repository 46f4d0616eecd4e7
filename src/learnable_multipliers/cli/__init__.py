"""The command `lrm`: a table of commands and the modules that define them.

Exit codes: 0 done, 1 failed (the message says why), 2 the command line is wrong, 128 + n ended
by signal n.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from learnable_multipliers import __version__

# Command -> its module and what it does, in the order in which a new user needs them.
COMMANDS = {
    "demo": ("demo", "compare a tiny model trained without and with multipliers"),
    "data prepare": ("data_prepare", "tokenize text into shards to train on"),
    "doctor": ("preflight", "check machine, data and model before a run"),
    "train": ("train", "train a language model: lrm train 20m --data.path DATA"),
    "verify-resume": ("preflight", "check that a killed and resumed run is bit-identical"),
    "plan": ("models", "show which multipliers each matrix would carry, and why"),
    "scaling": ("scaling", "forecast the time of a train step on many GPUs"),
    "symmetries": ("models", "find redundant scales (symmetries) of a model"),
    "simulate": ("simulate", "predict the scale that noise and decay give a matrix"),
    "diagnose": ("diagnosis", "find the weights of a run held by noise and decay"),
    "export": ("runs", "export a trained model to a Hugging Face folder"),
    "evaluate": ("evaluate", "score a model on benchmarks in local files"),
    "report": ("runs", "write a page that compares one or several runs"),
    "experiment": ("experiment", "run the experiments of the paper, and judge its claims"),
}
# Texts of the plain RuntimeErrors that torch raises when memory runs out.
_NO_MEMORY = ("allocate memory", "out of memory", "Storage size calculation overflowed")
_INSTALL = "pip install 'learnable-multipliers[pretrain]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            _run(given)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if os.environ.get("LRM_TRACEBACK"):
            raise
        # Buffered output is discarded, or Python would report an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader has closed the pipe, as `head` does.
        if isinstance(error, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        sys.exit(f"lrm: the output could not be written: {error.strerror}")


def _run(given: list[str]) -> None:
    if given[:1] in (["--version"], ["version"]):
        print(f"lrm {__version__}")
        return
    # "data" alone is not a command: its help is the list of commands.
    asked = given[1:] if given[:1] == ["data"] else given
    if not given or asked[:1] in (["-h"], ["--help"], ["help"]):
        print(_help())
        return
    command = next((name for name in COMMANDS if given[: len(name.split())] == name.split()), None)
    if command is None:
        _unknown_command(given[0])
    rest = given[len(command.split()) :]
    try:
        _load(command)(rest)
    except KeyboardInterrupt as interrupt:
        print(
            f"lrm {command}: {': '.join(['stopped', *map(str, interrupt.args)])}", file=sys.stderr
        )
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        raise
    # Errors that users can cause are one line; LRM_TRACEBACK=1 shows the traceback.
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("LRM_TRACEBACK"):
            raise
        # Under torchrun, name the rank.
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        sys.exit(f"lrm {command}{rank}: {_one_line(str(error))}")
    except (MemoryError, RuntimeError, OverflowError) as error:
        text = _resource_error_message(error)
        if text is None or os.environ.get("LRM_TRACEBACK"):
            raise
        sys.exit(f"lrm {command}: {_one_line(text)}")


def _resource_error_message(error: Exception) -> str | None:
    """Return a message if an error is about the limits of the machine, else None."""
    if isinstance(error, RecursionError):
        return "an input file is nested too deeply: repair or remove it"
    if isinstance(error, OverflowError):
        return f"a number is out of range ({error}): choose a smaller one"
    text = str(error).partition("\n")[0]
    # Raised by `Path.resolve` before Python 3.13.
    if text.startswith("Symlink loop"):
        return text
    if isinstance(error, MemoryError) or any(part in text for part in _NO_MEMORY):
        return f"out of memory ({text or 'nothing is left'}): reduce the size of the request"
    return None


def _one_line(text: str) -> str:
    """Return a message in one line; paths may contain line breaks and terminal codes."""
    joined = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def _load(command: str) -> Callable[[Sequence[str]], None]:
    """Return the function of a command: `data_prepare` for "data prepare"."""
    try:
        module = importlib.import_module(f"{__name__}.{COMMANDS[command][0]}")
        return getattr(module, re.sub("[ -]", "_", command))
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise ModuleNotFoundError(f"needs {package}, which is not installed: {_INSTALL}") from error


def _help() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  lrm {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return (
        f"lrm: learn the scale of every weight matrix from data.\n\n{listed}\n\n"
        "Options of a command: lrm train --help. New here? Start with lrm demo"
    )


def _unknown_command(word: str) -> NoReturn:
    names = {name.split()[0]: name for name in COMMANDS}
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean lrm {names[close[0]]}?" if close else "lrm --help lists them"
    print(f"lrm: there is no command {word!r}; {hint}", file=sys.stderr)
    sys.exit(2)
