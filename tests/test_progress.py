"""What a user sees of a run: every number of its records, never more than a line of them."""

import io
import re

import pytest
from rich.console import Console

from learnable_multipliers.pretrain.metrics.progress import Display, duration, in_short, printable

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
        tokens = [1000 * step for step in range(total + 1)] if isinstance(total, int) else total
        self.display = Display(names, tokens, self.console, lambda: self.now)

    def lines(self) -> list[str]:
        self.console.print(self.display.frame())
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


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("names", [["tiny"], ["plain", "multipliers"]], ids=len)
def test_every_number_stands_under_its_name(names, width):
    header, *rows = shown(names, 28_610, width)
    assert len(rows) == len(names)
    assert max(map(len, [header, *rows])) <= width
    ends = {match[0]: match.end() for match in re.finditer(r"\S+", header)}
    # 28,487 steps to go at 122 steps in 100 seconds: 23,350 s.
    expected = {
        "step": "123/28,610",
        "loss": "3.457",
        "held-out": "3.557",
        "grad": "0.46",
        "tok/s": "123k",
        "MFU": "38%",
        "left": "6h 29m",
    }
    assert list(ends) == list(expected)
    for name, row in zip(names, rows, strict=True):
        assert row.startswith(name)
        for column, value in expected.items():
            assert row[: ends[column]].endswith(f" {value}"), (column, row)


def test_the_bar_is_as_long_as_the_part_that_is_done():
    screen = Screen(["run"], 200, 100)
    screen.display.advance("run", 50)
    with screen.console.capture() as captured:
        screen.console.print(screen.display.frame())
    # Colour tells done from to do; the first colour of the bar is that of what is done.
    pieces = re.findall(r"\x1b\[([\d;]+)m([\u2501\u2578\u257a]+)\x1b\[0m", captured.get())
    done = sum(len(text) - 0.5 * text.count("\u2578") for colour, text in pieces[:1])
    whole = sum(len(text) for _, text in pieces)
    assert whole == 40
    assert done == pytest.approx(whole / 4, abs=0.5)


@pytest.mark.parametrize("name", ["run", "a-name-that-is-much-too-long-for-any-table", "[b]x[/b]"])
def test_a_narrow_terminal_gets_fewer_columns_and_no_second_line(name):
    for width in range(20, 120):
        lines = shown([name], 28_610, width)
        assert len(lines) == 2, width
        assert max(map(len, lines)) <= width
        if width >= 60:
            assert {"step", "loss", "left"} <= set(lines[0].split())
            assert lines[1].startswith(name[:20])


def test_what_is_not_known_is_not_made_up():
    header, row = Screen(["run"], 500, 80).lines()
    assert header.split() == ["step", "loss", "held-out", "grad", "tok/s", "left"]
    assert row.split()[2:] == ["0/500", "-", "-", "-", "-", "-"]
    header, row = shown(["run"], 500, 80, {**TRAIN, "mfu": None, "grad_norm": None})
    assert "MFU" not in header
    assert row.split()[2:] == ["123/500", "3.457", "3.557", "-", "123k", "5m", "09s"]


def test_the_loss_of_the_first_step_is_not_shown_for_that_of_the_last():
    screen = Screen(["run"], 8, 100)
    screen.display.record("run", TRAIN | {"step": 1, "loss": 6.269})
    assert "6.269" in screen.lines()[1]
    screen.display.advance("run", 8)
    screen.display.record("run", EVAL | {"step": 8})
    line = screen.lines()[-1]
    assert "6.269" not in line
    assert "3.557" in line


def test_time_left_of_a_resumed_run_is_told_from_the_steps_it_took_itself():
    screen = Screen(["run"], 1000, 80)
    for step, now in ((901, 0.0), (911, 20.0)):
        screen.now = now
        screen.display.advance("run", step)
    assert screen.lines()[1].endswith("2m 58s")  # 89 steps of 2 seconds
    screen.now = 30.0
    assert screen.lines()[1].endswith("2m 48s")
    screen.display.advance("run", 1000)
    assert screen.lines()[1].endswith("done")


def test_a_live_table_is_drawn_in_place_and_words_go_above_it():
    screen = Screen(["run"], 10, 80)
    with screen.display as display:
        display.advance("run", 4)
        display.record("run", {**TRAIN, "step": 4})
        display.say("said in between")
    text = screen.console.file.getvalue()
    assert text.index("said in between") < text.rindex("3.457")
    # The cursor goes up to draw over the last frame.
    assert "\x1b[1A" in text


def test_a_file_gets_some_forty_whole_lines_of_a_long_run():
    screen = Screen(["run"], 10_000, 60, terminal=False)
    with screen.display as display:
        for step in range(1, 10_001):
            screen.now += 0.5
            display.advance("run", step)
            if step % 10 == 0:
                display.record("run", {**TRAIN, "step": step})
        display.record("run", {**EVAL, "step": 10_000})
        display.say("done")
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
    ("number", "text"),
    [
        (0, "0"),
        (7.5, "7.5"),
        (999.4, "999"),
        (999.6, "1k"),
        (12_345, "12.3k"),
        (999_700, "1M"),
        (4_560_000, "4.56M"),
        (3e10, "30G"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_in_short_have_three_digits(number, text):
    assert in_short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m")],
)
def test_durations_in_words(seconds, text):
    assert duration(seconds) == text


def test_a_terminal_is_never_told_what_to_do_by_a_sample():
    assert printable("a\x1b[2Jb\x07\tc\n\u00e9") == "a\ufffd[2Jb\ufffd\tc\n\u00e9"
