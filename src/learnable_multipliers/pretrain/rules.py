"""Rules of a plan in words: for the command line, for config files, and from files of their own.

A rule is one line, `PATTERN key=value ...`: `. only=head kind=scalar`. The pattern is a regular
expression searched for in the names of parameters (`.` is in all of them), the keys are the fields
of `lrm.Rule`. `@FILE` stands for the rules in a file, one a line, where # begins a comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from learnable_multipliers._rules import Rule

_MAX_BYTES = 1 << 20
_EXAMPLE = "'. only=head kind=scalar'"


def parse_rules(lines: Iterable[str]) -> list[Rule]:
    """Return the rules that lines stand for, those of files included."""
    return [parse_rule(line) for line in read_rules(lines)]


def read_rules(lines: Iterable[str]) -> tuple[str, ...]:
    """Return lines with every `@FILE` replaced by the rules in it; a ValueError names its line."""
    rules: list[str] = []
    for line in lines:
        if line.startswith("@"):
            rules += _rules_of(Path(line[1:]))
        else:
            rules.append(line)
    return tuple(rules)


def parse_rule(line: str) -> Rule:
    """Return the rule that a line stands for."""
    pattern, *settings = line.split() or [""]
    if pattern.partition("=")[0] in _READERS and "=" in pattern or not pattern:
        raise ValueError(
            f"rule {line!r} begins with no pattern for the names of parameters: write . for all of "
            f"them, and a whole rule in quotes, {_EXAMPLE}"
        )
    if pattern.startswith("@"):
        raise ValueError(f"rule {line!r}: a file of rules cannot name another one")
    if not settings:
        raise ValueError(
            f"rule {line!r} sets nothing: a rule is a pattern and settings, together in quotes: "
            f"{_EXAMPLE}"
        )
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in _READERS or not equals:
            raise ValueError(
                f"rule {line!r}: {setting!r} is not a setting; write key=value with one of "
                f"{', '.join(_READERS)}"
            )
        if key in given:
            raise ValueError(f"rule {line!r} has {key} twice")
        try:
            given[key] = _READERS[key](value)
        except ValueError as error:
            raise ValueError(f"rule {line!r}: {key}={value}: {error}") from error
    try:
        return Rule(pattern, **given)
    except ValueError as error:
        raise ValueError(f"rule {line!r}: {error}") from error


def _rules_of(path: Path) -> list[str]:
    """Return the lines of a file without comments and empty ones; raise for an invalid rule."""
    try:
        # Opening a pipe could block forever.
        if not path.is_file():
            raise ValueError(f"the rules in {path} cannot be read: there is no such file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1).decode("utf8")
    except OSError as error:
        raise ValueError(f"the rules in {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the rules in {path} cannot be read: it is not a text file") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"the rules in {path} have more than {_MAX_BYTES:,} bytes")
    rules = []
    for number, line in enumerate(content.splitlines(), 1):
        rule = " ".join(line.partition("#")[0].split())
        if not rule:
            continue
        try:
            parse_rule(rule)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        rules.append(rule)
    if not rules:
        raise ValueError(f"{path} holds no rule")
    return rules


# -- values --------------------------------------------------------------------------------------


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError("not a number") from None


def _count(word: str) -> int:
    if not word.isascii() or not word.isdigit() or len(word) > 18 or int(word) < 1:
        raise ValueError("not a whole number of at least 1")
    return int(word)


def _flag(word: str) -> bool:
    if word not in ("true", "false"):
        raise ValueError("not true or false")
    return word == "true"


def _split(word: str) -> dict[str, int]:
    """Read `query:64,key:32,value:32`."""
    rows_of: dict[str, int] = {}
    for part in word.split(","):
        role, colon, rows = part.partition(":")
        if not colon or role in rows_of:
            raise ValueError("not roles with their rows, such as query:64,key:32,value:32")
        rows_of[role] = _count(rows)
    return rows_of


def _start(word: str) -> float | str:
    return word if word == "fold" else _number(word)


_READERS: dict[str, Callable[[str], Any]] = {
    "kind": str,
    "only": str,
    "role": str,
    "split": _split,
    "repeats": _count,
    "transposed": _flag,
    "head_dim": _count,
    "scale": str,
    "init": _start,
    "init_keeps": str,
    "lr_scale": _number,
    "weight_decay": _number,
    "train": str,
    "optional": _flag,
}
"""How the value of each field of a rule is read."""
