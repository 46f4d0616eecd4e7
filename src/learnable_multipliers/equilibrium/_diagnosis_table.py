"""A diagnosis as a table that a person can check in a minute: repeated layers share a line."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from learnable_multipliers._names import layer_template

if TYPE_CHECKING:
    from learnable_multipliers.equilibrium._diagnosis import Reading
    from learnable_multipliers.equilibrium._token_rows import TokenRows
    from learnable_multipliers.equilibrium._verdict import Verdict

_HEADER = ("tensor", "n", "rms", "noise gives", "log ratio", "2 wd sum lr", "indicator", "verdict")
_BANDS = ("rows by frequency", "n", "rms", "noise gives", "log ratio", "indicator", "verdict")


def render(readings: Sequence[Reading], rows: Mapping[str, TokenRows]) -> str:
    """Return the table: medians over the layers of a line, then the rows of embeddings."""
    lines: dict[tuple[str, str, str], list[Reading]] = {}
    for reading in readings:
        key = (reading.kind, layer_template(reading.name), reading.part)
        lines.setdefault(key, []).append(reading)
    table: list[tuple[str, ...]] = [_HEADER]
    for kind in ("matrix", "multiplier", "vector"):
        for (of, name, part), alike in lines.items():
            if of == kind:
                shown = name if part == "weight" else f"{name} {part}"
                table.append(_line(shown, alike))
    text = _aligned(table)
    for name, found in rows.items():
        bands: list[tuple[str, ...]] = [_BANDS]
        for band in found.bands:
            label = "none" if band.high == 0 else f"{band.low:.0e} to {band.high:.0e}"
            bands.append(
                (
                    label,
                    str(band.num_rows),
                    _number(band.measured),
                    _number(band.predicted),
                    _signed(band.log_ratio),
                    _number(band.indicator),
                    band.verdict,
                )
            )
        text += ["", name, *_aligned(bands)]
    return "\n".join(text)


def summarize(verdicts: Mapping[str, Mapping[Verdict, int]]) -> str:
    """Return the share of trapped tensors of each kind, in one line."""
    plural = {"matrix": "matrices", "multiplier": "multipliers", "vector": "vectors"}
    told = []
    for kind, counts in verdicts.items():
        total = sum(counts.values())
        others = ", ".join(f"{counts[word]} {word}" for word in ("free", "open") if counts[word])
        rest = f": {others}" if others else ""
        share = counts["trapped"] / total
        told.append(f"{counts['trapped']} of {total} {plural[kind]} ({share:.0%}{rest})")
    return f"trapped are {', '.join(told)}" if told else "there is nothing to read"


def _line(name: str, readings: list[Reading]) -> tuple[str, ...]:
    verdicts = Counter(reading.verdict for reading in readings)
    verdict = ", ".join(
        word if count == len(readings) else f"{count} {word}" for word, count in verdicts.items()
    )
    notes = {reading.note for reading in readings} - {""}
    if notes:
        verdict += f" ({'; '.join(sorted(notes))})"
    return (
        name,
        str(len(readings)),
        _number(_median(reading.measured for reading in readings)),
        _number(_median(reading.predicted for reading in readings)),
        _signed(_median(reading.log_ratio for reading in readings)),
        _number(_median(reading.settling for reading in readings)),
        _number(_median(reading.indicator for reading in readings)),
        verdict,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
