"""The report says what the records say: numbers on the page and in the figures, nothing else."""

import json
import math
import random
import re
import zlib
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import combinations

import pytest

pytest.importorskip("matplotlib")

from browser import open_in_browser
from learnable_multipliers._checksum import add_checksum
from learnable_multipliers.report import Run, write_page
from learnable_multipliers.report.comparison import (
    both_evaluated,
    by_setting,
    differing_settings,
    pool_quantiles,
)
from learnable_multipliers.report.page import TEMPLATES, render
from learnable_multipliers.report.plots import (
    MAX_POINTS,
    drift_over_steps,
    few_points,
    gap_curves,
    learning_rates,
    loss_curves,
    multiplier_ranges,
    multipliers_over_steps,
    noise_over_steps,
    rms_over_steps,
    rms_scatter,
    shares_over_steps,
)
from learnable_multipliers.report.style import COLOURS, RUN_COLOURS
from runs import read_lines, write_lines

HOSTILE = "<script>alert('x')</script>&\"$#852d02"
ROLES = {
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    **{
        f"layers.{layer}.{name}.weight": role
        for layer in range(3)
        for name, role in (
            ("q_proj", "query"),
            ("k_proj", "key"),
            ("v_proj", "value"),
            ("o_proj", "attention-out"),
            ("in_proj", "ssm-in"),
            ("out_proj", "ssm-out"),
            ("gate_proj", "gate"),
            ("up_proj", "up"),
            ("down_proj", "down"),
        )
    },
}
AXES = {
    "none": (),
    "full": ("row", "col"),
    "symmetry-aware": ("row",),
    "scalar": ("scalar",),
}


def write_run(
    folder, *, name="plain", placement="none", seed=0, steps=400, gain=0.0, kind="adamw", **config
):
    """Write a plausible run: noisy power-law losses, rms relaxing to equilibrium."""
    folder.mkdir(parents=True)
    noise = random.Random(f"{name}/{seed}")
    tokens_per_step, peak = 4096, 4e-3
    (folder / "config.json").write_text(
        json.dumps(
            add_checksum(
                {
                    "out": str(folder),
                    "name": name,
                    "seed": seed,
                    "model": {"width": 128, "layers": 3},
                    "data": {"source": "stdlib", "length": 256},
                    "optimizer": {
                        "kind": kind,
                        "placement": placement,
                        "lr": peak,
                        "weight_decay": 0.1,
                    },
                    "schedule": {"kind": "wsd", "steps": steps},
                    **config,
                }
            )
        )
    )
    (folder / "environment.json").write_text(
        json.dumps(
            add_checksum(
                {
                    "command": f"lrm pretrain --name {name} --placement {placement} --seed {seed}",
                    "commit": "0123abcd",
                    "versions": {"python": "3.11.2", "torch": "2.13.0"},
                    "device": "cpu, 2 threads",
                    "parameters": 1_234_567,
                    "multipliers": 0 if placement == "none" else 4321,
                }
            )
        )
    )
    lines = []

    def log(record_kind, step, **fields):
        lines.append(
            {"kind": record_kind, "step": step, "tokens": step * tokens_per_step, **fields}
        )

    def loss_at(step):
        return 1.9 + 3.6 * (1 + step / 6) ** -0.5 - gain * step / steps

    for step in range(1, steps + 1):
        decay = min(1.0, step / (0.05 * steps), 8 ** ((0.8 * steps - step) / (0.2 * steps)))
        if step % 2 == 0:
            log(
                "train",
                step,
                loss=loss_at(step) + noise.gauss(0, 0.05),
                lr=peak * decay,
                grad_norm=1.1,
                tokens_per_second=9000 + noise.gauss(0, 200),
                mfu=None,
                seconds=0.45,
            )
        if step % (steps // 20) == 0:
            value = loss_at(step) + 0.03 + noise.gauss(0, 0.004)
            log("eval", step, loss=value, bits_per_byte=value / math.log(2) / 3.3)
        if step % (steps // 10) == 0:
            log("weights", step, **weights(noise, placement, step / steps))
            log("health", step, **health(noise, placement, step / steps))
    log("sample", steps, prompt="def main(", text="args):\n    return 0\n")
    log("end", steps, steps=steps, seconds=190.5)
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def weights(noise, placement, part):
    raw, predicted, multipliers = {}, {}, {}
    for name, role in ROLES.items():
        start = 0.02 if role == "embedding" else 0.088
        target = math.sqrt(4e-3 / 0.2)
        predicted[name] = start + (target - start) * (1 - math.exp(-2 * part))
        raw[name] = predicted[name] * math.exp(noise.gauss(0.05, 0.08))
        axes = AXES[placement] if role != "head" else ()
        multipliers[name] = {axis: quantiles(noise, axis, part) for axis in axes}
    multipliers = {name: found for name, found in multipliers.items() if found}
    return dict(raw_rms=raw, predicted_rms=predicted, multipliers=multipliers, roles=ROLES)


DRIFTS = {
    f"rows of a{i} against columns of b{i}, per channel (multiplicative)": i for i in range(8)
}


def health(noise, placement, part):
    found = {"trapped/matrices": part, "free/matrices": 1 - part, "trapped/vectors": 0.5}
    found |= {"free/vectors": 0.25, "noise/matrices": 1 + noise.random(), "noise/vectors": 3.0}
    if placement != "none":
        found |= {"trapped/multipliers": 0.0, "free/multipliers": part, "noise/multipliers": 0.7}
        found |= {f"drift/{words}": 0.1 * i * part for words, i in DRIFTS.items()}
        found["drift/largest"] = 2.0
    alarm = f"<b>{placement}</b> has drifted"
    return found | {"alarms": [alarm] if placement == "full" and part == 1 else []}


def quantiles(noise, axis, part):
    middle = noise.gauss(0, 0.25 * part)
    width = 0.0 if axis == "scalar" else 0.35 * part
    return [math.exp(middle + width * z) for z in (-3, -1.64, -0.67, 0, 0.67, 1.64, 3)]


@pytest.fixture
def runs(tmp_path):
    return [
        Run.load(write_run(tmp_path / "plain")),
        Run.load(write_run(tmp_path / "full", name="full", placement="full", gain=0.02)),
    ]


def edit_metrics(folder, change):
    path = folder / "metrics.jsonl"
    write_lines(path, change(read_lines(path)))
    return Run.load(folder)


def values(run, kind, key):
    """Read the file again, in the plainest way."""
    return [r[key] for r in read_lines(run.folder / "metrics.jsonl") if r["kind"] == kind]


def summarize(runs):
    """Return the sentences of the summary."""
    text = TEMPLATES.get_template("summary.html.j2").render(runs=runs)
    return [unescape(sentence) for sentence in re.findall("<p>(.*?)</p>", text, re.DOTALL)]


def points(line):
    return [list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))]


