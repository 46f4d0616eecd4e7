"""What a check-up finds: one line each, with what to do where something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    about: str
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty where all is well."""


class NotTriedError(Exception):
    """A check needs what another one could not get."""


def examined(about: str, check: Callable[[], Finding], advice: str) -> Finding:
    """Return what a check finds; one that raises is a finding too.

    Args:
        advice: What to do if it raises.
    """
    try:
        return check()
    except NotTriedError as missing:
        return Finding(about, "warning", f"not tried: {missing}", "see to what failed first")
    # Whatever goes wrong here would have gone wrong in the run.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        told = (
            first if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {first}"
        )
        return Finding(about, "failed", told, advice)
