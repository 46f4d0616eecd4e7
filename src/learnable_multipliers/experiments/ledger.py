"""The ledger: every claim of the paper with its verdict, computed from records.

A claim belongs to one experiment, whose module holds it. A few are judged without training runs, or
not yet at all; they stand here, with a note on where to look.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learnable_multipliers.experiments import catalogue
from learnable_multipliers.experiments.claim import Claim, Judged, Verdict, counted, judge, worst
from learnable_multipliers.experiments.record import Labelled
from learnable_multipliers.experiments.run import Preset

IDS = tuple(f"C{number}" for number in range(1, 25))
ELSEWHERE = (
    Claim(
        id="C15",
        statement="Multipliers improve downstream scores, by 1.21 points on average with Adam and "
        "1.10 with Muon after 200 GT.",
        where="Table 2",
        note="Scores on these benchmarks say something after hundreds of billions of tokens; the "
        "runs here see millions.",
    ),
    Claim(
        id="C16",
        statement="In the forward pass multipliers cost at most a couple of percent of throughput, "
        "and less when the optimizer applies them.",
        where="Section 2, implementation",
        note="Timed, not trained: benchmarks/optimizers.py, results/optimizers-h200.json. A "
        "training step of a 432M Llama takes 0.94% less than with torch's AdamW when the optimizer "
        "applies them (95% interval -1.17% to -0.71%), and 7.4% more in the forward pass.",
    ),
    Claim(
        id="C17",
        statement="Merged into their matrices, multipliers cost neither memory nor time at "
        "inference.",
        where="Section 2, implementation",
        note="An identity, checked by "
        "tests/test_export.py::test_the_exported_model_has_the_logits_of_the_trained_one and "
        "tests/test_reparametrize.py::test_merge_restores_the_order_of_parameters.",
    ),
    Claim(
        id="C20",
        statement="The gradients of raw weights and multipliers follow from that of the effective "
        "weight by the chain rule.",
        where="Eq. 4",
        note="An identity, checked in float64 by "
        "tests/test_multiplier.py::test_gradient_split_equals_autograd and "
        "tests/test_adamw.py::test_optimizer_path_equals_explicit_path_in_float64.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A claim with its verdict."""

    claim: Claim
    experiment: str
    """Name of the experiment that owns the claim; empty if none does."""
    judged: tuple[Judged, ...]
    verdict: Verdict
    num_stale: int
    """Records that do not count: they were made before the claim was as it is now."""

    @property
    def deciding(self) -> Judged | None:
        """The first test that has the claim's verdict; None without tests."""
        return next((each for each in self.judged if each.verdict == self.verdict), None)

    @property
    def notes(self) -> list[str]:
        """What to know of the verdict, as sentences."""
        notes = [self.claim.note] if self.claim.note else []
        if self.num_stale:
            notes.append(
                f"{self.num_stale} records are from before the claim was changed, or made for "
                "others alone, and do not judge it."
            )
        return notes


def verdicts(records: Mapping[str, Sequence[Labelled]]) -> list[Entry]:
    """Return every claim with its verdict, in order.

    Args:
        records: Experiment -> its records; one that is missing has none.
    """
    entries = [
        Entry(claim=claim, experiment="", judged=(), verdict="not run", num_stale=0)
        for claim in ELSEWHERE
    ]
    for name in catalogue.MODULES:
        entries += judge_claims(name, catalogue.load(name), records.get(name, []))
    check([entry.claim.id for entry in entries])
    return sorted(entries, key=lambda entry: IDS.index(entry.claim.id))


def judge_claims(
    name: str, experiment: catalogue.Experiment, records: Sequence[Labelled]
) -> list[Entry]:
    """Return the claims of one experiment, each judged by the records that may judge it."""
    entries = []
    for claim in experiment.CLAIMS:
        kept = counted(claim, records)
        by_test = experiment.analyse(kept)
        judged = tuple(judge(test, by_test.get(test.name, {})) for test in claim.tests)
        entries.append(
            Entry(
                claim=claim,
                experiment=name,
                judged=judged,
                verdict=worst(each.verdict for each in judged),
                num_stale=len(records) - len(kept),
            )
        )
    return entries


def check(ids: Sequence[str]) -> None:
    """Raise a ValueError unless each claim is there once."""
    twice = sorted({each for each in ids if ids.count(each) > 1})
    unknown = sorted(set(ids) - set(IDS))
    missing = [each for each in IDS if each not in ids]
    for claims, problem in (
        (twice, "have two owners"),
        (unknown, "are none of C1 to C24"),
        (missing, "have no owner"),
    ):
        if claims:
            raise ValueError(f"claims {', '.join(claims)} {problem}: see CLAIMS of the experiments")


def command(name: str, preset: Preset) -> str:
    """Return the command that makes the runs of an experiment."""
    requests = " --requests REQUESTS" if preset == "gpu" and catalogue.benchmarks_of([name]) else ""
    return f"lrm experiment {name} --preset {preset} --data DATA{requests}"


def to_json(entries: Sequence[Entry], preset: Preset) -> str:
    """Return the ledger as JSON; the same records give the same text.

    Numbers that JSON does not have are the words inf, -inf and nan.
    """
    claims = [
        {
            "id": entry.claim.id,
            "statement": entry.claim.statement,
            "where": entry.claim.where,
            "verdict": entry.verdict,
            "notes": entry.notes,
            "command": command(entry.experiment, preset) if entry.experiment else None,
            "hash": entry.claim.hash,
            "tests": [_plain_test(judged) for judged in entry.judged],
        }
        for entry in entries
    ]
    return json.dumps({"preset": preset, "claims": claims}, indent=1, allow_nan=False) + "\n"


def _plain_test(judged: Judged) -> dict[str, Any]:
    test = judged.test
    return {
        "name": test.name,
        "what": test.what,
        "side": test.side,
        "bound": test.bound,
        "opposite": test.opposite,
        "effect": test.effect,
        "mean": _plain(judged.mean),
        "interval": [_plain(judged.low), _plain(judged.high)],
        "seeds": {str(seed): _plain(value) for seed, value in sorted(judged.by_seed.items())},
        "verdict": judged.verdict,
    }


def _plain(value: float) -> float | str:
    """Return a number to six digits, so that machines agree on it."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(float(value))