def labelled(figure):
    """Return the labels of the legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


# Records


def test_run_holds_what_the_files_hold(runs):
    run = runs[1]
    assert (run.name, run.placement) == ("full", "full")
    assert run.setting("kind") == "adamw"  # the optimizer's, not the schedule's
    assert run.setting("width") == 128
    assert run.setting("nowhere", 5) == 5
    assert run.series("eval", "loss") == (
        values(run, "eval", "tokens"),
        values(run, "eval", "loss"),
    )
    assert run.finished
    assert run.last_step == 400


def test_truncated_last_line_is_set_aside_and_reported(tmp_path, runs):
    folder = runs[0].folder
    path = folder / "metrics.jsonl"
    whole = path.read_bytes().rstrip(b"\n").split(b"\n")
    path.write_bytes(b"\n".join(whole[:-1]) + b"\n" + whole[-1][:20])
    run = Run.load(folder)
    assert run.unreadable == len(whole)
    assert run.of("train") == runs[0].of("train")
    assert not run.finished
    page = write_page(tmp_path / "page.html", [run], title="t").read_text()
    assert f"line {len(whole)} could not be read" in page
    assert "goes on, or did not finish: its records stop at step 400" in page


def test_later_lines_win_where_a_resumed_run_repeats_steps(runs):
    def resume(records):
        again = [{**r, "loss": 7.0} for r in records if r["kind"] == "train" and r["step"] >= 380]
        return records + again

    before = runs[0].series("train", "loss", by="step")
    steps, losses = edit_metrics(runs[0].folder, resume).series("train", "loss", by="step")
    assert steps == before[0]
    assert losses == [7.0 if s >= 380 else v for s, v in zip(*before, strict=True)]


def test_unknown_kinds_are_kept_and_ignored(tmp_path, runs):
    strange = [{"kind": "weather", "sky": "grey"}, {"kind": "weather", "sky": "blue"}]
    expected = write_page(tmp_path / "a.html", runs[:1], title="t").read_bytes()
    run = edit_metrics(runs[0].folder, lambda records: [*strange, *records])
    assert run.of("weather") == tuple(strange)
    assert write_page(tmp_path / "b.html", [run], title="t").read_bytes() == expected


@pytest.mark.parametrize("missing", ["config.json", "environment.json", "metrics.jsonl"])
def test_foreign_folders_are_rejected_by_name(tmp_path, runs, missing):
    with pytest.raises(FileNotFoundError, match="no run folder .*nowhere"):
        Run.load(tmp_path / "nowhere")
    (runs[0].folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"not a run folder: it has no {missing}"):
        Run.load(runs[0].folder)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[1]", "holds a list, not a JSON object"),
        ("metrics.jsonl", "nonsense\n", "line 1: not a record that a run wrote"),
        ("metrics.jsonl", '{"kind": "end", "step": 1}\n', "does not end with its crc32"),
        ("config.json", '{"name": "x"}', "config.json carries no sha256"),
    ],
)
def test_foreign_files_are_rejected_with_the_reason(runs, file, text, message):
    (runs[0].folder / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        Run.load(runs[0].folder)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"step": 1}, 'line 1: expected an object with a "kind"'),
        ({"kind": "eval", "step": 1}, r"line 1: .*'eval' lacks \['tokens'"),
        ({"kind": "end", "step": "1"}, "line 1: step is '1', not a whole number"),
    ],
)
def test_foreign_records_are_rejected_with_the_reason(runs, record, message):
    with pytest.raises(ValueError, match=message):
        edit_metrics(runs[0].folder, lambda records: [record, *records])


def test_a_changed_line_of_metrics_is_named(runs):
    path = runs[0].folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[6] = lines[6].replace(b'"loss": ', b'"loss": 1', 1)
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"line 7: .* its crc32 does not fit\); remove the line"):
        Run.load(runs[0].folder)


def test_deeply_nested_metrics_are_rejected(runs):
    text = b'{"kind": "end", "step": 1, "deep": ' + b"[" * 100_000 + b"]" * 100_000
    path = runs[0].folder / "metrics.jsonl"
    path.write_bytes(text + b', "crc32": "%08x"}\n' % zlib.crc32(text))
    with pytest.raises(ValueError, match="line 1: not a record that a run wrote"):
        Run.load(runs[0].folder)


# Comparison and summary


def test_gap_is_the_difference_at_matching_tokens(tmp_path, runs):
    shorter = Run.load(write_run(tmp_path / "shorter", name="shorter", steps=300))
    baseline, theirs = (
        dict(zip(values(run, "eval", "tokens"), values(run, "eval", "loss"), strict=True))
        for run in (runs[0], shorter)
    )
    # Evaluations every 20 and every 15 steps meet every 60 steps.
    common = [60 * 4096 * k for k in range(1, 6)]
    assert both_evaluated(shorter, runs[0]) == [(t, theirs[t], baseline[t]) for t in common]


def test_runs_that_read_other_data_are_not_compared(runs):
    def of(run, data):
        return replace(run, environment={**run.environment, "data": data})

    plain, full = runs
    assert both_evaluated(of(full, "a"), of(plain, "b")) == []
    summary = summarize([of(plain, "a"), of(full, "b")])[0]
    assert summary.startswith(
        "Run full read other data than plain, or the same in tokens of another"
    )
    assert both_evaluated(of(full, "a"), of(plain, "a")) == both_evaluated(full, plain) != []


@pytest.mark.parametrize(("shift", "word"), [(0.5, "above"), (-0.5, "below"), (0.0, "equal")])
def test_summary_says_where_the_loss_ends_and_on_which_side(tmp_path, runs, shift, word):
    end = values(runs[0], "eval", "loss")[-1]

    def move(records):
        for record in records:
            if record["kind"] == "eval":
                record["loss"] = end + shift
        return records

    run = edit_metrics(runs[1].folder, move)
    first, *rest = summarize([runs[0], run])
    beside = "equal to four decimals to" if word == "equal" else f"0.5000 ({0.5 / end:.2%}) {word}"
    assert first == (
        f"With multipliers (full: placement full) the validation loss ends at {end + shift:.4f} "
        f"nats per token after 1.64M tokens, {beside} the plain run (plain), which ends at "
        f"{end:.4f}."
    )
    assert any("One seed proves nothing" in sentence for sentence in rest)
    assert not re.search("better|win|improve", " ".join([first, *rest]))


def test_runs_of_different_length_are_compared_where_both_were_evaluated(tmp_path, runs):
    shorter = Run.load(write_run(tmp_path / "shorter", name="shorter", steps=300))
    _, loss, base = both_evaluated(shorter, runs[0])[-1]
    text = summarize([runs[0], shorter])[1]
    assert "after 1.23M tokens and plain after 1.64M. Where both were, after 1.23M" in text
    assert f"is {abs(loss - base):.4f}" in text
    assert any("differ in schedule.steps" in sentence for sentence in summarize([runs[0], shorter]))


def test_seeds_of_one_setting_are_told_from_settings(tmp_path, runs):
    other = Run.load(write_run(tmp_path / "seed1", name="again", seed=1))
    assert by_setting([*runs, other]) == [[runs[0], other], [runs[1]]]
    assert differing_settings([runs[0], other]) == {
        "name": ['"plain"', '"again"'],
        "seed": ["0", "1"],
    }
    losses = sorted(values(run, "eval", "loss")[-1] for run in (runs[0], other))
    summary = " ".join(summarize([*runs, other]))
    assert f"they end between {losses[0]:.4f} and {losses[1]:.4f}" in summary
    assert "Trained with one seed: full." in summary


def test_a_run_that_was_not_evaluated_yet_has_not_diverged(runs):
    run = edit_metrics(runs[0].folder, lambda records: [r for r in records if r["kind"] != "eval"])
    assert summarize([run])[0] == "Run plain was not evaluated yet."
    summary = summarize([run, runs[1]])[0]
    assert summary == "Run plain was not evaluated yet: no run is compared with it."


@pytest.mark.parametrize("loss", [None, "nan", "inf"])
def test_a_diverged_run_is_named_not_compared(tmp_path, runs, loss):
    def diverge(records):
        return [{**r, "loss": loss} if r["kind"] in ("eval", "train") else r for r in records]

    run = edit_metrics(runs[1].folder, diverge)
    assert summarize([runs[0], run])[0].startswith("Run full has no finite validation loss")
    assert summarize([run, runs[0]])[0].startswith("Run full has no finite validation loss")
    page = write_page(tmp_path / "page.html", [runs[0], run], title="t").read_text()
    assert "nan" not in page.lower()
    assert labelled(loss_curves([runs[0], run])) == ["plain"]


# Figures


def test_loss_figure_draws_the_records(runs):
    figure = loss_curves(runs)
    axes = figure.axes[0]
    drawn = [(run, kind) for run in runs for kind in ("train", "eval")]
    for line, (run, kind) in zip(axes.lines, drawn, strict=True):
        assert points(line) == [values(run, kind, key) for key in ("tokens", "loss")]
    low, high = axes.get_ylim()
    assert all(low < run.series("eval", "loss")[1][-1] < high for run in runs)
    assert labelled(figure) == ["plain", "full"]


def test_a_run_without_evaluation_is_named_at_its_training_loss(runs):
    run = edit_metrics(runs[0].folder, lambda rs: [r for r in rs if r["kind"] == "train"][:9])
    figure = loss_curves([run])
    (line,) = (line for line in figure.axes[0].lines if line.get_label() == "plain")
    assert points(line) == [values(run, "train", key) for key in ("tokens", "loss")]
    assert labelled(figure) == ["plain"]


def test_long_training_curves_are_means_of_neighbours(tmp_path):
    run = Run.load(write_run(tmp_path / "long", steps=1000))
    losses = values(run, "train", "loss")
    drawn = points(loss_curves([run]).axes[0].lines[0])
    assert len(losses) == 500
    assert len(drawn[0]) == 167 <= MAX_POINTS
    assert drawn[1][0] == pytest.approx(sum(losses[:3]) / 3)
    assert drawn[1][-1] == pytest.approx(sum(losses[498:]) / 2)


def test_a_spike_of_one_batch_is_seen_in_a_long_curve(runs):
    def spike(records):
        return [
            r | {"loss": 9.0} if r["kind"] == "train" and r["step"] == 700 else r for r in records
        ]

    folder = write_run(runs[0].folder.parent / "long", steps=1000)
    losses = values(edit_metrics(folder, spike), "train", "loss")
    (band,) = loss_curves([Run.load(folder)]).axes[0].collections
    vertices = band.get_paths()[0].vertices
    assert vertices[:, 1].max() == 9.0 == max(losses)
    assert vertices[:, 1].min() == min(losses)
    assert not loss_curves([runs[0]]).axes[0].collections


def test_curves_have_a_bounded_number_of_points_with_all_extremes():
    x = [float(i) for i in range(100_000)]
    y = [math.sin(i) for i in range(100_000)]
    y[12_345], y[54_321], y[70_000] = 40.0, -40.0, math.nan
    drawn = few_points(x, y)
    assert len(drawn[0]) <= 2 * MAX_POINTS + 2
    pairs = list(zip(*drawn, strict=True))
    assert {(12_345.0, 40.0), (54_321.0, -40.0), (0.0, 0.0), (x[-1], y[-1])} <= set(pairs)
    assert drawn[0] == sorted(drawn[0])
    assert few_points(x[: 2 * MAX_POINTS], y[: 2 * MAX_POINTS]) == (
        x[: 2 * MAX_POINTS],
        y[: 2 * MAX_POINTS],
    )


def test_gap_figure_draws_the_gaps_and_a_zero_line(tmp_path, runs):
    scalar = Run.load(write_run(tmp_path / "scalar", name="scalar", placement="scalar"))
    zero, *gaps = gap_curves([*runs, scalar]).axes[0].lines
    assert set(zero.get_ydata()) == {0.0}
    for run, line in zip([runs[1], scalar], gaps, strict=True):
        both = both_evaluated(run, runs[0])
        assert points(line) == [[t for t, *_ in both], [loss - base for _, loss, base in both]]
    assert zero.axes.get_ylim()[0] < 0 < zero.axes.get_ylim()[1]


def test_equal_schedules_share_a_line(tmp_path, runs):
    (line,) = learning_rates(runs).axes[0].lines
    assert points(line) == [values(runs[0], "train", k) for k in ("tokens", "lr")]
    shorter = Run.load(write_run(tmp_path / "shorter", name="shorter", steps=300))
    assert len(learning_rates([*runs, shorter]).axes[0].lines) == 2


def test_scatter_has_every_matrix_at_predicted_and_measured(runs):
    axes = rms_scatter(runs[1]).axes[0]
    raw = values(runs[1], "weights", "raw_rms")[-1]
    predicted = values(runs[1], "weights", "predicted_rms")[-1]
    identity, *marks = axes.lines
    by_role = {line.get_label(): line.get_xydata().tolist() for line in marks}
    assert {role: len(found) for role, found in by_role.items()} == {
        role: list(ROLES.values()).count(role) for role in ROLES.values()
    }
    for role, found in by_role.items():
        assert found == [[predicted[n], raw[n]] for n in ROLES if ROLES[n] == role]
    assert points(identity)[0] == points(identity)[1] == list(axes.get_xlim())
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_rms_over_steps_is_the_geometric_mean_of_a_role(runs):
    figure = rms_over_steps(runs[0])
    axes = figure.axes[0]
    assert labelled(figure) == ["embedding", "query", "ssm-in", "down", "head"]
    low, high = axes.get_ylim()
    assert all(low < value < high for line in axes.lines for value in points(line)[1])
    measured, predicted = axes.lines[2:4]
    names = [name for name, role in ROLES.items() if role == "query"]
    for line, key in ((measured, "raw_rms"), (predicted, "predicted_rms")):
        records = values(runs[0], "weights", key)
        expected = [math.prod(r[n] for n in names) ** (1 / len(names)) for r in records]
        assert points(line)[0] == values(runs[0], "weights", "step")
        assert points(line)[1] == pytest.approx(expected)


def test_matrices_without_prediction_and_fused_ones_are_drawn(runs):
    ssm = "ssm-z/ssm-x/ssm-B/ssm-C/ssm-dt"

    def fuse(records):
        for record in records:
            if record["kind"] == "weights":
                del record["predicted_rms"]["embed_tokens.weight"]
                record["roles"] |= {
                    name: ssm if role == "ssm-in" else "query/key/value"
                    for name, role in ROLES.items()
                    if role in ("ssm-in", "query")
                }
        return records

    run = edit_metrics(runs[0].folder, fuse)
    labels = labelled(rms_scatter(run))
    assert "embedding" not in labels
    assert {"ssm-in", "query/key/value"} <= set(labels)
    figure = rms_over_steps(run)
    assert labelled(figure) == ["embedding", "query/key/value", "ssm-in", "down", "head"]
    measured, predicted = figure.axes[0].lines[:2]
    raw = [r["embed_tokens.weight"] for r in values(run, "weights", "raw_rms")]
    assert points(measured)[1] == pytest.approx(raw)
    assert all(map(math.isnan, points(predicted)[1]))


def test_multiplier_bars_are_the_recorded_quantiles(runs):
    axes = multiplier_ranges(runs[1]).axes[0]
    last = values(runs[1], "weights", "multipliers")[-1]
    roles = set(ROLES.values()) - {"head"}
    one, *bars = axes.lines
    assert set(one.get_xdata()) == {1.0}
    # Three ranges and a median for rows and for columns of every role.
    assert len(bars) == 4 * 2 * len(roles)
    assert {label.get_text() for label in axes.get_yticklabels()} == roles
    row, col = bars[:4], bars[4:8]
    for lines, axis in ((row, "row"), (col, "col")):
        q = last["embed_tokens.weight"][axis]
        assert [points(line)[0] for line in lines] == [
            [q[0], q[6]],
            [q[1], q[5]],
            [q[2], q[4]],
            [q[3]],
        ]
    assert row[0].get_color() != col[0].get_color()
    assert axes.get_xscale() == "log"


def test_axes_of_narrow_and_wide_multipliers_have_a_few_numbers(runs):
    for limits in ((0.9, 1.15), (0.7, 1.41), (0.5, 2.0), (0.2, 5.0), (0.01, 30.0), (1e-4, 10.0)):
        axes = multiplier_ranges(runs[1], limits).axes[0]
        shown = [tick for tick in axes.get_xticks() if limits[0] <= tick <= limits[1]]
        assert 3 <= len(shown) <= 8
        assert any(tick == pytest.approx(1.0) for tick in shown)


def test_layers_are_pooled_as_extremes_and_medians():
    layers = [[1, 2, 3, 4, 5, 6, 7], [0, 3, 4, 5, 6, 7, 9], [2, 4, 5, 6, 7, 8, 8]]
    assert pool_quantiles(layers) == [0, 3, 4, 5, 6, 7, 9]


def test_multipliers_at_zero_or_below_are_marked_at_the_edge(runs):
    def turn(records):
        for record in records:
            if record["kind"] == "weights":
                record["multipliers"]["embed_tokens.weight"]["row"][0] = -0.5
        return records

    axes = multiplier_ranges(edit_metrics(runs[1].folder, turn)).axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "<"]
    assert [points(line)[0] for line in marks] == [[axes.get_xlim()[0]]]


def test_multipliers_of_another_shape_are_rejected(runs):
    def shorten(records):
        return [
            {**r, "multipliers": {"a.weight": {"row": [1.0, 2.0]}}} if r["kind"] == "weights" else r
            for r in records
        ]

    with pytest.raises(ValueError, match="'a.weight': expected seven quantiles .* got 2 of 'row'"):
        multiplier_ranges(edit_metrics(runs[1].folder, shorten))


def test_shares_and_noise_are_drawn_as_recorded(runs):
    steps = values(runs[1], "health", "step")
    shares = shares_over_steps(runs[1])
    drawn = iter(shares.axes[0].lines)
    for kind in ("matrices", "multipliers", "vectors"):
        for verdict in ("trapped", "free"):
            assert points(next(drawn)) == [steps, values(runs[1], "health", f"{verdict}/{kind}")]
    assert labelled(shares) == ["matrices", "multipliers", "vectors"]
    noise = noise_over_steps(runs[1]).axes[0]
    level, *drawn = noise.lines
    assert points(level)[1] == [1.0, 1.0]
    for line, kind in zip(drawn, ("matrices", "multipliers", "vectors"), strict=True):
        assert points(line) == [steps, values(runs[1], "health", f"noise/{kind}")]
    # A plain run has no multipliers to tell of.
    assert labelled(shares_over_steps(runs[0])) == ["matrices", "vectors"]


def test_drift_is_drawn_as_a_factor_the_farthest_first(runs):
    figure = drift_over_steps(runs[1])
    order = sorted(DRIFTS, key=lambda words: -DRIFTS[words])
    for line, words in zip(figure.axes[0].lines, order, strict=True):
        logs = values(runs[1], "health", f"drift/{words}")
        assert points(line)[1] == pytest.approx([math.exp(value) for value in logs])
    assert labelled(figure) == [words.partition(" (")[0] for words in order[:6]] + ["2 others"]


def test_multipliers_over_steps_are_the_pooled_quantiles(runs):
    axes = multipliers_over_steps(runs[1]).axes[0]
    _, median = axes.lines
    records = values(runs[1], "weights", "multipliers")
    pooled = [pool_quantiles([q for axes in r.values() for q in axes.values()]) for r in records]
    assert points(median)[1] == pytest.approx([row[3] for row in pooled])
    outer = axes.collections[0].get_paths()[0].vertices
    assert outer[:, 1].min() == pytest.approx(min(row[0] for row in pooled))
    assert outer[:, 1].max() == pytest.approx(max(row[6] for row in pooled))


def test_the_page_shows_alarms_as_text(page):
    assert "Run full warns: &lt;b&gt;full&lt;/b&gt; has drifted." in page
    assert page.count(" warns: ") == 1


def contrast(a, b):
    def luminance(code):
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_of_text_is_readable_on_the_page():
    colours = [*RUN_COLOURS, COLOURS["muted"]]
    assert all(contrast(colour, COLOURS["page"]) >= 4.5 for colour in colours)
    assert all(a != b for a, b in combinations(colours, 2))


# The page


class Reader(HTMLParser):
    """Checks that tags nest, and collects elements, ids and text."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.data = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        assert len(attributes) == len(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.data += [attributes["value"]] if tag == "data" else []
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset")]
        assert not any(key.startswith("on") for key in attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(tmp_path, runs):
    path = tmp_path / "out" / "page.html"
    assert write_page(path, runs, title="Two runs") == path
    return render(runs, title="Two runs", note="One < two.").decode()


def test_page_has_the_exact_final_numbers(page, runs):
    data = Reader(page).data
    for run in runs:
        for kind, key in (("eval", "loss"), ("eval", "bits_per_byte"), ("train", "loss")):
            exact = values(run, kind, key)[-1]
            assert repr(exact) in data
            assert f'<data value="{exact!r}">{exact:.4f}</data>' in page
        assert "190.5" in data
        assert "3m 10s" in page
        assert f"lrm pretrain --name {run.name} " in page
    assert {"1234567", "4321"} <= set(Reader(page).data)
    assert "One &lt; two." in page
    assert "<mark>def main(</mark>args):\n    return 0\n</pre>" in page


def test_page_is_well_formed_and_asks_for_nothing(page):
    reader = Reader(page)
    # Loss, gap, scatter and rms of two runs, multipliers of one, learning rate; what is trapped
    # and noise of two runs, multipliers over steps and drift of one.
    assert reader.tags.count("svg") == 14
    assert reader.tags.count("figure") == reader.tags.count("figcaption") == 10
    assert reader.tags.count("h1") == reader.tags.count("main") == 1
    assert len(reader.ids) == len(set(reader.ids))
    assert all(link.startswith("#") and link[1:] in reader.ids for link in reader.links)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(reader.ids)
    # The names of XML namespaces are no requests.
    assert not re.search("https?://|@import", re.sub(' xmlns(:xlink)?="[^"]*"', "", page))
    assert "script" not in reader.tags
    assert {"validation", "predicted", "tokens seen", "multiplier"} <= set(
        word for text in reader.text for word in (text, *text.split())
    )


def test_every_plot_says_what_it_is_to_those_who_do_not_see_it(page):
    labels = re.findall('role="img" aria-label="([^"]*)"', page)
    assert labels[:3] == ["Loss", "Gap to the baseline", "Measured against predicted: plain"]
    assert len(labels) == len(set(labels)) == page.count("<svg")


def test_hostile_names_and_samples_are_text(tmp_path):
    folder = write_run(tmp_path / "x", name=HOSTILE, placement="full", **{HOSTILE: HOSTILE})
    (folder / "environment.json").write_text(
        json.dumps(add_checksum({"command": HOSTILE, HOSTILE: HOSTILE}))
    )

    def attack(records):
        for record in records:
            if record["kind"] == "sample":
                record |= {"prompt": "</pre>" + HOSTILE, "text": HOSTILE + "\ud800\x00"}
            if record["kind"] == "weights":
                record["roles"] = dict.fromkeys(record["roles"], HOSTILE)
        return records

    run = edit_metrics(folder, attack)
    runs = [run, run, Run.load(write_run(tmp_path / "y", name="\u6f22\u5b57\n\x07", seed=2))]
    text = render(runs, title=HOSTILE, note=HOSTILE).decode()
    reader = Reader(text)
    assert "script" not in reader.tags
    # As text it is everywhere: titles, table, labels, notes, samples, settings, commands.
    assert unescape(text).count(HOSTILE) > 10
    assert "<script" not in text
    # Two runs of one name and seed are told apart.
    assert f"{HOSTILE} #2" in unescape(text)


def test_same_records_give_the_same_bytes(tmp_path, runs):
    import matplotlib

    first = write_page(tmp_path / "a.html", runs, title="t").read_bytes()
    with matplotlib.rc_context({"font.size": 30, "xtick.direction": "in", "svg.fonttype": "path"}):
        again = [Run.load(run.folder) for run in runs]
        second = write_page(tmp_path / "b.html", again, title="t").read_bytes()
        assert matplotlib.rcParams["font.size"] == 30
    assert first == second


def test_page_of_a_run_that_was_stopped_at_once(tmp_path, runs):
    run = edit_metrics(runs[0].folder, lambda records: records[:1])
    reader = Reader(write_page(tmp_path / "page.html", [run], title="t").read_text())
    assert reader.tags.count("svg") == 2
    assert repr(values(run, "train", "loss")[0]) in reader.data
    run = edit_metrics(runs[0].folder, lambda records: [])
    Reader(write_page(tmp_path / "page.html", [run, runs[1]], title="t").read_text())


def test_a_page_about_no_run_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_page(tmp_path / "p.html", [], title="t")
    assert not (tmp_path / "p.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "ink"), [(1, "rgb(51, 56, 63)"), (0, "rgb(213, 218, 224)")], ids=["light", "dark"]
)
def test_a_browser_shows_every_plot_without_errors(tmp_path, page, scheme, ink):
    seen = open_in_browser(page, tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert seen["errors"] == []
    assert seen["requests"] == 0
    assert len(seen["plots"]) == 14
    # All of a narrow window, as on a phone, and nothing wider than it.
    assert all(400 < width <= 500 and height > 100 for width, height in seen["plots"])
    assert seen["width"] <= 500
    assert all(width > 0 and height >= 9 for width, height in seen["texts"])
    assert seen["ink"] == ink


# Benchmarks


def test_page_has_the_last_scores_of_each_run(tmp_path, runs):
    from learnable_multipliers.evaluate import results

    def write(run, folder, task, accuracy):
        result = results.Result(task=task, model="m", items="i", accuracy=accuracy, chance=None)
        results.write_result(run.folder / "evaluations" / folder, result)
        return result.metrics["accuracy"]

    write(runs[0], "step-00000200", "gsm8k", (1.0, 1.0, 1.0))
    last = write(runs[0], "step-00000400", "gsm8k", (1.0, 0.0, 0.0))
    limited = write(runs[0], "step-00000400-last-3-limit-2", "gsm8k", (1.0,))
    other = write(runs[1], "step-00000400", "piqa", (0.0, 1.0))
    # What the model wrote is not a result.
    (runs[0].folder / "evaluations/step-00000400/gsm8k.answers.jsonl").write_text("{}\n")
    page = write_page(tmp_path / "page.html", runs, title="t").read_text()
    rows = re.findall(r'<tr><th scope="row">(gsm8k|piqa)</th>(.*?)</tr>', page, re.DOTALL)
    cells = [(task, re.findall(r"<td[^>]*>(.*?)</td>", text)) for task, text in rows]

    def cell(estimate):
        error = "" if math.isnan(estimate.error) else f" &plusmn; {estimate.error:.3f}"
        return f'<data value="{estimate.value}">{estimate.value:.3f}</data>{error}'

    assert cells == [
        ("gsm8k", ["-", cell(last), "-"]),
        ("piqa", ["-", "-", cell(other)]),
        ("gsm8k", ["last-3-limit-2", cell(limited), "-"]),
    ]
    Reader(page)


def test_a_page_without_scores_has_no_table_of_them(page):
    assert 'id="benchmarks"' not in page


def test_damaged_scores_are_named(tmp_path, runs):
    path = runs[0].folder / "evaluations/step-00000001/piqa.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format":1,"metrics":{}}')
    with pytest.raises(ValueError, match="piqa.json is damaged .*evaluate again"):
        write_page(tmp_path / "page.html", runs, title="t")
