"""The headline's tables, sentences and plots have the gains of a made-up world."""

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from headline_world import GAINS, play, with_labels
from learnable_multipliers.experiments import headline, headline_arms, headline_gains, page, table


@pytest.fixture(scope="module")
def played():
    return play()


@pytest.fixture(scope="module")
def labelled(played):
    _, runs, records = played
    return with_labels(runs, records)


def test_the_table_has_the_gains_of_the_world(labelled):
    compared, _, _, longer, shorter, _, tuning = headline.tables(labelled)
    rows = {(row[0], row[1], row[2]): row for row in compared.rows}
    assert len(rows) == len(compared.rows)
    for (_, _, arm), row in rows.items():
        if arm == "plain":
            assert row[5] == row[6] == ""
            continue
        mean = float(row[5].split()[0])
        # Tuning ended at the bottom, or a neighbour of it.
        assert mean == pytest.approx(GAINS.get(arm, 0.0), abs=0.012), arm
    assert rows["Llama", "AdamW", "vector"][6] == "better"
    assert rows["Llama", "Muon", "cautious"][6] == "worse"
    assert rows["Llama", "AdamW", "vector"][3] == "5"
    # A gain of 0.02 nats is 0.002 bits per byte in this world.
    assert float(rows["Llama", "Muon", "vector"][8].split()[0]) == pytest.approx(0.002, abs=0.001)
    assert {row[3:6] for row in longer.rows} == {("1.64x", "1x", "3"), ("1.64x", "2x", "3")}
    gains = {row[2]: row for row in longer.rows if row[:2] == ("Llama", "Muon")}
    assert float(gains["vector"][7].split()[0]) == pytest.approx(0.02, abs=0.004)
    assert gains["vector"][8] == "better"
    # What rivals gain over vector, by the same seeds.
    over = float(rows["Llama", "Muon", "symmetry-aware"][7].split()[0])
    assert over == pytest.approx(-0.005, abs=0.012)
    assert rows["Llama", "Muon", "vector"][7] == ""
    reached = next(row for row in shorter.rows if row[:3] == ("Llama", "Muon", "vector"))
    # 0.2 nats a length: 0.02 is a tenth of it. All runs have one speed.
    assert float(reached[5]) == pytest.approx(0.9, abs=0.02)
    assert reached[6] == reached[5]
    plain = next(row for row in tuning.rows if row[:3] == ("Llama", "AdamW", "plain"))
    assert "lr 0.0113" in plain[6]
    assert "weight_decay 0.2" in plain[6]
    assert "lr" not in plain[7].split(", ")
    wanted = {"stage": "tuning", "family": "llama", "optimizer": "adamw", "arm": "plain"}
    losses = [one.record.loss for one in labelled if wanted.items() <= one.labels.items()]
    assert float(plain[4]) == pytest.approx(min(losses), abs=1e-3)
    assert plain[5] == f"{min(losses[:6]):.4f}"
    # Settings that were never moved are not bracketed.
    for row in tuning.rows:
        moved = {name for name in row[6].replace(",", "").split()[::2]}
        assert set(filter(None, row[7].split(", "))) <= moved


def test_benchmarks_have_the_gains_of_the_world(labelled):
    _, accuracy, bits, *_ = headline.tables(labelled)
    assert accuracy.header[4:] == bits.header[4:] == ("mean", *headline.BENCHMARKS)
    for shown, worth, size in ((accuracy, 10.0, 100), (bits, 0.2, 1)):
        rows = {row[:3]: row for row in shown.rows}
        gain = rows["Llama", "Muon", "vector"]
        assert gain[3] == "5"
        # The same score on every task; better is positive in both tables.
        assert set(gain[5:]) == {gain[4]}
        mean, low, high = (float(word.strip("[],")) for word in gain[4].split())
        assert low < mean < high
        assert mean == pytest.approx(0.02 * worth, abs=0.004 * worth)
        arm = {"family": "llama", "optimizer": "muon", "arm": "plain"}
        runs = table.select(labelled, stage="final", length=1.0, size=1, **arm)
        loss = fmean(one.record.loss for one in runs)
        score = size * (0.9 - loss / 10 if shown is accuracy else loss / 5)
        assert float(rows["Llama", "Muon", "plain"][4].split()[0]) == pytest.approx(score, abs=1e-3)


def test_scores_of_other_questions_are_not_compared(labelled):
    def asked_others(one):
        if one.labels["arm"] != "vector":
            return one
        scores = {
            task: {**found, "items": "others"} if task == "blimp" else found
            for task, found in one.record.benchmarks.items()
        }
        return replace(one, record=replace(one.record, benchmarks=scores))

    accuracy = headline.tables([asked_others(one) for one in labelled])[1]
    (row,) = (row for row in accuracy.rows if row[:3] == ("Llama", "AdamW", "vector"))
    cells = dict(zip(accuracy.header, row, strict=True))
    assert cells["blimp"] == cells["mean"] == ""
    assert cells["piqa"] != ""


