"""What a run left behind: `config.json`, `environment.json` and `metrics.jsonl`, read as one value.

Reading is strict about what a folder is (a foreign one is refused with a reason) and patient with
how a run ended: a line cut off by a kill is set aside and counted, and where a resumed run wrote
a step again its later line wins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

# What a line of each kind must have; other kinds are kept as they are.
_FIELDS = {
    "train": ("step", "tokens", "loss", "lr"),
    "eval": ("step", "tokens", "loss"),
    "weights": ("step", "tokens", "raw_rms", "predicted_rms"),
    "health": ("step",),
    "sample": ("step", "prompt", "text"),
    "end": ("step",),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, as recorded."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: Mapping[str, tuple[Record, ...]]
    """Kind -> its records by step; each step once, except in kinds this package does not know."""

    unreadable: tuple[int, ...] = ()
    """Numbers of the lines of metrics.jsonl that are no JSON: a killed run cuts its last one."""

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run folder; a missing or foreign one is an error that says why."""
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"no run folder {str(folder)!r}: give the folder a run wrote")
        config = _read_object(folder / "config.json")
        environment = _read_object(folder / "environment.json")
        records, unreadable = _read_metrics(folder / "metrics.jsonl")
        return cls(
            folder=folder,
            config=config,
            environment=environment,
            records=records,
            unreadable=unreadable,
        )

    @property
    def name(self) -> str:
        """The name of the config, or of the folder where it has none."""
        return str(self.config.get("name") or self.folder.name)

    @property
    def placement(self) -> str:
        """Where the multipliers sit; "none" is a plain run."""
        return str(self.setting("placement", "none"))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return `key` of the config: the top level first, then the optimizer, then any section."""
        sections = [self.config, self.config.get("optimizer"), *self.config.values()]
        for section in sections:
            if isinstance(section, Mapping) and key in section:
                return section[key]
        return default

    def of(self, kind: str) -> tuple[Record, ...]:
        """Return the records of one kind, by step."""
        return self.records.get(kind, ())

    def series(self, kind: str, key: str, by: str = "tokens") -> tuple[list[float], list[float]]:
        """Return `by` and `key` of every record of a kind; what is null there is nan here."""
        records = self.of(kind)
        return [number(r.get(by)) for r in records], [number(r.get(key)) for r in records]

    def last(self, kind: str) -> Record | None:
        """Return the last record of a kind, if there is one."""
        records = self.of(kind)
        return records[-1] if records else None

    def final(self, kind: str, key: str) -> float:
        """Return the number at `key` of the last record of a kind; nan without one."""
        return number((self.last(kind) or {}).get(key))

    @property
    def last_step(self) -> int:
        """The last step that any record speaks of."""
        return max((int(r["step"]) for kind in _FIELDS for r in self.of(kind)), default=0)

    @property
    def finished(self) -> bool:
        """Whether the run says that it came to its end, and went no further afterwards."""
        end = self.last("end")
        return end is not None and int(end["step"]) >= self.last_step


def number(value: object) -> float:
    """Return a recorded number as a float; null, or no number at all, is nan."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    # Strict JSON has no word for them, so a trainer writes them as text.
    if value in ("inf", "-inf"):
        return float(value)
    return math.nan


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{str(path.parent)!r} is not a run folder: it has no {path.name}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} holds a {type(value).__name__}, not a JSON object")
    return value


def _read_metrics(path: Path) -> tuple[dict[str, tuple[Record, ...]], tuple[int, ...]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{str(path.parent)!r} is not a run folder: it has no {path.name}"
        ) from None
    unreadable: list[int] = []
    by_kind: dict[str, dict[object, Record]] = {}
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            unreadable.append(line_number)
            continue
        kind = _check_record(record, f"{str(path)!r}, line {line_number}")
        by_kind.setdefault(kind, {})[_key(kind, record, line_number)] = record
    if unreadable and not by_kind:
        raise ValueError(f"{str(path)!r} has no line of JSON: not the metrics of a run")
    records = {kind: _by_step(kind, tuple(found.values())) for kind, found in by_kind.items()}
    return records, tuple(unreadable)


def _check_record(record: object, where: str) -> str:
    """Return the kind of a record that has all its kind needs."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError(f'{where}: expected an object with a "kind", as a run writes it')
    missing = [field for field in _FIELDS.get(record["kind"], ()) if field not in record]
    if missing:
        raise ValueError(f"{where}: a record of kind {record['kind']!r} lacks {missing}")
    return record["kind"]


def _key(kind: str, record: Record, line_number: int) -> object:
    """Return what two lines share when the later one replaces the earlier."""
    if kind == "sample":
        return record["step"], record["prompt"]
    return record["step"] if kind in _FIELDS else line_number


def _by_step(kind: str, records: Sequence[Record]) -> tuple[Record, ...]:
    return tuple(sorted(records, key=lambda r: r["step"]) if kind in _FIELDS else records)
