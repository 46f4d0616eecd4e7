"""Claims of the paper as data: what is measured, what would confirm it, and the verdict.

A statistic has one value for each seed. Its interval is the two-sided 95% t-interval of the mean:
with three seeds 2.48 standard deviations either way. Values that agree in every seed, as shares and
counts may, give an interval without width. A run that diverged stays in the statistic: its
loss is infinite, and so is a difference with it. Where every seed is infinite with one sign, the
interval is that infinity; where some are, or where a value is NaN (both sides diverged), it is the
whole line, which is what the t-interval tends to as one value grows, and decides nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

from learnable_multipliers.experiments.record import Labelled

Verdict = Literal["reproduced", "not at this scale", "contradicted", "underpowered", "not run"]
BySeed = Mapping[int, float]
"""A statistic, once for each seed."""
MIN_SEEDS = 3
"""Fewer prove nothing."""
_WORST_FIRST: tuple[Verdict, ...] = (
    "not run",
    "contradicted",
    "underpowered",
    "not at this scale",
    "reproduced",
)


@dataclass(frozen=True, kw_only=True)
class Test:
    """A statistic with the bound that the paper's statement sets it.

    With a 95% interval [low, high] over seeds and a bound from below: reproduced if low >= bound;
    contradicted if high <= opposite; not at this scale if high < bound and the interval is
    narrower than the paper's effect; underpowered otherwise, and with fewer than three seeds. A
    bound from above is the mirror image.
    """

    # Not a test of pytest's.
    __test__ = False

    name: str
    """Key in what an experiment's `analyse` returns: "C2.frozen"."""
    what: str
    """The statistic in words, with its unit."""
    bound: float
    """What the statistic must reach."""
    side: Literal["at least", "at most"] = "at least"
    opposite: float
    """From here on, on the other side of the bound, the claim is contradicted."""
    effect: float
    """Size of the paper's effect in the statistic's unit."""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.bound, self.opposite, self.effect))):
            raise ValueError(f"test {self.name}: bound, opposite and effect must be finite numbers")
        sign = 1 if self.side == "at least" else -1
        if sign * (self.bound - self.opposite) <= 0:
            where = "below" if self.side == "at least" else "above"
            raise ValueError(
                f"test {self.name}: {self.opposite:g} cannot contradict a statistic of "
                f"{self.side} {self.bound:g}; set opposite to a number {where} the bound"
            )
        if self.effect <= 0:
            raise ValueError(
                f"test {self.name}: effect is {self.effect:g}, but it is a size: above zero"
            )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of the paper; all of its tests must hold."""

    id: str
    """C1 to C24."""
    statement: str
    """What the paper says, in our words."""
    where: str
    """Section or figure."""
    tests: tuple[Test, ...] = ()
    """None: nothing here judges it; `note` says what does."""
    note: str = ""
    """What to know about the test, or where the claim is checked instead."""

    @property
    def hash(self) -> str:
        """What records carry: a claim that changed later does not judge them."""
        text = json.dumps([self.id, self.statement, [asdict(test) for test in self.tests]])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A test with its statistic over the seeds."""

    test: Test
    by_seed: dict[int, float]
    mean: float
    """NaN without any seed."""
    low: float
    """Ends of the 95% interval of the mean; the whole line where there is none."""
    high: float
    verdict: Verdict

    @property
    def n(self) -> int:
        """Number of seeds."""
        return len(self.by_seed)

    @property
    def why(self) -> str:
        """What the verdict rests on, in words."""
        if not self.n:
            return "no seed has all of its runs"
        if self.n < MIN_SEEDS:
            return f"a verdict takes at least {MIN_SEEDS} seeds"
        if self.verdict == "reproduced":
            return "the interval clears the bound"
        if self.verdict == "contradicted":
            return f"the interval lies beyond {self.test.opposite:.3g}, where the opposite holds"
        if self.verdict == "not at this scale":
            return (
                "the interval misses the bound and is narrower than the paper's effect, "
                f"{self.test.effect:.3g}"
            )
        if not all(map(math.isfinite, self.by_seed.values())):
            return "runs of some seeds diverged, so there is no interval"
        if self.low < self.test.bound <= self.high or self.low <= self.test.bound < self.high:
            return "the interval reaches across the bound"
        return (
            "the interval misses the bound, but is wider than the paper's effect, "
            f"{self.test.effect:.3g}"
        )


def judge(test: Test, by_seed: BySeed) -> Judged:
    """Judge a test by its statistic of each seed; no seed is "not run"."""
    values = [float(value) for value in by_seed.values()]
    mean, low, high = mean_interval(values)
    # A bound from above is one from below with the axis turned around.
    bound, opposite, ends = test.bound, test.opposite, (low, high)
    if test.side == "at most":
        bound, opposite, ends = -bound, -opposite, (-high, -low)
    verdict: Verdict
    if not values:
        verdict = "not run"
    elif len(values) < MIN_SEEDS:
        verdict = "underpowered"
    elif ends[0] >= bound:
        verdict = "reproduced"
    elif ends[1] <= opposite:
        verdict = "contradicted"
    elif ends[1] < bound and ends[1] - ends[0] < test.effect:
        verdict = "not at this scale"
    else:
        verdict = "underpowered"
    return Judged(test=test, by_seed=dict(by_seed), mean=mean, low=low, high=high, verdict=verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a claim whose tests have these; "not run" without any."""
    present = set(verdicts) or {"not run"}
    return next(verdict for verdict in _WORST_FIRST if verdict in present)


def counted(claim: Claim, records: Iterable[Labelled]) -> list[Labelled]:
    """Return the records that may judge a claim: those made under its present definition."""
    return [each for each in records if each.record.ledger.get(claim.id) == claim.hash]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its two-sided 95% t-interval."""
    if not values or any(map(math.isnan, values)):
        return math.nan, -math.inf, math.inf
    if not all(map(math.isfinite, values)):
        mean = sum(values)
        certain = len(values) > 1 and len(set(values)) == 1
        return (mean, mean, mean) if certain else (mean, -math.inf, math.inf)
    mean = statistics.mean(values)
    if len(values) == 1:
        return mean, -math.inf, math.inf
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


@cache
def t_quantile(degrees: int) -> float:
    """Return the t that 95% of Student's distribution lie within, either way: 4.30 for two."""
    low, high = 1.0, 16.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)


def _within(t: float, degrees: int) -> float:
    """Return the probability that |T| <= t: a finite sum for a whole number of degrees."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    # sin(a) (1 + 1/2 cos^2 + 1/2 3/4 cos^4 + ...) for even degrees, up to cos^(degrees - 2);
    # 2/pi (a + sin(a) (cos + 2/3 cos^3 + ...)) for odd ones.
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