def test_part_of_the_records_is_shown_too(labelled):
    rng = random.Random(0)
    for count in (1, 5, 50, len(labelled)):
        part = rng.sample(labelled, count)
        for shown in headline.tables(part):
            assert all(len(row) == len(shown.header) for row in shown.rows)
        assert all(plot.title and plot.caption for plot in headline.plot(part))
    assert headline.tables([]) == headline.plot([]) == []


def test_arms_that_were_not_reached_stand_in_the_table_as_not_run(labelled):
    part = [one for one in labelled if one.labels["arm"] in ("plain", "vector")]
    compared = headline.tables(part)[0]
    rows = {row[:3]: row for row in compared.rows}
    assert rows["Llama", "Muon", "normuon"][3:7] == ("0", "", "", "not run")
    assert rows["Llama", "Muon", "vector"][6] == "better"
    assert len(rows) == len(headline_arms.expected())


def test_arms_stand_in_a_line_each_model_and_optimizer_before_any_is_run(labelled):
    first = [one for one in labelled if one.labels["stage"] == "tuning"][:1]
    compared = headline.tables(first)[0]
    named = [arm for row in compared.rows for arm in row[2].split(", ")]
    assert len(named) == len(headline_arms.expected())
    assert len({row[:2] for row in compared.rows}) == len(compared.rows)


def test_a_setting_that_was_never_moved_is_not_bracketed(labelled):
    first = [one for one in labelled if one.labels["stage"] == "tuning"][:1]
    (tuning,) = (each for each in headline.tables(first) if each.title == "Tuning")
    every = [axis.name for axis in headline_arms.baseline_axes("llama", "muon")]
    assert tuning.rows[0][7] == ", ".join(every)


@pytest.mark.parametrize(
    ("losses", "loss", "expected"),
    [
        ({0.8: 3.4, 0.9: 3.2, 1.0: 3.0}, 3.1, ("", 0.95)),
        ({0.8: 3.4, 0.9: 3.2, 1.0: 3.0}, 3.3, ("", 0.85)),
        ({0.8: 3.4, 0.9: 3.2, 1.0: 3.0}, 3.5, ("<", 0.8)),
        ({0.8: 3.4, 0.9: 3.2, 1.0: 3.0}, 2.9, (">", 1.0)),
        ({0.8: 3.4, 0.9: math.inf, 1.0: 3.0}, 3.1, ("", 0.95)),
        ({0.8: math.inf, 1.0: math.inf}, 3.1, (">", 1.0)),
    ],
)
def test_the_length_at_which_a_loss_is_reached_is_interpolated(losses, loss, expected):
    by_length = {length: [value, value] for length, value in losses.items()}
    found = headline_gains.tokens_to_reach(by_length, loss)
    assert found == (expected[0], pytest.approx(expected[1]))


def test_lengths_are_compared_by_the_seeds_that_all_of_them_have(labelled):
    """A stage that was stopped has fewer: means over other seeds differ by what seeds do."""

    def shown(records):
        (found,) = (each for each in headline.tables(records) if each.title.startswith("To reach"))
        return next(row for row in found.rows if row[:3] == ("Llama", "Muon", "vector"))

    for seed in (1, 4):
        kept = [one for one in labelled if one.labels["seed"] == seed]
        partly = [one for one in labelled if one.labels["length"] != 0.8 or one in kept]
        assert shown(partly) == shown(kept)
        assert shown(partly)[3] == "1"
    assert shown(labelled)[3] == "5"


def test_verdicts_need_three_seeds_and_an_interval_on_one_side():
    assert headline_gains.verdict([]) == "not run"
    assert headline_gains.verdict([0.01, 0.011]) == "too few seeds"
    assert headline_gains.verdict([0.01, 0.011, 0.012, -math.inf]) == "diverged"
    # The gain over a plain run that diverged is infinite, whatever the arm has done.
    assert headline_gains.verdict([0.01, 0.011, math.inf]) == "plain diverged"
    assert headline_gains.verdict([0.01, -math.inf, math.inf]) == "diverged"
    assert headline_gains.verdict([0.01, 0.011, math.nan]) == "diverged"
    assert headline_gains.verdict([0.01, 0.011, 0.012]) == "better"
    assert headline_gains.verdict([-0.01, -0.011, -0.012]) == "worse"
    assert headline_gains.verdict([0.01, -0.011, 0.012]) == "no difference seen"


def test_tables_and_plots_stand_on_the_page_and_in_the_readme(played):
    _, _, records = played
    sections, elsewhere = page.report(records, "gpu")
    (section,) = (each for each in sections if each.name == "headline")
    assert [shown.title for shown in section.tables] == [
        "Comparison",
        "Benchmarks: accuracy",
        "Benchmarks: bits per byte",
        "Other lengths and sizes",
        "To reach plain's final loss",
        "Variations",
        "Tuning",
    ]
    (row,) = (r for r in section.tables[0].rows if r[:3] == ("Llama", "AdamW", "vector"))
    html = page.render(sections, elsewhere, "gpu")
    assert all(f"<td>{cell}</td>" in html for cell in row)
    text = page.readme(sections, elsewhere, "gpu", Path("experiments"))
    assert f"| {' | '.join(row)} |" in text
    assert "experiments/plots/headline-0.svg" in text
