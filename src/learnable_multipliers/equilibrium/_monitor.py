"""The health of a run: plain metrics, and alarms in words.

Read-only: ranges of the multipliers, drift along scale symmetries, which tensors noise and decay
hold, and how noisy gradients are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._gauge import Drift, drift, symmetry_positions
from learnable_multipliers._multiplier import multiplier
from learnable_multipliers.equilibrium._diagnosis import PLURAL, count_verdicts, summarize
from learnable_multipliers.equilibrium._gains import Gain, Gains
from learnable_multipliers.equilibrium._prediction import Expectations, TensorPart, TrainedTensor
from learnable_multipliers.equilibrium._readings import TensorReading, read_tensor, rms
from learnable_multipliers.equilibrium._sources import Source
from learnable_multipliers.symmetry import Symmetries

_GAINS = {"row": "rows", "col": "columns"}
_DRIFT_BOUND = 10.0


@dataclass(frozen=True)
class Range:
    """The multipliers of one matrix along one axis."""

    name: str
    part: TensorPart
    smallest: float
    """In absolute value, as the largest."""
    largest: float
    num_crossed: int
    """How many are zero or have another sign than at the start."""
    size: int


@dataclass(frozen=True)
class Alarm:
    """A problem that needs attention."""

    about: str
    """What the problem is: equal for the same problem at another step."""
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Health:
    """Measurements of a run at one step."""

    ranges: tuple[Range, ...]
    """Of the multipliers of each matrix: `name`, `part`, `smallest`, `largest`, `num_crossed`."""
    drifts: dict[str, tuple[Drift, ...]]
    """By symmetry in words, one for each layer it repeats in; since the start of the run."""
    readings: tuple[TensorReading, ...]
    """Of every tensor, without the rows of embeddings."""
    alarms: tuple[Alarm, ...]
    """What needs attention; `print` shows the text."""
    gains: tuple[Gain, ...] = ()
    """Noise of the gradients that multipliers would have, from a monitor with `gains`."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers under flat names, for any logger."""
        metrics: dict[str, float] = {}
        if self.ranges:
            metrics["multipliers/smallest"] = min(r.smallest for r in self.ranges)
            metrics["multipliers/largest"] = max(r.largest for r in self.ranges)
            metrics["multipliers/crossed_zero"] = sum(r.num_crossed for r in self.ranges)
        for words, drifts in self.drifts.items():
            metrics[f"drift/{words}"] = rms_of(drifts)
        if self.drifts:
            metrics["drift/largest"] = max(d.largest for ds in self.drifts.values() for d in ds)
        for kind, counts in count_verdicts(self.readings).items():
            for verdict in ("trapped", "free"):
                metrics[f"{verdict}/{PLURAL[kind]}"] = counts[verdict] / sum(counts.values())
            indicators = (r.indicator for r in self.readings if r.kind == kind)
            if known := [indicator for indicator in indicators if indicator is not None]:
                metrics[f"noise/{PLURAL[kind]}"] = statistics.median(known)
        for part, plural in _GAINS.items():
            if known := [gain.indicator for gain in self.gains if gain.part == part]:
                metrics[f"gains/{plural}"] = statistics.median(known)
        return metrics

    def __str__(self) -> str:
        lines = [summarize(count_verdicts(self.readings))]
        numbers = self.metrics()
        noise = [f"{p} {numbers[k]:.3g}" for p in PLURAL.values() if (k := f"noise/{p}") in numbers]
        if noise:
            lines.append(f"noise indicator, 1 for pure noise: {', '.join(noise)}")
        gains = [f"{p} {numbers[k]:.3g}" for p in _GAINS.values() if (k := f"gains/{p}") in numbers]
        if gains:
            lines.append(f"the same of multipliers, if there were any: {', '.join(gains)}")
        if self.ranges:
            lines.append(
                f"multipliers from {numbers['multipliers/smallest']:.3g} to "
                f"{numbers['multipliers/largest']:.3g} in absolute value"
            )
        lines += [
            f"drift by a factor of {math.exp(rms_of(drifts)):.3g}: {words}"
            for words, drifts in self.drifts.items()
        ]
        return "\n".join([*lines, *(f"! {alarm}" for alarm in self.alarms)])


