"""What the comparison says, as sentences: vector against plain, and against the rivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from learnable_multipliers.experiments import readings
from learnable_multipliers.experiments.claim import mean_interval
from learnable_multipliers.experiments.headline.arms import RIVALS, VECTOR, expected
from learnable_multipliers.experiments.headline.gains import (
    finals,
    format_bounded,
    format_interval,
    gains,
    needed,
    reported_loss,
    verdict,
)
from learnable_multipliers.experiments.presets import NAMES
from learnable_multipliers.experiments.record import Labelled


def sentences(records: Sequence[Labelled]) -> tuple[str, ...]:
    """Return a sentence for each model and optimizer of the protocol."""
    groups = dict.fromkeys((family, kind) for family, kind, _ in expected())
    return tuple(_sentence(records, family, kind) for family, kind in groups)


def _sentence(records: Sequence[Labelled], family: str, kind: str) -> str:
    runs = finals(records)
    labels = {"family": family, "optimizer": kind, "arm": VECTOR.name}
    values = list(gains(runs, reported_loss(runs), labels).values())
    parts = [_against_plain(values)]
    if values:
        needs = needed(readings.select(records, stage="final", size=1), labels)
        if needs is not None:
            tokens = format_bounded(needs.tokens)
            parts.append(f"vector needs {tokens} of plain's tokens for plain's final loss")
        parts += _against_rivals(runs, labels)
    return f"{NAMES[family]}, {NAMES[kind]}: {'; '.join(parts)}."


def _against_plain(values: Sequence[float]) -> str:
    """Return what the gains of vector over plain say."""
    says = verdict(values)
    shown = format_interval(values).replace(" ", " nats ", 1)
    if says == "better":
        return f"vector gains {shown} over plain"
    if says == "worse":
        lost = format_interval(-gain for gain in values).replace(" ", " nats ", 1)
        return f"vector loses {lost} against plain"
    if says == "no difference seen":
        _, _, high = mean_interval(values)
        return (
            f"no difference between vector and plain seen, with a gain of {shown}; one of more "
            f"than {high:.4f} nats is unlikely"
        )
    if says == "too few seeds":
        number = f"{len(values)} {'seed' if len(values) == 1 else 'seeds'}"
        return f"vector and plain have {number} in common, too few for a verdict"
    if says == "not run":
        return "no seed of both vector and plain was run"
    return f"a run of {'plain' if says == 'plain diverged' else 'vector'} diverged"


def _against_rivals(runs: Sequence[Labelled], labels: Mapping[str, str]) -> list[str]:
    """Return how many rivals vector is better than, as parts of a sentence."""
    names = {arm.name for arms in RIVALS.values() for arm in arms}
    group = labels["family"], labels["optimizer"]
    rivals = [name for *of, name in expected() if tuple(of) == group and name in names]
    if not rivals:
        return []
    read = reported_loss(runs)
    counts = Counter(verdict(list(gains(runs, read, labels, name).values())) for name in rivals)
    missing = counts.pop("not run", 0)
    number = len(rivals) - missing
    if not number:
        return ["no rival was run"]
    parts = [f"better than {counts['better']} of {number} rivals"]
    others = (
        ("worse", "worse than {}"),
        ("no difference seen", "no difference from {} seen"),
        ("too few seeds", "too few seeds of {}"),
        ("plain diverged", "{} diverged"),
    )
    parts += [text.format(counts[name]) for name, text in others if counts[name]]
    return [", ".join(parts), *([f"{missing} rivals not run"] if missing else [])]
