"""How commands read their arguments: tyro makes options of a config, hints are ours."""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

import tyro

Config = TypeVar("Config")
_WIDEST = 100
_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _whole_numbers(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    """Read `30e9` as people write it, where a whole number is asked for."""
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def _whole_number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        try:
            # Exact, which a float is not for long numbers.
            value = Fraction(word)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{word!r} is not a whole number") from None
        if value.denominator != 1:
            raise ValueError(f"{word!r} is not a whole number") from None
        return value.numerator


def read(
    kind: type[Config],
    command: str,
    arguments: Sequence[str],
    *,
    description: str,
    default: Config | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> Config:
    """Return the config that arguments ask for; wrong ones end the process with a hint.

    Args:
        elsewhere: what other programs call an option (its last word), and our name for it.
    """
    config, unknown = tyro.cli(
        kind,
        prog=f"lrm {command}",
        # Indented, because tyro joins lines that begin with a letter and never breaks them again.
        description=wrapped(description, first="  "),
        args=list(arguments),
        default=tyro.MISSING_NONPROP if default is None else default,
        # `--resume` alone, without a `--no-resume` that nobody needs; `PATH`, not `{None}|PATH`.
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        return_unknown_args=True,
        registry=_REGISTRY,
    )
    if unknown:
        known = option_names(kind)
        on = [name for name in known if _value(kind, default, name) is True]
        why = _about(unknown, known, on, elsewhere or {})
        refuse(f"lrm {command}: {why} All options: lrm {command} --help")
    return config


def refuse(why: str) -> NoReturn:
    """End the process: the command line makes no sense."""
    # In a file one complaint is one line.
    print(wrapped(why) if sys.stderr.isatty() else why, file=sys.stderr)
    sys.exit(2)


def wrapped(text: str, first: str = "") -> str:
    """Return a paragraph as wide as the terminal, in lines that go on below its first words."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def option_names(kind: Any, prefix: str = "--") -> list[str]:
    """Return every option of a config, those of its sections with their dotted names."""
    found = []
    for field in fields(kind):
        name = prefix + field.name.replace("_", "-")
        inner = field.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            found += option_names(inner, f"{name}.")
        else:
            found.append(name)
    return found


def closest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that somebody who wrote `word` probably meant."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def _value(kind: Any, default: Any, option: str) -> Any:
    """Return what an option is without being given; None where it has to be."""
    found = default
    for word in option.lstrip("-").replace("-", "_").split("."):
        if found is None:
            field = next(field for field in fields(kind) if field.name == word)
            found = field.default if field.default is not MISSING else None
            return found
        found = getattr(found, word)
    return found


def _about(
    unknown: Sequence[str], known: Sequence[str], on: Sequence[str], elsewhere: Mapping[str, str]
) -> str:
    """Say what is wrong, and what was probably meant."""
    option = next((word for word in unknown if word.startswith("-")), None)
    if option is None:
        # A command that takes files takes them under this name.
        first = "--sources" in known
        files = " Sources come first, or behind --sources." if first else ""
        return f"cannot make sense of {unknown[0]!r}: settings are given as --name value.{files}"
    name = option.partition("=")[0].replace("_", "-")
    section, dot, last = name.lstrip("-").rpartition(".")
    if name in on:
        # tyro gives a switch that is on by default the one name that turns it off.
        return f"{name} is on unless turned off: --{section}{dot}no-{last}."
    near = [one for one in known if _last(one) == last]
    if last in elsewhere:
        near = [elsewhere[last]]
    if not near:
        inside = [one for one in known if one.startswith(f"--{section}.")] if dot else []
        guess = closest(last, [_last(one) for one in inside or known])
        near = [one for one in inside or known if _last(one) == guess]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"there is no option {name}.{hint}"


def _last(option: str) -> str:
    return option.lstrip("-").rpartition(".")[2]
