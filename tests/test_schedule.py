"""The schedule of a run, against numbers worked out by hand and the laws it keeps."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learnable_multipliers.pretrain.config import ScheduleConfig
from learnable_multipliers.pretrain.trainer.schedule import (
    Schedule,
    Step,
    batch_sequences,
    learning_rate_factor,
    repeated_data_warning,
)

SMALL = ScheduleConfig(tokens=1000, warmup_tokens=100, decay_tokens=300)
SHAPES = ("exponential", "linear", "cosine")


@pytest.mark.parametrize(
    ("tokens", "factor"),
    [
        (0, 0.0),
        (25, 0.25),
        (100, 1.0),
        (700, 1.0),
        (800, 1 / 2),
        (900, 1 / 4),
        (1000, 1 / 8),
        (1100, 1 / 8),
    ],
)
def test_warmup_constant_decay_by_hand(tokens, factor):
    assert learning_rate_factor(SMALL, tokens) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    # 1/8 + 7/8 * (1 + cos(pi/4)) / 2 = 0.87186...
    [("linear", 0.78125, 0.5625), ("cosine", 0.8718592167690427, 0.5625)],
)
def test_other_shapes_by_hand(shape, quarter, half):
    config = replace(SMALL, decay_shape=shape)
    assert learning_rate_factor(config, 775) == pytest.approx(quarter, rel=1e-15)
    assert learning_rate_factor(config, 850) == pytest.approx(half, rel=1e-15)


@pytest.mark.parametrize(
    ("multipliers", "warmup", "decay"),
    [("same", 0.25, 1 / 4), ("no-warmup", 1.0, 1 / 4), ("no-decay", 0.25, 1.0)],
)
def test_multipliers_leave_out_a_part_of_the_schedule(multipliers, warmup, decay):
    plan = Schedule(replace(SMALL, multipliers=multipliers), 1, 25)
    rates = {step.tokens_before + 25: step.lr_factor * step.multiplier_factor for step in plan}
    assert rates[25] == pytest.approx(warmup, rel=1e-15)
    assert rates[100] == rates[700] == 1.0
    assert rates[900] == pytest.approx(decay, rel=1e-15)
    # The matrices' own rate is the same in all.
    assert [step.lr_factor for step in plan] == [step.lr_factor for step in Schedule(SMALL, 1, 25)]


def test_defaults_are_those_of_the_paper():
    config = ScheduleConfig()
    assert config.decay_start == 25e9
    assert learning_rate_factor(config, 50_000_000) == 0.5
    assert learning_rate_factor(config, 25_000_000_000) == 1.0
    assert learning_rate_factor(config, 27_500_000_000) == pytest.approx(8**-0.5)


def test_long_run_of_the_paper_ends_at_the_minimum():
    giga = 10**9
    config = ScheduleConfig(
        tokens=240 * giga, decay_tokens=40 * giga, decay_factor=32.0, minimum_tokens=40 * giga
    )
    assert learning_rate_factor(config, 160 * giga) == 1.0
    assert learning_rate_factor(config, 168 * giga) == pytest.approx(0.5)
    assert learning_rate_factor(config, 200 * giga) == 1 / 32
    assert learning_rate_factor(config, 220 * giga) == 1 / 32
    assert learning_rate_factor(config, 240 * giga) == 1 / 32


@pytest.mark.parametrize("shape", SHAPES)
@given(factor=st.floats(1.0, 1e4), warmup=st.integers(0, 600), decay=st.integers(0, 400))
def test_rate_is_continuous_and_rises_then_falls(shape, factor, warmup, decay):
    config = ScheduleConfig(
        tokens=1000,
        warmup_tokens=warmup,
        decay_tokens=decay,
        decay_factor=factor,
        decay_shape=shape,
    )
    rates = [learning_rate_factor(config, tokens) for tokens in range(1001)]
    assert all(a < b for a, b in pairwise(rates[: warmup + 1]))
    assert rates[warmup] == 1.0
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert rates[-1] == (1 / factor if decay else 1.0)
    # No jump: a token changes the rate by no more than the steepest slope allows.
    slope = max(1 / max(warmup, 1), max(math.log(factor), math.pi / 2) / max(decay, 1))
    assert all(abs(a - b) <= slope * (1 + 1e-9) for a, b in pairwise(rates))


RAMP = ScheduleConfig(
    tokens=3000,
    warmup_tokens=0,
    decay_tokens=0,
    rampup_tokens=600,
    rampup_start_sequences=2,
    rampup_increment_sequences=2,
)


def test_rampup_by_hand():
    # 2 -> 8 in three stages of 200 tokens.
    expected = {0: 2, 199: 2, 200: 4, 399: 4, 400: 6, 599: 6, 600: 8, 5000: 8}
    assert {tokens: batch_sequences(RAMP, tokens, 8) for tokens in expected} == expected


def test_plan_by_hand():
    # Sequences of 50 tokens: two batches of 100, one of 200, one of 300 passing 600, then 400s.
    plan = Schedule(RAMP, 8, 50)
    assert [step[:3] for step in plan[:7]] == [
        (0, 0, 2),
        (1, 100, 2),
        (2, 200, 4),
        (3, 400, 6),
        (4, 700, 8),
        (5, 1100, 8),
        (6, 1500, 8),
    ]
    assert [step.lr_factor for step in plan[:5]] == [0.5, 0.5, 0.5**0.5, 0.75**0.5, 1.0]
    assert len(plan) == 10
    assert plan[-1].tokens_before == 2700


def test_rate_over_root_batch_is_constant_on_the_ramp():
    plan = Schedule(RAMP, 8, 7)
    assert {step.sequences for step in plan} == {2, 4, 6, 8}
    ratios = [step.lr_factor / math.sqrt(step.sequences) for step in plan]
    assert ratios == pytest.approx([8**-0.5] * len(plan), rel=1e-15)


def test_first_step_trains_and_last_step_is_at_the_end_of_the_decay():
    plan = Schedule(SMALL, 5, 10)
    assert len(plan) == 20
    assert plan[0].lr_factor == 0.5
    assert plan[-1].lr_factor == 1 / 8
    assert plan[-2].lr_factor == pytest.approx(8 ** -(250 / 300))


@given(full=st.integers(1, 40), length=st.integers(1, 64), stages=st.integers(0, 4))
def test_plan_accounts_for_every_token(full, length, stages):
    ramp = {"rampup_tokens": 500, "rampup_start_sequences": full} if stages else {}
    config = replace(SMALL, **ramp, rampup_increment_sequences=3)
    full += 3 * stages
    plan = Schedule(config, full, length)
    assert [step.step for step in plan] == list(range(len(plan)))
    seen = 0
    for step in plan:
        assert step.tokens_before == seen
        assert step.sequences == batch_sequences(config, seen, full)
        seen += step.sequences * length
    assert 0 <= seen - config.tokens < plan[-1].sequences * length


def one_by_one(config, full, length):
    """Return all steps by the definition, each from the tokens before it."""
    plan, tokens = [], 0
    while tokens < config.tokens:
        sequences = batch_sequences(config, tokens, full)
        after = tokens + sequences * length
        factor = learning_rate_factor(config, after) * math.sqrt(sequences / full)
        plan.append(Step(len(plan), tokens, sequences, factor))
        tokens = after
    return plan


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
def test_computed_steps_are_those_of_the_definition_bit_for_bit(shape, data):
    start, increment = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    full, length = start + increment * data.draw(st.integers(1, 12)), data.draw(st.integers(1, 90))
    tokens = data.draw(st.integers(1, 20_000))
    warmup = data.draw(st.integers(0, tokens))
    config = ScheduleConfig(
        tokens=tokens,
        warmup_tokens=warmup,
        decay_tokens=data.draw(st.integers(0, tokens - warmup)),
        decay_shape=shape,
        rampup_tokens=data.draw(st.integers(0, tokens)),
        rampup_start_sequences=start,
        rampup_increment_sequences=increment,
    )
    plan, expected = Schedule(config, full, length), one_by_one(config, full, length)
    assert list(plan) == [plan[i] for i in range(len(plan))] == plan[:] == expected
    assert plan[-1] == expected[-1]
    assert plan.batch_sizes == list(dict.fromkeys(step.sequences for step in expected))
    assert plan.peak_factor == max(step.lr_factor for step in expected)
    counts = [0, *(step.tokens_before + step.sequences * length for step in expected)]
    assert [plan.tokens_before(step) for step in range(len(plan) + 1)] == counts


def test_a_run_of_any_length_is_planned_at_once():
    config = ScheduleConfig(tokens=1 << 62, warmup_tokens=10, decay_tokens=1 << 60)
    plan = Schedule(config, 1, 1)
    assert len(plan) == 1 << 62
    assert plan[-1] == Step((1 << 62) - 1, (1 << 62) - 1, 1, 1 / 8)
    assert plan.peak_factor == plan[9].lr_factor == 1.0
    assert plan.tokens_before(len(plan)) == 1 << 62
    assert plan.begins_like(Schedule(config, 1, 1), 1 << 61)


def test_schedules_begin_alike_up_to_where_they_part():
    longer = replace(SMALL, tokens=2000)
    one, other = Schedule(SMALL, 5, 10), Schedule(longer, 5, 10)
    same = [step == its for step, its in zip(one, other, strict=False)].index(False)
    assert same == 14
    assert one.begins_like(other, same)
    assert not one.begins_like(other, same + 1)
    assert not one.begins_like(one, len(one) + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "schedule.tokens must be a number of at least 1"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
        ({"warmup_tokens": 701}, "longer than the run"),
        ({"minimum_tokens": 601}, "longer than the run"),
        ({"rampup_tokens": 1001}, "rampup_tokens"),
        ({"decay_factor": 0.5}, "decay_factor"),
        ({"decay_factor": math.nan}, "decay_factor"),
        ({"rampup_start_sequences": 0}, "rampup_start_sequences"),
        ({"rampup_increment_sequences": 0}, "rampup_increment_sequences"),
    ],
)
def test_impossible_settings_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"tokens": 60_000}, {"warmup": 3000, "decay": 12_000}),
        ({"tokens": 51_000, "decay_tokens": 9}, {"warmup": 2550}),
        ({"minimum_tokens": 700_000}, {"decay": 204_800, "minimum": 204_800}),
        ({"tokens": 1}, {"warmup": 0, "decay": 0}),
    ],
)
def test_parts_longer_than_the_run_come_with_options_that_work(change, options):
    tiny = {"tokens": 1_024_000, "warmup_tokens": 51_200, "decay_tokens": 348_160} | change
    with pytest.raises(ValueError, match="are longer than the run") as refused:
        ScheduleConfig(**tiny)
    message = str(refused.value)
    for name in ("warmup_tokens", "decay_tokens", "tokens"):
        assert f"{name} ({tiny[name]})" in message
    found = {name: int(n) for name, n in re.findall(r"--schedule\.(\w+)-tokens (\d+)", message)}
    assert found == options
    ScheduleConfig(**(tiny | {f"{name}_tokens": number for name, number in found.items()}))


def test_a_run_that_repeats_its_data_often_is_reported():
    config = ScheduleConfig(tokens=1_024_000, warmup_tokens=0, decay_tokens=0)
    assert repeated_data_warning(config, 34_758) == (
        "the run reads its 34.8k tokens of data 29.5 times, but repeating text more than about "
        "4 times helps little: shorten the run (--schedule.tokens 139032) or use more text"
    )
    assert repeated_data_warning(replace(config, tokens=139_033), 34_758) is not None
    assert repeated_data_warning(replace(config, tokens=139_032), 34_758) is None


@pytest.mark.parametrize("full", [1, 2, 7])
def test_ramp_that_does_not_divide_is_rejected(full):
    with pytest.raises(ValueError, match="cannot ramp"):
        Schedule(RAMP, full, 50)


@pytest.mark.parametrize(("full", "length"), [(0, 5), (5, 0)])
def test_empty_batch_is_rejected(full, length):
    with pytest.raises(ValueError, match="at least 1"):
        Schedule(SMALL, full, length)


def test_a_ramp_of_too_many_stages_is_rejected():
    config = replace(RAMP, rampup_increment_sequences=1)
    with pytest.raises(ValueError, match="ramps up in 999,998 stages, and 10,000 are the most"):
        Schedule(config, 1_000_000, 50)
