"""What a user sees of a run: every number of its records, never more than a line of them."""

import io
import math
import re

import pytest
from rich.console import Console

from learnable_multipliers.pretrain.metrics.progress import Display, printable
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.schedule import Schedule

TRAIN = {
    "kind": "train",
    "step": 123,
    "loss": 3.4567,
    "grad_norm": 0.4567,
    "tokens_per_second": 123_456.0,
    "mfu": 0.384,
}
EVAL = {"kind": "eval", "step": 123, "loss": 3.5567}


class Screen:
    """A terminal, and a clock that is moved by hand."""

    def __init__(self, names, total, width, terminal=True):
        self.console = Console(
            file=io.StringIO(), width=width, force_terminal=terminal, record=terminal
        )
        self.now = 0.0
        tokens = range(0, 1000 * total + 1, 1000) if isinstance(total, int) else total
        self.display = Display(
            names, len(tokens) - 1, tokens.__getitem__, self.console, lambda: self.now
        )

    def table(self):
        progress = self.display._progress
        return progress.make_tasks_table(progress.tasks)

    def lines(self) -> list[str]:
        self.console.print(self.table())
        return self.console.export_text().splitlines()


def shown(names, total, width, record=TRAIN) -> list[str]:
    """Return the table after 123 steps, of which 122 took 100 seconds."""
    screen = Screen(names, total, width)
    for step, now in ((1, 0.0), (123, 100.0)):
        screen.now = now
        for name in names:
            screen.display.advance(name, step)
    for name in names:
        screen.display.record(name, record)
        screen.display.record(name, EVAL)
    return screen.lines()


@pytest.mark.parametrize(
    ("width", "numbers"),
    [
        (50, ["loss 3.457"]),
        (70, ["loss 3.457", "123k tok/s"]),
        (80, ["loss 3.457", "held-out 3.557", "123k tok/s"]),
        (100, ["loss 3.457", "held-out 3.557", "123k tok/s", "MFU 38%"]),
        (120, ["loss 3.457", "held-out 3.557", "grad 0.46", "123k tok/s", "MFU 38%"]),
    ],
)
@pytest.mark.parametrize("names", [["tiny"], ["plain", "multipliers"]], ids=len)
def test_each_run_has_a_line_with_its_numbers(names, width, numbers):
    rows = shown(names, 28_610, width)
    assert len(rows) == len(names)
    for name, row in zip(names, rows, strict=True):
        assert len(row) <= width
        assert row.startswith(f"{name} ")
        # 28,487 steps to go at 122 steps in 100 seconds: 23,350 s.
        assert row.endswith(" ".join(["123/28,610", *numbers, "6:29:10"])), row


@pytest.mark.parametrize("name", ["run", "a-name-that-is-much-too-long-for-any-table", "[b]x[/b]"])
def test_no_terminal_is_too_narrow_for_one_line(name):
    for width in range(20, 120):
        (line,) = shown([name], 28_610, width)
        assert len(line) <= width
        if width >= 60:
            assert line.startswith(name[:20])
            assert "123/28,610 loss 3.457 " in line


def test_the_bar_is_as_long_as_the_part_of_the_tokens_that_is_done():
    screen = Screen(["run"], [0, 10, 50, 200], 140)
    screen.display.advance("run", 2)
    with screen.console.capture() as captured:
        screen.console.print(screen.table())
    # The first colour of the bar is that of what is done.
    pieces = re.findall(r"\x1b\[([\d;]+)m([\u2501\u2578\u257a]+)\x1b\[0m", captured.get())
    done = len(pieces[0][1]) - 0.5 * pieces[0][1].count("\u2578")
    whole = sum(len(text) for _, text in pieces)
    assert whole == 40
    assert done == pytest.approx(whole / 4, abs=0.5)


def test_what_is_not_known_is_not_made_up():
    (row,) = Screen(["run"], 500, 80).lines()
    assert row.split()[2:] == ["0/500", "-:--:--"]
    (row,) = shown(["run"], 500, 120, {**TRAIN, "mfu": None, "grad_norm": None})
    assert "MFU" not in row
    assert "grad" not in row


def test_the_loss_of_the_first_step_is_not_shown_for_that_of_the_last():
    screen = Screen(["run"], 8, 100)
    screen.display.record("run", TRAIN | {"step": 1, "loss": 6.269})
    assert "6.269" in screen.lines()[0]
    screen.display.advance("run", 8)
    screen.display.record("run", EVAL | {"step": 8})
    line = screen.lines()[-1]
    assert "6.269" not in line
    assert "3.557" in line


# -- time left --------------------------------------------------------------------------------


CONFIG = RECIPES["falcon-h1-0.5b"][1]
LENGTH = CONFIG.data.sequence_length
SCHEDULE = Schedule.of_run(CONFIG)
TOKENS = [SCHEDULE.tokens_before(step) for step in range(len(SCHEDULE) + 1)]
SPEED = 1e5
"""Tokens per second: the run takes 83 hours."""


def played(first, last, delays=None):
    """Return a screen after steps of one speed, with extra seconds after some of them."""
    screen = Screen(["run"], TOKENS, 100)
    for step in range(first, last + 1):
        screen.now += (TOKENS[step] - TOKENS[step - 1]) / SPEED + (delays or {}).get(step, 0.0)
        screen.display.advance("run", step)
    return screen


def truth_at(step):
    return (TOKENS[-1] - TOKENS[step]) / SPEED


