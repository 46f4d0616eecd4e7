"""The records of a run: `config.json`, `environment.json` and `metrics.jsonl`.

Reading is strict about what a folder is (a foreign one is refused with a reason) and patient with
how a run ended: a last line cut off by a kill is set aside and counted, and where a resumed run
wrote a step again its later line wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learnable_multipliers._checksum import decode_line, read_verified

Record = Mapping[str, Any]

# What a line of each kind must have; other kinds are kept as they are.
_FIELDS = {
    "train": ("step", "tokens", "loss", "lr"),
    "eval": ("step", "tokens", "loss"),
    "weights": ("step", "tokens", "raw_rms", "predicted_rms"),
    "health": ("step",),
    "signals": ("step",),
    "sample": ("step", "prompt", "text"),
    "end": ("step",),
}


@dataclass(frozen=True)
class Run:
    """One training run, as recorded."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: Mapping[str, tuple[Record, ...]]
    """Kind -> its records by step; each step once, except in kinds this package does not know."""

    unreadable: int | None = None
    """The number of the last line of metrics.jsonl, where a killed run left it incomplete."""

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run folder; a missing or foreign one is an error that says why."""
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"no run folder {str(folder)!r}: give the folder a run wrote")
        paths = [folder / name for name in ("config.json", "environment.json", "metrics.jsonl")]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(
                    f"{str(folder)!r} is not a run folder: it has no {path.name}"
                )
        return cls(
            folder, read_verified(paths[0]), read_verified(paths[1]), *_read_metrics(paths[2])
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
        values = (part[key] for part in sections if isinstance(part, Mapping) and key in part)
        return next(values, default)

    def of(self, kind: str) -> tuple[Record, ...]:
        """Return the records of one kind, by step."""
        return self.records.get(kind, ())

    def series(self, kind: str, key: str, by: str = "tokens") -> tuple[list[float], list[float]]:
        """Return `by` and `key` of every record of a kind; what is null there is nan here."""
        records = self.of(kind)
        return [number(r.get(by)) for r in records], [number(r.get(key)) for r in records]

    def last(self, kind: str) -> Record:
        """Return the last record of a kind; an empty one if there is none."""
        return self.of(kind)[-1] if self.of(kind) else {}

    def final(self, kind: str, key: str) -> float:
        """Return the number at `key` of the last record of a kind; nan without one."""
        return number(self.last(kind).get(key))

    @property
    def last_step(self) -> int:
        """The last step that any record speaks of."""
        return max((int(r["step"]) for kind in _FIELDS for r in self.of(kind)), default=0)

    @property
    def finished(self) -> bool:
        """Whether the run says that it came to its end, and went no further afterwards."""
        return self.final("end", "step") >= self.last_step

    @property
    def diverged(self) -> str | None:
        """Why the run says that it has diverged; None if it does not."""
        return self.last("end").get("diverged") if self.finished else None


def number(value: Any) -> float:
    """Return a recorded number as a float; null, or no number at all, is nan."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Strict JSON has no word for infinity, so a trainer writes it as text.
    return float(value) if is_number or value in ("inf", "-inf") else math.nan


def _read_metrics(path: Path) -> tuple[dict[str, tuple[Record, ...]], int | None]:
    """Return the records by kind, and the number of a last line that is incomplete."""
    by_kind: dict[str, dict[Any, Record]] = {}
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return _by_step(by_kind), line_number
            record = _record(line, f"{str(path)!r}, line {line_number}")
            kind = record["kind"]
            # A later line replaces an earlier one of the same key.
            key = (record["step"] if kind in _FIELDS else line_number, str(record.get("prompt")))
            by_kind.setdefault(kind, {})[key] = record
    return _by_step(by_kind), None


def _record(line: bytes, where: str) -> Record:
    """Return the record of a complete line."""
    try:
        record = decode_line(line)
    except (ValueError, RecursionError) as error:
        reason = error if type(error) is ValueError else "it is not JSON"
        raise ValueError(
            f"{where}: not a record that a run wrote ({reason}); remove the line"
        ) from None
    if not isinstance(record.get("kind"), str):
        raise ValueError(f'{where}: expected an object with a "kind", as a run writes it')
    kind = record["kind"]
    missing = [field for field in _FIELDS.get(kind, ()) if field not in record]
    if missing:
        raise ValueError(f"{where}: a record of kind {kind!r} lacks {missing}")
    if kind in _FIELDS and not isinstance(record["step"], int):
        raise ValueError(f"{where}: step is {str(record['step'])[:60]!r}, not a whole number")
    return record


def _by_step(by_kind: dict[str, dict[Any, Record]]) -> dict[str, tuple[Record, ...]]:
    return {
        kind: tuple(by_key[key] for key in sorted(by_key, key=lambda key: key[0]))
        for kind, by_key in by_kind.items()
    }
