"""The log of a run: the same numbers everywhere, also after a resume."""

import json
import math
import os
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learnable_multipliers._checksum import encode_line
from learnable_multipliers.pretrain.metrics.log import (
    FILE_NAME,
    NEWEST,
    MetricLog,
    is_kept,
    read_metrics,
)
from runs import read_lines


def metrics_of(step):
    return {
        "loss": 4 / (step + 1),
        "raw_rms": {"attention": 0.1 * step, "mlp": 0.5 * step},
        "note": "fine",
        "skipped": False,
    }


def write(folder, steps, **settings):
    with closing(MetricLog(folder, **{"tensorboard": False, **settings})) as log:
        for step in steps:
            log.log(step, metrics_of(step))


def tensorboard_scalars(folder):
    """Return {tag: [(step, value)]} as TensorBoard reads it."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def recorder(monkeypatch, name):
    """Put a stand-in for a tracker in place; return the calls it gets."""
    calls = []
    functions = {
        function: lambda *args, _function=function, **kwargs: calls.append(
            (_function, args, kwargs)
        )
        for function in ("init", "log", "finish")
    }
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    return calls


def test_a_line_is_a_step(tmp_path):
    write(tmp_path / "run", range(3))
    assert read_lines(tmp_path / "run" / FILE_NAME)[2] == {
        "step": 2,
        "loss": 4 / 3,
        "raw_rms": {"attention": 0.2, "mlp": 1.0},
        "note": "fine",
        "skipped": False,
    }
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [0, 1, 2]


def test_a_line_is_on_disk_before_the_next_step(tmp_path):
    with closing(MetricLog(tmp_path, tensorboard=False)) as log:
        log.log(0, {"loss": 1.0})
        assert read_lines(tmp_path / FILE_NAME) == [{"step": 0, "loss": 1.0}]


def test_every_line_is_valid_json_and_no_number_is_lost(tmp_path):
    values = {"nan": math.nan, "high": math.inf, "low": {"x": -math.inf}, "list": [1, math.nan]}
    with closing(MetricLog(tmp_path, tensorboard=False)) as log:
        log.log(0, values)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    raw = json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=refuse)
    del raw["crc32"]
    assert raw == {"step": 0, "nan": "nan", "high": "inf", "low": {"x": "-inf"}, "list": [1, "nan"]}
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["nan"])
    assert math.isnan(record["list"][1])
    assert (record["high"], record["low"]) == (math.inf, {"x": -math.inf})


def test_what_is_not_a_metric_is_rejected_and_nothing_is_written(tmp_path):
    with (
        closing(MetricLog(tmp_path, tensorboard=False)) as log,
        pytest.raises(TypeError, match="object"),
    ):
        log.log(0, {"a": {"b": object()}})
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "lo'])
def test_resumed_log_equals_the_uninterrupted_one(tmp_path, torn):
    write(tmp_path / "whole", range(9), tensorboard=True)
    write(tmp_path / "parts", range(6), tensorboard=True)
    with (tmp_path / "parts" / FILE_NAME).open("ab") as file:
        file.write(torn)
    with closing(MetricLog(tmp_path / "parts", tensorboard=True)) as log:
        log.truncate_after(3)
        for step in range(4, 9):
            log.log(step, metrics_of(step))
    whole, parts = ((tmp_path / name / FILE_NAME).read_bytes() for name in ("whole", "parts"))
    assert parts == whole
    assert tensorboard_scalars(tmp_path / "parts") == tensorboard_scalars(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "parts").glob("*.tmp")] == []


def test_truncation_in_the_middle_of_a_run(tmp_path):
    with closing(MetricLog(tmp_path, tensorboard=True)) as log:
        for step in (0, 1, 2):
            log.log(step, {"loss": float(step)})
        log.truncate_after(0)
        log.log(1, {"loss": 7.0})
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 0.0}, {"step": 1, "loss": 7.0}]
    assert tensorboard_scalars(tmp_path) == {"loss": [(0, 0.0), (1, 7.0)]}


def test_a_failed_truncation_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write(tmp_path, range(4))
    before = (tmp_path / FILE_NAME).read_bytes()
    with closing(MetricLog(tmp_path, tensorboard=False)) as log:
        monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            log.truncate_after(1)
        assert (tmp_path / FILE_NAME).read_bytes() == before
        log.log(4, metrics_of(4))
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_log_that_is_a_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a regular file"):
        MetricLog(tmp_path, tensorboard=False)


def test_torn_line_is_not_glued_to_the_next(tmp_path):
    write(tmp_path, range(2))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"step": 2')
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]
    with closing(MetricLog(tmp_path, tensorboard=False)) as log:
        log.truncate_after(1)
        log.log(2, metrics_of(2))
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    "broken",
    [
        b'{"step": 1}\n',
        encode_line({"step": 1, "loss": 1.0}).replace(b"1.0", b"2.0"),
        encode_line({"loss": 1}),
        b"\n",
    ],
)
def test_broken_line_is_named(tmp_path, broken):
    (tmp_path / FILE_NAME).write_bytes(encode_line({"step": 0}) + broken)
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl .*: remove the line"):
        read_metrics(tmp_path)
    with (
        closing(MetricLog(tmp_path, tensorboard=False)) as log,
        pytest.raises(ValueError, match="line 2"),
    ):
        log.truncate_after(0)


INTERVALS = {"train": 2, "weights": 10}


def long_log(folder, steps, intervals=INTERVALS):
    """Write records as a run does: at the first step, at all intervals, and at the last step."""
    with closing(MetricLog(folder, tensorboard=False, intervals=intervals)) as log:
        for step in steps:
            for kind, every in INTERVALS.items():
                if step % every == 0 or step in (1, LAST):
                    log.log(step, {"kind": kind, "value": step**0.5})
            if step % 100 == 0:
                log.log(step, {"kind": "rollback"})
    return log


LAST = 3_001


@pytest.fixture
def newest(monkeypatch):
    counts = {"train": 50, "weights": 8}
    for kind, count in counts.items():
        monkeypatch.setitem(NEWEST, kind, count)
    return counts


def test_old_records_are_thinned_on_strides_of_powers_of_two(tmp_path, newest):
    long_log(tmp_path / "thin", range(1, LAST + 1))
    long_log(tmp_path / "whole", range(1, LAST + 1), intervals={})
    thin, whole = read_metrics(tmp_path / "thin"), read_metrics(tmp_path / "whole")
    for kind, every in INTERVALS.items():
        found, logged = ([r["step"] for r in run if r["kind"] == kind] for run in (thin, whole))
        assert len(found) <= 3 * newest[kind] + 2 < len(logged)
        assert (found[0], found[-1]) == (1, LAST)
        # The newest are all there, and gaps shrink towards them.
        assert found[-newest[kind] :] == logged[-newest[kind] :]
        gaps = [b - a for a, b in pairwise(found[1:-1])]
        assert gaps == sorted(gaps, reverse=True)
        assert all(gap % every == 0 for gap in gaps)
        # Where old and new meet, a gap is shorter than the stride.
        assert len({gap // every for gap in gaps} - {2**n for n in range(10)}) <= 1
    # Nothing else is touched, and what is kept is kept as it was, in its order.
    assert [r for r in thin if r["kind"] == "rollback"] == [
        r for r in whole if r["kind"] == "rollback"
    ]
    assert thin == [r for r in whole if r in thin]


@pytest.mark.parametrize(("killed", "saved"), [(700, 650), (1290, 1279), (3000, 160), (401, 400)])
def test_killed_and_resumed_log_is_thinned_like_an_untouched_one(tmp_path, newest, killed, saved):
    long_log(tmp_path / "whole", range(1, LAST + 1))
    long_log(tmp_path / "parts", range(1, killed + 1))
    with closing(MetricLog(tmp_path / "parts", tensorboard=False)) as log:
        log.truncate_after(saved)
    long_log(tmp_path / "parts", range(saved + 1, LAST + 1))
    whole, parts = ((tmp_path / name / FILE_NAME).read_bytes() for name in ("whole", "parts"))
    assert parts == whole


@given(
    every=st.integers(1, 20),
    count=st.integers(1, 30),
    turns=st.integers(2, 60),
    more=st.integers(0, 60),
)
def test_what_is_kept_at_a_step_was_kept_at_all_earlier_ones(every, count, turns, more):
    earlier, later = (every * count * n for n in (turns, turns + more))
    steps = range(every, earlier + 1, every)
    kept, still = (
        [step for step in steps if is_kept(step, newest, every, count)]
        for newest in (earlier, later)
    )
    assert set(still) <= set(kept)
    assert count <= len(kept) <= 2 * count
    assert kept[-count:] == list(steps)[-count:]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_thinning_that_fails_leaves_the_file_as_it_was(tmp_path, newest, monkeypatch):
    long_log(tmp_path, range(1, 200))
    before = (tmp_path / FILE_NAME).read_bytes()
    with closing(MetricLog(tmp_path, tensorboard=False, intervals=INTERVALS)) as log:
        monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match=r"metrics.jsonl could not be written: disk full"):
            log.log(200, {"kind": "train", "value": 1.0})
    assert (tmp_path / FILE_NAME).read_bytes().startswith(before)
    assert [r["step"] for r in read_metrics(tmp_path)][-1] == 200


def test_tensorboard_has_the_numbers_under_kind_and_key(tmp_path):
    write(tmp_path, range(5), tensorboard=True)
    scalars = tensorboard_scalars(tmp_path)
    assert set(scalars) == {"loss", "raw_rms/attention", "raw_rms/mlp"}
    for tag, pick in (
        ("loss", lambda record: record["loss"]),
        ("raw_rms/attention", lambda record: record["raw_rms"]["attention"]),
        ("raw_rms/mlp", lambda record: record["raw_rms"]["mlp"]),
    ):
        expected = [(record["step"], np.float32(pick(record))) for record in read_metrics(tmp_path)]
        assert scalars[tag] == expected


def test_without_tensorboard_only_the_file_is_written(tmp_path, monkeypatch):
    events = "learnable_multipliers.pretrain.metrics.events"
    monkeypatch.delitem(sys.modules, events, raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    write(tmp_path, [0, 1], tensorboard=True)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_tracker_is_an_error(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        MetricLog(tmp_path, tensorboard=False, **{name: "project"})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_gets_the_numbers_of_each_step_and_one_run(tmp_path, monkeypatch, name):
    calls = recorder(monkeypatch, name)
    write(tmp_path / "run", [0], **{name: "project"})
    write(tmp_path / "run", [1], **{name: "project"})
    assert [call[0] for call in calls] == ["init", "log", "finish"] * 2
    assert calls[0] == calls[3]
    assert calls[0][2].items() >= {"project": "project", "name": "run", "resume": "allow"}.items()
    numbers = {"loss": 2.0, "raw_rms/attention": 0.1, "raw_rms/mlp": 0.5}
    assert calls[4] == ("log", (numbers,), {"step": 1})


def test_truncation_returns_the_last_record_left(tmp_path):
    with closing(MetricLog(tmp_path, tensorboard=False)) as log:
        assert log.truncate_after(5) is None
        for step in (0, 1, 2):
            log.log(step, {"kind": "train", "loss": float(step)})
        assert log.truncate_after(1) == {"step": 1, "kind": "train", "loss": 1.0}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_reported_with_the_file_and_the_way_out(tmp_path):
    write(tmp_path, range(2))
    log = MetricLog(tmp_path, tensorboard=False)
    log._file.close()
    log._file = open("/dev/full", "ab")  # noqa: SIM115
    for call in (lambda: log.log(2, metrics_of(2)), log.close):
        with pytest.raises(OSError, match=r"metrics.jsonl could not be written: No space left"):
            call()
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]