def test_a_schedule_says_the_tokens_after_every_step():
    assert TOKENS[:3] == [0, 64 * LENGTH, 128 * LENGTH]
    assert TOKENS[:-1] == [step.tokens_before for step in SCHEDULE]
    assert 0 <= TOKENS[-1] - CONFIG.schedule.tokens < 512 * LENGTH


@pytest.mark.parametrize("step", [2, 10, 300, 545, 546, 900, 1400, 2000])
def test_a_ramp_of_the_batch_does_not_change_the_time_left(step):
    # From 131k tokens a step to 1.05M: steps are 8 times as long in the end.
    screen = played(1, step)
    assert screen.display.seconds_left("run") == pytest.approx(truth_at(step), abs=1.1)


def test_a_slow_start_and_an_evaluation_are_forgotten():
    # The first step is not counted at all.
    assert played(1, 3, {1: 600.0}).display.seconds_left("run") == pytest.approx(truth_at(3), abs=2)
    for last, factor in ((3001, 1.1), (3150, 1.0)):
        left = played(2900, last, {3000: 60.0}).display.seconds_left("run")
        assert left / truth_at(last) == pytest.approx(factor, abs=0.02)


def test_a_run_that_slows_down_is_believed_within_minutes():
    screen = played(3000, 3100)
    for step in range(3101, 3201):
        screen.now += 2 * (TOKENS[step] - TOKENS[step - 1]) / SPEED
        screen.display.advance("run", step)
    assert screen.display.seconds_left("run") == pytest.approx(2 * truth_at(3200), rel=0.01)


def test_a_resumed_run_counts_the_steps_it_took_itself():
    screen = Screen(["run"], TOKENS, 100)
    screen.display.advance("run", 20_000)
    assert screen.display.seconds_left("run") is None
    screen.now = 12.0
    screen.display.advance("run", 20_001)
    step_tokens = TOKENS[20_001] - TOKENS[20_000]
    truth = (TOKENS[-1] - TOKENS[20_001]) / step_tokens * 12
    assert screen.display.seconds_left("run") == pytest.approx(truth, abs=1.1)


def test_steps_of_an_hour_are_averaged():
    screen = Screen(["run"], range(101), 100)
    for step, hours in enumerate((1.0, 3.0, 4.0, 6.0, 7.0, 9.0, 10.0, 12.0), 1):
        screen.now = 3600 * hours
        screen.display.advance("run", step)
    # 1.57 hours a step; the last one alone says 2.
    left = screen.display.seconds_left("run")
    assert left == pytest.approx(92 * 1.5 * 3600, rel=0.1)


def test_a_rollback_is_no_progress():
    screen = played(3000, 3100)
    screen.display.advance("run", 3050)
    assert screen.display.seconds_left("run") == pytest.approx(truth_at(3050), rel=1e-3)


# -- output -----------------------------------------------------------------------------------


def test_a_live_table_is_drawn_in_place_and_words_go_above_it():
    screen = Screen(["run"], 10, 80)
    with screen.display as display:
        display.advance("run", 4)
        display.record("run", {**TRAIN, "step": 4})
        screen.console.print("said in between")
    text = screen.console.file.getvalue()
    assert text.index("said in between") < text.rindex("3.457")
    # The line is erased and drawn again.
    assert "\r\x1b[2K" in text


def test_a_file_gets_some_forty_whole_lines_of_a_long_run():
    screen = Screen(["run"], 10_000, 60, terminal=False)
    with screen.display as display:
        for step in range(1, 10_001):
            screen.now += 0.5
            display.advance("run", step)
            if step % 10 == 0:
                display.record("run", {**TRAIN, "step": step})
        display.record("run", {**EVAL, "step": 10_000})
        screen.console.print("done")
    *lines, last = screen.console.file.getvalue().splitlines()
    assert last == "done"
    assert 40 <= len(lines) <= 43
    assert lines[0] == (
        "run  step 10/10,000  loss 3.457  grad 0.46  123k tok/s  MFU 38%  1h 23m left"
    )
    assert lines[-1] == (
        "run  step 10,000/10,000  loss 3.457  held-out 3.557  grad 0.46  123k tok/s  MFU 38%"
    )


@pytest.mark.parametrize(
    ("skipped", "told"), [(0, ""), (19, "19 skipped  "), (1234, "1,234 skipped  ")]
)
def test_skipped_steps_are_named_where_there_are_any(skipped, told):
    record = {**TRAIN, "loss": 38.607, "grad_norm": math.nan, "skipped_steps": skipped}
    screen = Screen(["run"], 1000, 60, terminal=False)
    screen.display.record("run", record)
    line = f"run  step 123/1,000  loss 38.607  {told}grad nan  123k tok/s  MFU 38%"
    assert screen.console.file.getvalue() == f"{line}\n"
    # Later evaluations leave it there, and the next record counts again.
    screen.display.record("run", EVAL)
    assert f"loss 38.607  {told}held-out 3.557" in screen.console.file.getvalue()
    for width in range(20, 120):
        (row,) = shown(["run"], 28_610, width, record)
        assert len(row) <= width
        if width >= 64:
            assert " ".join(f"loss 38.607  {told}".split()) in " ".join(row.split())


def test_a_sample_never_controls_the_terminal():
    assert printable("a\x1b[2Jb\x07\tc\n\u00e9") == "a\ufffd[2Jb\ufffd\tc\n\u00e9"
