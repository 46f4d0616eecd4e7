"""The headline's tables, sentences and plots have the gains of a made-up world."""

import math
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from headline_world import GAINS
from learnable_multipliers.cli.train import configure
from learnable_multipliers.experiments import headline, page, readings
from learnable_multipliers.experiments.headline import arms as headline_arms
from learnable_multipliers.experiments.headline import gains as headline_gains
from learnable_multipliers.experiments.run import key_of


def test_the_table_has_the_gains_of_the_world(labelled):
    compared, _, _, longer, shorter, _, tuning, *_ = headline.tables(labelled)
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
    mean, low, high = (float(word.strip("[],")) for word in reached[5].split())
    assert low < mean < high
    assert mean == pytest.approx(0.9, abs=0.02)
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
        runs = readings.select(labelled, stage="final", length=1.0, size=1, **arm)
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


def rows_of(records, title):
    (found,) = (each for each in headline.tables(records) if each.title == title)
    return {row[:3]: row for row in found.rows}


def test_arms_that_were_not_reached_stand_in_the_table_as_not_run(labelled):
    part = [one for one in labelled if one.labels["arm"] in ("plain", "vector")]
    rows = rows_of(part, "Comparison")
    for arm in ("normuon", "vector, varied", "vector + a rival"):
        assert rows["Llama", "Muon", arm][3:7] == ("0", "", "", "not run")
    assert rows["Llama", "Muon", "vector"][6] == "better"
    assert len(rows) == len(headline_arms.expected())
    # What was run takes the place of what was to be.
    part += [one for one in labelled if one.labels["arm"] == "vector + normuon"]
    rows = rows_of(part, "Comparison")
    assert ("Llama", "Muon", "vector + a rival") not in rows
    assert rows["Llama", "AdamW", "vector + a rival"][6] == "not run"
    assert ("Llama", "Muon", "vector + a rival") in rows_of(labelled[:1], "Comparison")
    everything = rows_of(labelled, "Comparison")
    assert not any("not run" in row for row in everything.values())


def test_lengths_that_were_not_reached_stand_in_the_table_as_not_run(labelled):
    reach, other = "To reach plain's final loss", "Other lengths and sizes"
    for kind in ("Muon", "AdamW"):
        assert rows_of(labelled[:1], reach)["Llama", kind, "scalar or vector"][5] == "not run"
    part = [one for one in labelled if one.labels["optimizer"] == "muon"]
    assert set(rows_of(part, reach)) == {
        ("Llama", "Muon", "vector"),
        ("Llama", "AdamW", "scalar or vector"),
    }
    kept = [one for one in part if one.labels["size"] == 1]
    (found,) = (each for each in headline.tables(kept) if each.title == other)
    rows = {(row[1], row[2], row[4]): row for row in found.rows}
    assert rows["Muon", "vector", "1x"][8] == "better"
    for missing in (
        ("Muon", "scalar or vector", "2x"),
        ("AdamW", "scalar or vector", "1x"),
        ("AdamW", "plain", "2x"),
    ):
        assert rows[missing][5:] == ("0", "", "", "not run")
    assert ("Muon", "scalar or vector", "1x") not in rows
    everything = headline.tables(labelled)
    assert not any("not run" in row for each in everything for row in each.rows)


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
    found = headline_gains.tokens_to_reach(losses, loss)
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
        assert "[" not in shown(partly)[5]
    assert shown(labelled)[3] == "5"


def changed(records, change, **labels):
    """Return records with other losses for the runs with these labels."""

    def of(one):
        tests = {
            name: {**found, "loss": found["loss"] + change(one)}
            for name, found in one.record.tests.items()
        }
        return replace(one, record=replace(one.record, tests=tests))

    chosen = readings.select(records, **labels)
    return [of(one) if one in chosen else one for one in records]


