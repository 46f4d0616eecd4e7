"""The time that is left: the truth while batches grow, and soon the truth again after a delay."""

import io

import pytest
from rich.console import Console

from learnable_multipliers.pretrain.metrics.pace import Pace
from learnable_multipliers.pretrain.metrics.progress import Display, duration
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.schedule import steps, tokens_after

CONFIG = RECIPES["falcon-h1-0.5b"][1]
LENGTH = CONFIG.data.sequence_length
TOKENS = tokens_after(steps(CONFIG.schedule, CONFIG.data.batch_sequences, LENGTH), LENGTH)
SPEED = 1e5
"""Tokens per second: the run takes 83 hours."""


def played(first, last, delays=None):
    """Return the pace after steps that all have one speed, and the time it is then.

    Args:
        delays: Seconds that something else takes after a step, by its number.
    """
    pace, now = Pace(), 0.0
    for step in range(first, last + 1):
        now += (TOKENS[step] - TOKENS[step - 1]) / SPEED + (delays or {}).get(step, 0.0)
        pace.advance(TOKENS[step], now)
    return pace, now


def test_a_schedule_says_the_tokens_after_every_step():
    plan = steps(CONFIG.schedule, CONFIG.data.batch_sequences, LENGTH)
    assert TOKENS[:3] == [0, 64 * LENGTH, 128 * LENGTH]
    assert TOKENS[:-1] == [step.tokens_before for step in plan]
    assert 0 <= TOKENS[-1] - CONFIG.schedule.tokens < 512 * LENGTH


@pytest.mark.parametrize("step", [2, 10, 300, 545, 546, 900, 1400, 2000, 5000, len(TOKENS) - 2])
def test_a_ramp_of_the_batch_does_not_change_the_time_left(step):
    # From 131k tokens a step to 1.05M: steps are 8 times as long in the end.
    pace, now = played(1, step)
    truth = (TOKENS[-1] - TOKENS[step]) / SPEED
    assert pace.left(TOKENS[-1], now) == pytest.approx(truth, rel=1e-9)
    assert pace.left(TOKENS[-1], now + 1) == pytest.approx(truth - 1, rel=1e-9)


def test_a_table_shows_the_hours_of_the_whole_run_from_its_start():
    now = 0.0
    console = Console(file=io.StringIO(), width=100, force_terminal=True, record=True)
    display = Display(["run"], TOKENS, console, lambda: now)
    for step in range(1, 101):
        now += (TOKENS[step] - TOKENS[step - 1]) / SPEED
        display.advance("run", step)
    console.print(display.frame())
    truth = duration((TOKENS[-1] - TOKENS[100]) / SPEED)
    assert truth == "83h 17m"
    assert console.export_text().splitlines()[1].endswith(truth)


def left_too_long(delays, seconds):
    """Return by what factor the time left is too long, `seconds` after the last delay."""
    last = max(delays)
    step = next(s for s in range(last, len(TOKENS)) if TOKENS[s] - TOKENS[last] > seconds * SPEED)
    pace, now = played(1, step, delays)
    return pace.left(TOKENS[-1], now) / ((TOKENS[-1] - TOKENS[step]) / SPEED)


def test_a_slow_start_is_forgotten():
    # The first step is not counted at all; a batch of another shape may be compiled after it.
    assert left_too_long({1: 600.0}, 2) == pytest.approx(1, abs=1e-9)
    assert left_too_long({1: 60.0, 2: 60.0}, 0.5) > 1.3
    assert left_too_long({1: 60.0, 2: 60.0}, 1200) == pytest.approx(1, abs=0.01)


def test_an_evaluation_is_forgotten_in_minutes_and_regular_ones_are_counted():
    assert left_too_long({3000: 60.0}, 1) == pytest.approx(1.2, abs=0.05)
    assert left_too_long({3000: 60.0}, 900) == pytest.approx(1, abs=0.02)
    # 30 s after every 10 steps of 10.5 s.
    often = dict.fromkeys(range(2000, 3001, 10), 30.0)
    assert left_too_long(often, 1) == pytest.approx(1 + 30 / 105, rel=0.1)


def test_a_run_that_slows_down_is_believed_within_minutes():
    fast, now = played(3000, 3100)
    for step in range(3101, 3201):
        now += 2 * (TOKENS[step] - TOKENS[step - 1]) / SPEED
        fast.advance(TOKENS[step], now)
    truth = 2 * (TOKENS[-1] - TOKENS[3200]) / SPEED
    assert fast.left(TOKENS[-1], now) == pytest.approx(truth, rel=0.01)


def test_a_resumed_run_counts_what_it_did_itself():
    pace = Pace()
    pace.advance(TOKENS[20_000], 0.0)
    assert pace.left(TOKENS[-1], 0.0) is None
    pace.advance(TOKENS[20_001], 12.0)
    to_go = TOKENS[-1] - TOKENS[20_001]
    truth = to_go / (TOKENS[20_001] - TOKENS[20_000]) * 12
    assert pace.left(TOKENS[-1], 12.0) == pytest.approx(truth, rel=1e-9)


def test_steps_of_an_hour_are_averaged():
    pace = Pace()
    for step, hours in enumerate((0.0, 1.0, 3.0, 4.0, 6.0, 7.0, 9.0, 10.0, 12.0)):
        pace.advance(step, 3600 * hours)
    # 1.5 hours a step; the last one alone says 2.
    assert pace.left(100, 12 * 3600) == pytest.approx(92 * 1.5 * 3600, rel=0.05)


def test_a_rollback_is_no_progress_and_no_pace():
    pace, now = played(3000, 3100)
    pace.advance(TOKENS[3050], now + 100)
    truth = (TOKENS[-1] - TOKENS[3050]) / SPEED
    assert pace.left(TOKENS[-1], now + 100) == pytest.approx(truth, rel=1e-9)
