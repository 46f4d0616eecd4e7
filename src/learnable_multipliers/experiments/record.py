"""What is kept of a run: its config, its outcome and its curves, as one line of JSON.

A line ends with its checksum and holds the whole config. The key is computed from that config when
the line is read: a setting that a later release adds does not part a record from its run.
"""

from __future__ import annotations

import lzma
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from learnable_multipliers._checksum import decode_line, encode_line
from learnable_multipliers._serialization import (
    NOT_FINITE,
    from_dict,
    read_bytes,
    to_dict,
    with_floats,
)
from learnable_multipliers.equilibrium import TensorReading
from learnable_multipliers.experiments.run import Labels, Run, key_of
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics

CURVE_POINTS = 64
"""Most points of a curve."""
SNAPSHOTS = 12
"""Most records of weights, signals or drift."""
VECTORS = 5
"""Most of them that hold row and column multipliers, by far the largest part."""
_DIGITS = 6
_COARSE = 4
"""Significant digits of norms and signals, which seeds scatter by percents."""
_ONLY_LAST = {"weights": ("roles",), "signals": ("rows", "alignment")}
"""What is kept at the end of a run alone: it does not change, or is large."""
_MAX_BYTES = 1 << 30
"""Size of the largest file of records that is read."""
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One finished run."""

    key: str
    """`run.key_of` its config."""
    config: dict[str, Any]
    """The whole `TrainConfig` as plain data."""
    ledger: dict[str, str]
    """Claim -> hash of its definition when the run began."""
    outcome: str
    """finished or diverged."""
    loss: float | None
    """Held-out cross-entropy at the end, in nats per token; None if diverged."""
    bits_per_byte: float | None
    train: dict[str, list[float]]
    """Curves over `step`: loss, lr, grad_norm; at most 64 points each."""
    held_out: dict[str, list[float]]
    """Curve over `step`: loss; the last point is `loss`."""
    weights: list[dict[str, Any]]
    """Records of the weights, at most 12 over the run, the last one of its end: `step`,
    `raw_rms` and `predicted_rms` by parameter name, `multipliers` by name and kind, `roles` in the
    last one alone. Multipliers are a list of their quantiles, see `metrics.meters.QUANTILES`; at
    most 5 of the records have those of rows and columns, the first and the last among them."""
    readings: list[dict[str, Any]]
    """Diagnosis of every tensor at the end: the fields of `equilibrium.TensorReading`."""
    signals: list[dict[str, Any]]
    """Records of `log.signals_every`, at most 12 over the run; all but the last without `rows` and
    `alignment`."""
    drift: list[dict[str, Any]]
    """`step` and the drift along each symmetry, at most 12, where `log.drift` is on."""
    tokens: int
    seconds: float
    """Wall-clock, start-up and evaluation included."""
    tokens_per_second: float
    """Median over the steps."""
    device: str
    torch: str
    tests: dict[str, Any] = field(default_factory=dict)
    """Name -> `loss` and `bits_per_byte` at the end, of further held-out text."""
    benchmarks: dict[str, Any] = field(default_factory=dict)
    """Task -> its metrics at the end, and `items`, the checksum of its requests."""
    data: str = ""
    """Fingerprint of the tokens and their tokenizer."""
    ended: str = ""
    """When the run ended, in UTC."""
    commit: str | None = None
    """Of the source tree that ran; None where it is in none."""

    @property
    def train_config(self) -> TrainConfig:
        """The config, typed."""
        return from_dict(TrainConfig, self.config)


_ADDED = {"tests": {}, "benchmarks": {}} | {
    each.name: each.default for each in fields(Record) if each.default is not MISSING
}
"""What older lines may lack."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A record, and what the run is called in the experiment that reads it."""

    labels: Labels
    record: Record


def labelled(runs: Iterable[Run], records: Mapping[str, Record]) -> list[Labelled]:
    """Return the records, by key, of those runs that have one, in the order of the runs."""
    return [
        Labelled(labels=run.labels, record=records[run.key]) for run in runs if run.key in records
    ]


# -- from the folder of a run ------------------------------------------------------------------