class Monitor:
    """Follows a run: make it before the first step, and ask for `health` now and then::

        monitor = lrm.Monitor(opt, lrm.find_symmetries(model, plan, inputs))
        ...
        health = monitor.health()
        log(health.metrics())
        for alarm in health.alarms:
            print(alarm)

    A hook on the optimizer records the learning rate of every step. A reading takes a few numbers
    from each tensor; with sharded tensors it is collective: call it on all ranks.

    Args:
        symmetries: Symmetries to measure drift along; none by default.
        drift_bound: The factor by which scales may drift along a symmetry, from their start, before
            there is an alarm.
        model: The model of a plain torch optimizer (`lrm.diagnose` says which can be read); without
            multipliers there is no drift to measure.
        gains: Also follow the gradients that row and column multipliers would have in a run without
            them: each step reads weights and gradients once more.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        symmetries: Symmetries | None = None,
        *,
        drift_bound: float = _DRIFT_BOUND,
        model: nn.Module | None = None,
        gains: bool = False,
    ):
        if not drift_bound > 1:
            raise ValueError(f"drift_bound is a factor greater than 1, got {drift_bound:g}")
        if drift_bound != _DRIFT_BOUND and symmetries is None:
            raise ValueError(
                "drift_bound has no effect without symmetries: give those of "
                "lrm.find_symmetries(model, plan, inputs), or leave it out"
            )
        self._source, self._bound = Source(optimizer, model), drift_bound
        if self._source.ours is None and symmetries is not None:
            raise ValueError(
                f"{type(optimizer).__name__} trains no multipliers, so nothing drifts along "
                "symmetries: leave them out"
            )
        self._gains = self._followed_gains(model) if gains else None
        self._signs: dict[tuple[str, str], Tensor] = {}
        self._starts: dict[tuple[str, str], float] = {}
        self._before = 0
        walks = {}
        for tensor in self._source.tensors():
            walks[tensor.key] = tensor.walk
            self._starts[tensor.key] = rms(tensor.value)
            # A run may be joined late.
            self._before = max(self._before, tensor.steps)
            if tensor.kind == "multiplier" and tensor.value.numel():
                self._signs[tensor.key] = _values(tensor).sign()
        self._expectations = Expectations(walks)
        self._alike = {} if symmetries is None else symmetries.alike()
        self._positions = {
            words: symmetry_positions(self._source.optimizer, alike)
            for words, alike in self._alike.items()
        }
        self._skipped_before = self._source.num_skipped
        self._hooks = [
            self._source.optimizer.register_step_post_hook(
                lambda opt, args, kwargs: self.follow(float(opt.param_groups[0]["lr"]))
            )
        ]
        if (followed := self._gains) is not None:
            self._hooks.append(
                self._source.optimizer.register_step_pre_hook(lambda *_: followed.follow())
            )

    def _followed_gains(self, model: nn.Module | None) -> Gains:
        if self._source.ours is not None or model is None:
            raise ValueError(
                f"gains are for runs without multipliers: those that "
                f"{type(self._source.optimizer).__name__} trains are in health().readings"
            )
        groups = self._source.optimizer.param_groups
        return Gains(model, [parameter for group in groups for parameter in group["params"]])

    def follow(self, lr: float) -> None:
        """Record a step taken at this learning rate (that of the first group).

        The hook does so; call it if steps bypass the hook, as in a captured graph.
        """
        self._expectations.step(lr)

    def resume(self, lrs: Iterable[float], num_skipped: int = 0) -> None:
        """Continue with a run that was loaded from a checkpoint after the monitor was made.

        The monitor must have been made at the start of the run. Also for a run that goes back to an
        earlier step: its own record of steps is replaced.

        Args:
            lrs: The learning rate of every step taken.
            num_skipped: Steps among them that were skipped.
        """
        self._expectations = Expectations(self._expectations.walks, lrs)
        self._skipped_before = self._source.num_skipped - num_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return its state so far: numbers and strings, which JSON can hold."""
        return {
            "before": self._before,
            "num_skipped": self._source.num_skipped - self._skipped_before,
            "expectations": self._expectations.state(),
            "starts": {_joined(key): rms for key, rms in self._starts.items()},
            # Multipliers start at 1 unless a rule says otherwise.
            "signs": {
                _joined(key): signs.flatten().tolist()
                for key, signs in self._signs.items()
                if bool((signs != 1).any())
            },
            "positions": {
                words: [position.tolist() for position in positions]
                for words, positions in self._positions.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another monitor of the same run; load the optimizer first.

        Drift along a symmetry that the other monitor did not have is measured from now on.
        """
        if {_joined(key) for key in self._starts} != set(state["starts"]):
            raise ValueError("this monitor's state was saved for another model or another plan")
        expectations = Expectations(self._expectations.walks)
        expectations.load(state["expectations"])
        self._expectations = expectations
        self._before = state["before"]
        self._skipped_before = self._source.num_skipped - state["num_skipped"]
        self._starts = {key: state["starts"][_joined(key)] for key in self._starts}
        for key, signs in self._signs.items():
            saved = state["signs"].get(_joined(key))
            ones = torch.ones_like(signs)
            self._signs[key] = ones if saved is None else signs.new_tensor(saved).view_as(signs)
        for words, positions in self._positions.items():
            if words in state["positions"]:
                self._positions[words] = tuple(
                    here.new_tensor(there)
                    for here, there in zip(positions, state["positions"][words], strict=True)
                )

    def close(self) -> None:
        """Stop following the run: remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def health(self) -> Health:
        """Return the health of the run now."""
        skipped = self._source.num_skipped - self._skipped_before
        taken = self._before + self._expectations.steps - skipped
        readings, ranges = [], []
        for tensor in self._source.tensors(taken):
            expected, note = self._expectations.of(tensor, taken)
            readings.append(read_tensor(tensor, expected, note, self._starts))
            if tensor.key in self._signs:
                ranges.append(_range(tensor, self._signs[tensor.key]))
        drifts = {
            words: drift(self._source.optimizer, alike, since=self._positions[words])
            for words, alike in self._alike.items()
        }
        alarms = (*_crossings(ranges), *_drifted(drifts, self._bound))
        gains = () if self._gains is None else self._gains.read()
        return Health(tuple(ranges), drifts, tuple(readings), alarms, gains)


def _joined(key: tuple[str, str]) -> str:
    """Return name and part of a tensor as one word."""
    return "/".join(key)


def rms_of(drifts: Sequence[Drift]) -> float:
    """Return the drift in log units over all members of symmetries that are alike."""
    members = sum(each.symmetry.num_members for each in drifts)
    squares = sum(each.rms**2 * each.symmetry.num_members for each in drifts)
    return math.sqrt(squares / members)


def _values(tensor: TrainedTensor) -> Tensor:
    """Return the multipliers themselves, on either scale."""
    assert tensor.matrix is not None
    return multiplier(tensor.matrix, tensor.value)


def _range(tensor: TrainedTensor, signs: Tensor) -> Range:
    values = _values(tensor)
    # A multiplier that started at 0 has no sign to change.
    crossed = (values * signs <= 0) & (signs != 0)
    low, high = values.abs().aminmax()
    size = values.numel()
    return Range(tensor.name, tensor.part, low.item(), high.item(), int(crossed.sum()), size)


def _crossings(ranges: Sequence[Range]) -> Iterator[Alarm]:
    crossed = [r for r in ranges if r.num_crossed]
    if not crossed:
        return
    kinds = {"row": "row multipliers", "col": "column multipliers", "scalar": "multipliers"}
    most = max(crossed, key=lambda r: r.num_crossed)
    count, size = sum(r.num_crossed for r in crossed), sum(r.size for r in ranges)
    others = f", and elsewhere ({len(crossed) - 1} more)" if len(crossed) > 1 else ""
    yield Alarm(
        "multipliers that crossed zero",
        f"{count:,} of {size:,} multipliers have crossed zero since the start: "
        f"{most.num_crossed:,} of {most.size:,} {kinds[most.part]} of {most.name}{others}. A "
        "multiplier at zero switches its row or column off; past zero its sign is flipped. If the "
        "count keeps growing, lower multiplier_lr_scale, or learn multipliers on the log scale: "
        'lrm.Rule(..., scale="log")',
    )


def _drifted(drifts: Mapping[str, Iterable[Drift]], bound: float) -> Iterator[Alarm]:
    farthest = {words: max(alike, key=lambda d: d.largest) for words, alike in drifts.items()}
    past = [worst for worst in farthest.values() if worst.largest > math.log(bound)]
    if not past:
        return
    most = max(past, key=lambda worst: worst.largest)
    others = f", and others ({len(past) - 1} more)" if len(past) > 1 else ""
    yield Alarm(
        "drift past the bound",
        f"scales have drifted by a factor of {math.exp(most.largest):.3g} along a symmetry, past "
        f"the bound of {bound:g}: {most.symmetry}{others}. This does not change the outputs, but "
        "multipliers far from 1 learn at another relative rate. Raise multiplier_weight_decay, or "
        "call lrm.rebalance_(opt, symmetries) now and then",
    )