def test_a_seed_beyond_the_lengths_is_shown_as_a_bound(labelled):
    """It is no number: a mean over it would be that of the lengths which were run."""
    vector = {"stage": "final", "family": "llama", "optimizer": "muon", "arm": "vector"}
    (row,) = [
        rows_of(records, "To reach plain's final loss")["Llama", "Muon", "vector"]
        for records in [
            changed(
                labelled,
                lambda one: {2: -0.5, 3: 0.5, 4: 0.5}.get(one.labels["seed"], 0.0),
                **vector,
            )
        ]
    ]
    number, below, above = re.fullmatch(r"(.*\]), (<.*\)), (>.*)", row[5]).groups()
    assert (below, above) == ("<0.80 (1 of 5 seeds)", ">1.00 (2 of 5 seeds)")
    kept = [one for one in labelled if one.labels["seed"] in (1, 5)]
    assert number == rows_of(kept, "To reach plain's final loss")["Llama", "Muon", "vector"][5]
    assert headline_gains.format_bounded([("<", 0.7), ("<", 0.8)]) == "<0.80 (2 of 2 seeds)"
    assert headline_gains.format_bounded([(">", 0.9), (">", 1.0)]) == ">0.90 (2 of 2 seeds)"


def says(records, start="Llama, Muon: "):
    (compared,) = (each for each in headline.tables(records) if each.title == "Comparison")
    assert len(compared.says) == 4
    (found,) = (each for each in compared.says if each.startswith(start))
    return found.removeprefix(start)


def test_sentences_say_what_the_comparison_has(labelled):
    number = r"-?0\.\d+"
    interval = rf"{number} nats \[{number}, {number}\]"
    text = says(labelled)
    assert re.fullmatch(
        rf"vector gains {interval} over plain; "
        r"vector needs 0\.\d{3} \[0\.\d{3}, 0\.\d{3}\] of plain's tokens for plain's final "
        r"loss; better than 5 of 5 rivals\.",
        text,
    )
    gain = rows_of(labelled, "Comparison")["Llama", "Muon", "vector"][5]
    assert gain.replace(" ", " nats ", 1) in text
    # No rival is run with the hybrid, and no shorter run.
    assert re.fullmatch(rf"vector gains {interval} over plain\.", says(labelled, "hybrid, Muon: "))
    muon = {"stage": "final", "family": "llama", "optimizer": "muon", "length": 1.0, "size": 1}
    vector = {**muon, "arm": "vector"}
    worse = {name: value for name, value in vector.items() if name != "length"}
    text = says(changed(labelled, lambda one: 0.1, **worse))
    assert re.match(
        rf"vector loses {interval} against plain; vector needs >1\.00 \(5 of 5 seeds\)", text
    )
    assert "better than 0 of 5 rivals, worse than 5" in text
    wide = {1: 0.05, 2: -0.01, 3: 0.01, 4: 0.03, 5: 0.02}
    text = says(changed(labelled, lambda one: wide[one.labels["seed"]], **vector))
    found = re.match(
        rf"no difference between vector and plain seen, with a gain of {number} nats "
        rf"\[{number}, ({number})\]; one of more than ({number}) nats is unlikely; ",
        text,
    )
    assert found[1] == found[2]
    assert "no difference from " in text


def test_sentences_say_what_was_not_run_or_diverged(labelled):
    assert says(labelled[:1]) == "no seed of both vector and plain was run."
    rivals = {arm.name for arms in headline_arms.RIVALS.values() for arm in arms}
    none = [one for one in labelled if one.labels["arm"] not in rivals]
    assert says(none).endswith("; no rival was run.")
    few = [one for one in labelled if one.labels["arm"] not in rivals - {"normuon", "cautious"}]
    assert says(few).endswith("; better than 2 of 2 rivals; 3 rivals not run.")
    one = [one for one in none if one.labels["stage"] != "final" or one.labels["seed"] == 1]
    assert says(one).startswith("vector and plain have 1 seed in common, too few for a verdict; ")
    final = {"stage": "final", "family": "llama", "optimizer": "muon", "length": 1.0, "size": 1}
    for arm, start in (
        ("plain", "a run of plain diverged; "),
        ("vector", "a run of vector diverged; "),
    ):
        lost = changed(
            labelled, lambda one: math.inf * (one.labels["seed"] == 2) or 0.0, arm=arm, **final
        )
        assert says(lost).startswith(start)
    lost = changed(labelled, lambda one: math.inf, arm="normuon", **final)
    assert "better than 4 of 5 rivals, 1 diverged" in says(lost)