def summarize(
    folder: Path,
    config: TrainConfig,
    *,
    outcome: str,
    readings: Iterable[TensorReading],
    ledger: Mapping[str, str],
    seconds: float,
    device: str,
    data: str,
    commit: str | None = None,
    benchmarks: Mapping[str, Any] | None = None,
) -> Record:
    """Return the record of a run that has ended, from the metrics in its folder."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    last: dict[str, Any] = {"tokens": 0}
    for last in read_metrics(folder):
        by_kind.setdefault(last["kind"], []).append(last)
    train, held_out = by_kind.get("train", []), by_kind.get("eval", [])
    drift = [
        {"step": entry["step"]}
        | {k.removeprefix("drift/"): v for k, v in entry.items() if k.startswith("drift/")}
        for entry in by_kind.get("health", [])
    ]
    finished = outcome == "finished"
    # The first speed has the compiler in it.
    speeds = [entry["tokens_per_second"] for entry in train[1:] or train]
    return Record(
        key=key_of(config),
        config=to_dict(without_paths(config)),
        ledger=dict(ledger),
        outcome=outcome,
        loss=_rounded(held_out[-1]["loss"]) if finished else None,
        bits_per_byte=_rounded(held_out[-1].get("bits_per_byte")) if finished else None,
        train=_curves(train, "loss", "lr", "grad_norm"),
        held_out=_curves(held_out, "loss"),
        weights=_with_few_vectors(_snapshots(by_kind.get("weights", []), "weights")),
        readings=[_rounded(asdict(reading), _COARSE) for reading in readings],
        signals=_snapshots(by_kind.get("signals", []), "signals"),
        drift=_snapshots([entry for entry in drift if len(entry) > 1], "drift"),
        tokens=last["tokens"],
        seconds=_rounded(seconds),
        tokens_per_second=_rounded(statistics.median(speeds)) if speeds else math.nan,
        device=device,
        torch=torch.__version__,
        tests=_rounded(held_out[-1].get("tests", {})) if finished else {},
        benchmarks=_rounded(benchmarks or {}),
        data=data,
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
    )


def without_paths(config: TrainConfig) -> TrainConfig:
    """Return a config without the places on the machine that it ran on."""
    return replace(config, out=Path(), name="", data=replace(config.data, path=None))


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items at equal distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _curves(points: Sequence[Mapping[str, Any]], *names: str) -> dict[str, list[float]]:
    kept = thinned(points, CURVE_POINTS)
    return {
        name: [math.nan if point[name] is None else _rounded(point[name]) for point in kept]
        for name in ("step", *names)
    }


def _snapshots(entries: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    left_out = {"kind", "tokens"}
    kept = [{k: v for k, v in each.items() if k not in left_out} for each in entries]
    kept = thinned(kept, SNAPSHOTS)
    for each in kept[:-1]:
        for name in _ONLY_LAST.get(kind, ()):
            each.pop(name, None)
    return _rounded(kept, _COARSE)


def _with_few_vectors(weights: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = thinned(range(len(weights)), VECTORS)
    return [
        each if i in kept else each | {"multipliers": _scalars(each["multipliers"])}
        for i, each in enumerate(weights)
    ]


def _scalars(multipliers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {"scalar": kinds["scalar"]}
        for name, kinds in multipliers.items()
        if "scalar" in kinds
    }


def _rounded(value: Any, digits: int = _DIGITS) -> Any:
    """Return plain data with floats to a few significant digits."""
    if isinstance(value, Mapping):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


# -- lines and files ---------------------------------------------------------------------------


def to_line(record: Record) -> bytes:
    """Return a record as a line of JSON with its checksum."""
    values = to_dict(record)
    del values["key"]
    return encode_line(values)


def from_line(line: bytes) -> Record:
    """Return the record of a line; a ValueError says why it is none."""
    try:
        values = decode_line(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if any(b'"%s"' % word.encode() in line for word in NOT_FINITE):
        values = with_floats(values) | {"config": values.get("config")}
    record = from_dict(Record, _ADDED | values | {"key": ""}, "the record")
    config = from_dict(TrainConfig, _filled(to_dict(TrainConfig()), record.config))
    return replace(record, key=key_of(config), config=to_dict(config))


def read_records(folder: Path) -> dict[str, Record]:
    """Return the records of all files in a folder, by key; of two of one run, the newer.

    A last line that is cut off, as a killed process leaves it, is left out. Files may have been
    packed with `xz`, which makes them a tenth as large.
    """
    records: dict[str, Record] = {}
    for path in sorted((*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz"))):
        for record in read_file(path):
            before = records.get(record.key)
            if before is None or record.ended >= before.ended:
                records[record.key] = record
    return records


def read_file(path: Path) -> list[Record]:
    """Return the records of one file, in the order they were written."""
    records = []
    # Opening a pipe could block forever.
    content = read_bytes(path, _MAX_BYTES)
    try:
        lines = lzma.decompress(content) if path.suffix == ".xz" else content
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is damaged, or was not packed with xz: {error}") from error
    for number, line in enumerate(lines.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            records.append(from_line(line))
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is not a record of a run ({error}): remove the line"
            ) from error
    return records


def append(path: Path, record: Record) -> None:
    """Add a record to a file, in place of a last line that was cut off."""
    try:
        with path.open("ab+") as file:
            file.truncate(_whole_lines(file))
            file.write(to_line(record))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # Failing writes name no file.
        raise OSError(f"{path} could not be written: {error.strerror or error}") from error


def _whole_lines(file: BinaryIO) -> int:
    """Return the number of bytes up to the end of the last whole line."""
    file.seek(0)
    return sum(len(line) for line in file if line.endswith(b"\n"))


def _filled(default: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the defaults of settings that were not there when it was written."""
    sections = {
        key: _filled(default[key], value)
        for key, value in values.items()
        if isinstance(value, dict) and isinstance(default.get(key), dict)
    }
    return default | values | sections
