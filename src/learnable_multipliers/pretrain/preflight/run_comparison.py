"""Whether two runs are one: their tensors bit for bit, their counters and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.pretrain.checkpoint.store import Checkpoint
from learnable_multipliers.pretrain.metrics.log import read_metrics

MEASURED = frozenset({"seconds", "tokens_per_second", "mfu", "memory"})
"""What a clock or a device said: as different as two mornings."""
# Where a run lies and how chatty it is goes into its config; what it computed does not.
_NOT_COMPUTED = MEASURED | {"config"}
_WORDS = {"model": "weights"}


@dataclass(frozen=True)
class Comparison:
    """What was compared, and where it differs."""

    what: str
    compared: int
    differences: tuple[str, ...]


def compare_checkpoints(first: Checkpoint, second: Checkpoint) -> list[Comparison]:
    """Compare the tensors of each file, then the plain data; clocks are left out."""
    found = []
    for file in sorted({*first.tensors, *second.tensors}):
        one, other = first.tensors.get(file, {}), second.tensors.get(file, {})
        found.append(_compare(_WORDS.get(file, file), one, other, _tensor_difference))
    return [*found, _compare("counters", _counters(first), _counters(second), _difference)]


def compare_metrics(first: Path, second: Path) -> Comparison:
    """Compare the records of two folders, one by one and in their order."""
    one, other = (dict(enumerate(without_clock(folder), 1)) for folder in (first, second))
    return _compare("metrics", one, other, _difference)


def without_clock(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run, but for what a clock says."""
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(folder)
    ]


def _counters(kept: Checkpoint) -> dict[str, Any]:
    computed = {key: value for key, value in kept.state.items() if key not in _NOT_COMPUTED}
    return {"step": kept.step, **computed}


def _compare(
    what: str,
    one: Mapping[Any, Any],
    other: Mapping[Any, Any],
    difference: Callable[[Any, Any], str | None],
) -> Comparison:
    names = list(dict.fromkeys((*one, *other)))
    differences = []
    for name in names:
        if name not in one or name not in other:
            differences.append(f"{name} is in the {'second' if name in other else 'first'} alone")
        elif told := difference(one[name], other[name]):
            differences.append(f"{name}: {told}")
    return Comparison(what, len(names), tuple(differences))


def _tensor_difference(one: Tensor, other: Tensor) -> str | None:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    # Bytes, because NaN equals NaN here, and 0 does not equal -0.
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if torch.equal(*bits):
        return None
    far = (one.double() - other.double()).abs().max().item()
    return f"up to {far:.1e} apart"


def _difference(one: Any, other: Any) -> str | None:
    # As text, because NaN equals NaN here.
    return None if repr(one) == repr(other) else f"{_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