def test_the_command_of_each_arm_makes_its_first_run(labelled, place):
    rows = rows_of(labelled, "Commands")
    assert set(rows) == set(rows_of(labelled, "Comparison"))
    by_name = {}
    for one in headline_gains.finals(labelled):
        if one.labels["seed"] == 1:
            by_name[headline_gains.named(one.labels)] = one.record
    for name, row in rows.items():
        assert row[3] == (
            "1 to 5" if name[2] in ("plain", "scalar", "vector", "vector, varied") else "1 to 3"
        )
        words = shlex.split(row[4])
        assert words[:2] == ["lrm", "train"]
        assert key_of(configure(words[2:])) == by_name[name].key


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
        "Repeated trials",
        "Commands",
    ]
    assert [plot.title for plot, _ in section.plots][:3] == [
        "Loss over time, Llama",
        "Gain on the way, Llama",
        "Gain over plain, Llama",
    ]
    (row,) = (r for r in section.tables[0].rows if r[:3] == ("Llama", "AdamW", "vector"))
    html = page.render(sections, elsewhere, "gpu")
    assert all(f"<td>{cell}</td>" in html for cell in row)
    text = page.readme(sections, elsewhere, "gpu", Path("experiments"))
    assert f"| {' | '.join(row)} |" in text
    # What follows stands above the numbers.
    for sentence in section.tables[0].says:
        assert text.index(f"- {sentence}") < text.index(f"| {' | '.join(row)} |")
        assert f"<p>{sentence}</p>".replace("'", "&#39;") in html
    assert "experiments/plots/headline-0.svg" in text


def test_the_plots_are_of_held_out_losses_paired_by_seed(labelled):
    """Training losses are of one batch each, and scatter by more than the gain."""
    first, gain, *_ = headline.plot(labelled)
    lines = {line.get_label(): line for line in first.figure.axes[0].lines}
    plain = readings.select(
        labelled, stage="final", length=1.0, size=1, family="llama", arm="plain"
    )
    muon = [one.record for one in plain if one.labels["optimizer"] == "muon"]
    drawn = lines["Muon, plain"]
    # Thirteen points, the last at the end of the run: 220M tokens at a million a second.
    assert len(drawn.get_xdata()) == 13
    assert drawn.get_xdata()[-1] == pytest.approx(220, abs=0.1)
    assert drawn.get_ydata()[-1] == pytest.approx(fmean(record.loss for record in muon), abs=1e-6)
    (axes,) = gain.figure.axes
    found = {line.get_label(): line for line in axes.lines}
    vector = readings.select(
        labelled, stage="final", length=1.0, size=1, family="llama", arm="vector"
    )
    losses = {
        one.labels["seed"]: one.record.loss for one in vector if one.labels["optimizer"] == "muon"
    }
    by_seed = [
        one.record.loss - losses[one.labels["seed"]]
        for one in plain
        if one.labels["optimizer"] == "muon"
    ]
    assert found["Muon"].get_ydata()[-1] == pytest.approx(fmean(by_seed), abs=1e-6)
    # The band is as wide as the gains of seeds differ, not as their losses do.
    band = axes.collections[list(found).index("Muon")].get_paths()[0].vertices[:, 1]
    assert max(band) - min(band) == pytest.approx(max(by_seed) - min(by_seed), abs=1e-6)
