"""The CPU cores of this process, and a limit on the number of threads."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(name: str, count: int) -> None:
    """Raise a ValueError for more threads than a machine can start."""
    most = max(64, 4 * num_cores())
    if count > most:
        raise ValueError(
            f"{name} must be at most {most}, got {count:,}: this process may use {num_cores()} "
            "cores, and more threads do not help"
        )
