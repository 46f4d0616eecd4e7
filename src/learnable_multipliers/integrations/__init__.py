"""Adapters for training frameworks, and readers of their checkpoints for `lrm diagnose`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learnable_multipliers.equilibrium._monitor import Alarm


def missing(extra: str) -> ImportError:
    """Return the error for a framework that is not installed."""
    return ImportError(
        f"{extra} is not installed: pip install 'learnable-multipliers[{extra}]'", name=extra
    )


def new_alarms(alarms: Iterable[Alarm], seen: set[str]) -> list[Alarm]:
    """Return the alarms about problems that are not in `seen`, and add them to it."""
    new = []
    for alarm in alarms:
        if alarm.about not in seen:
            seen.add(alarm.about)
            new.append(alarm)
    return new
