"""How commands read their arguments: tyro turns the fields of a config into options."""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import is_dataclass, replace
from decimal import Decimal, InvalidOperation
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

import tyro

Config = TypeVar("Config")
_WIDEST = 100
_MOST_LINES = 30
_SWITCHED = {"True": "on", "False": "off"}
"""How defaults of switches are shown: `--log.no-drift` takes no value."""


def _whole_number(word: str) -> int:
    """Accept `30e9` for an int."""
    with suppress(InvalidOperation):
        # Exact, which a float is not for long numbers; 1e999999999 is not written out.
        value = Decimal(word)
        if value.is_finite() and not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{word!r} does not fit into 64 bits")
        if value.is_finite() and value == value.to_integral_value():
            return int(value)
    raise ValueError(f"{word!r} is not a whole number")


def _path(word: str) -> Path:
    """Refuse an empty path, which Python reads as the current folder.

    An unset variable in a script does not mean the current folder.
    """
    if not word or "\0" in word:
        raise ValueError(f"{word!r} is not a path; the current folder is written .")
    return Path(word)


def _factors(words: Sequence[str]) -> dict[str, float]:
    """Read `head 64 gate 2`."""
    factors: dict[str, float] = {}
    if len(words) % 2:
        raise ValueError(f"{words[-1]!r} has no number: alternate names and numbers")
    for name, word in zip(words[::2], words[1::2], strict=True):
        if name in factors:
            raise ValueError(f"{name!r} is given twice")
        try:
            factors[name] = float(word)
        except ValueError:
            raise ValueError(f"{word!r}, for {name!r}, is not a number") from None
    return factors


def _default_hint(label: str) -> str:
    """Return the default as the help shows it; the text itself explains an empty one."""
    if label in ("", "''", "None"):
        return ""
    return f"(default: {_SWITCHED.get(label, label)})"


def _shown(field: tyro.constructors.StructFieldSpec) -> tyro.constructors.StructFieldSpec:
    """Return a field whose help is one paragraph and matches the option as shown."""
    # A group of options, each with its own default.
    if is_dataclass(field.type):
        return field

    def helptext() -> str | None:
        docstring = field.helptext() if callable(field.helptext) else field.helptext
        if docstring is None:
            return None
        # tyro keeps the line breaks of an indented docstring, and wraps each line separately.
        text = " ".join(docstring.split())
        # The option is shown as `--no-...`, and its docstring is about what it switches off.
        return f"Turn off: {text[0].lower()}{text[1:]}" if field.default is True else text

    annotated = get_origin(field.type) is Annotated
    kind, *more = get_args(field.type) if annotated else (field.type,)
    # First, so a hint set by a command itself comes later and wins.
    hint = tyro.conf.arg(help_behavior_hint=_default_hint)
    shown: Any = Annotated[kind, hint, *more]
    return replace(field, type=shown, helptext=helptext)


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Return tyro's registry with our own readers of words and texts of options."""
    registry = tyro.constructors.ConstructorRegistry()
    for kind, metavar, parse in ((int, "INT", _whole_number), (Path, "PATH", _path)):
        spec = tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words, parse=parse: parse(words[0]),
            is_instance=lambda value, kind=kind: isinstance(value, kind),
            str_from_instance=lambda value: [str(value)],
        )

        @registry.primitive_rule
        def _(info: tyro.constructors.PrimitiveTypeInfo, kind: Any = kind, spec: Any = spec) -> Any:
            return spec if info.type is kind else None

    factors = tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[ROLE FLOAT [ROLE FLOAT ...]]",
        instance_from_str=_factors,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [str(word) for pair in value.items() for word in pair],
    )

    @registry.primitive_rule
    def _(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        return factors if info.type == dict[str, float] else None

    asked: list[tyro.constructors.StructTypeInfo] = []

    @registry.struct_rule
    def _(info: tyro.constructors.StructTypeInfo) -> Any:
        # tyro's own rule makes the fields: while it is asked, ours does not apply.
        if not is_dataclass(info.type) or any(info is other for other in asked):
            return None
        asked.append(info)
        try:
            spec = registry.get_struct_spec(info)
        finally:
            asked.pop()
        if not isinstance(spec, tyro.constructors.StructConstructorSpec):
            return spec
        return replace(spec, fields=tuple(map(_shown, spec.fields)))

    return registry


_REGISTRY = _registry()


def read(
    kind: type[Config],
    command: str,
    arguments: Sequence[str],
    *,
    description: str,
    default: Config | None = None,
) -> Config:
    """Return the config that arguments ask for; wrong ones end the process with exit code 2."""
    with _short_errors():
        return tyro.cli(
            kind,
            prog=f"lrm {command}",
            # Indented: tyro joins lines that begin with a letter and never breaks them again.
            description=wrapped(description, first="  "),
            args=list(arguments),
            default=tyro.MISSING_NONPROP if default is None else default,
            # `--resume` alone, without a useless `--no-resume`; `PATH`, not
            # `{None}|PATH`.
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            registry=_REGISTRY,
        )


@contextmanager
def _short_errors() -> Iterator[None]:
    """Omit the middle of a long usage error when it goes to a log file."""
    if sys.stderr.isatty():
        yield
        return
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            yield
    finally:
        lines = errors.getvalue().splitlines()
        if len(lines) > _MOST_LINES:
            lines = [*lines[: _MOST_LINES - 5], "...", *lines[-4:]]
        for line in lines:
            print(line, file=sys.stderr)


def command(
    kind: type[Config],
) -> Callable[[Callable[[Config], None]], Callable[[Sequence[str]], None]]:
    """Make a command from a function: arguments become its config, its docstring the help."""

    def decorate(function: Callable[[Config], None]) -> Callable[[Sequence[str]], None]:
        def run(arguments: Sequence[str]) -> None:
            name, description = function.__name__, function.__doc__ or ""
            function(read(kind, name, arguments, description=description))

        return run

    return decorate


def usage_error(why: str) -> NoReturn:
    """Print an error about the command line and end the process with exit code 2."""
    # One line in a log file.
    print(wrapped(why) if sys.stderr.isatty() else why, file=sys.stderr)
    sys.exit(2)


def wrapped(text: str, first: str = "") -> str:
    """Return a paragraph as wide as the terminal, all lines indented like its first words."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def terminal_columns() -> int | None:
    """Return the width of the terminal; None where the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def closest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word nearest to a misspelt one."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)
