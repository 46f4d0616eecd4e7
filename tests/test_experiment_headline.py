"""The headline's program: each stage follows from the one before, and every arm is tuned alike."""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from learnable_multipliers.experiments import (
    headline,
    headline_arms,
    headline_report,
    page,
    table,
)
from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.experiments.record import Labelled
from learnable_multipliers.experiments.search import MIN_GAIN
from learnable_multipliers.experiments.variations import VARIATIONS, varied
from learnable_multipliers.pretrain.model.hybrid import empty_model
from learnable_multipliers.pretrain.trainer.optimizer import make_plan
from shuffling import made_up_record

GAINS = {"scalar": 0.01, "vector": 0.02, "symmetry-aware": 0.015, "cautious": -0.01}
GAINS |= {name: 0.0 for name in VARIATIONS} | {"rows alone": 0.03, "log scale": 0.04}
GAINS |= {"vector, varied": 0.05}
GAINS |= {"vector + cautious": 0.01, "vector + adamc": 0.03, "vector + normuon": 0.03}


def loss_of(run, noise=0.001):
    """Return a loss with a bowl around every arm's best settings, gains, and noise by seed."""
    labels = run.labels
    bottom = {"lr": 1.13e-2 if labels["optimizer"] == "adamw" else 5.66e-3, "weight_decay": 0.2}
    if str(labels["arm"]) in ("hyperball", "magnitude-direction"):
        bottom["lr"] = 1e-3
    off = [math.log2(labels[name] / best) for name, best in bottom.items()]
    gain = GAINS.get(str(labels["arm"]), 0.0)
    common = random.Random(labels["seed"]).gauss(0, 0.01)
    own = random.Random(run.in_words).gauss(0, noise)
    length = 0.2 * (1 - labels["length"]) - 0.05 * (labels["size"] - 1)
    return 3.5 + 0.01 * sum(x**2 for x in off) - gain + common + own + length


def record_of(run):
    loss = loss_of(run)
    tests = {"wiki": {"loss": loss + 0.1, "bits_per_byte": 1.1}}
    tests["lambada"] = {"loss": loss + 1, "bits_per_byte": 1.3 + loss / 10}
    steps = [float(step) for step in range(1, 100, 7)]
    curves = {"step": steps, "loss": [loss + 1 / step for step in steps]}
    # A nat is worth ten points of accuracy, and a fifth of a bit per byte.
    scores = {"items": "some", "accuracy": 0.9 - loss / 10, "bits per byte": loss / 5}
    scored = dict.fromkeys(headline.BENCHMARKS, scores) if run.scored else {}
    return made_up_record(run, {}, loss=loss, tests=tests, train=curves, benchmarks=scored)


@pytest.fixture(scope="module")
def played():
    """The whole program in a made-up world: its rounds, its runs by key, and their records."""
    records, rounds = {}, []
    while True:
        runs = headline.follow_up("gpu", records)
        new = {run.key: run for run in runs if run.key not in records}
        if not new:
            return rounds, {run.key: run for run in runs}, records
        rounds.append([run.labels for run in new.values()])
        records |= {key: record_of(run) for key, run in new.items()}


@pytest.fixture(scope="module")
def labelled(played):
    _, runs, records = played
    return [Labelled(labels=run.labels, record=records[key]) for key, run in runs.items()]


def test_stages_come_one_after_another(played):
    rounds, _, _ = played
    families = [{labels["family"] for labels in each} for each in rounds]
    first = families.index({"hybrid"})
    # (a, b) before (c), and (d, e) after it.
    assert set.union(*families[:first]) == {"llama"}
    assert rounds[0] == [
        {**labels, "stage": "tuning", "arm": "plain", "seed": 0} for labels in rounds[0]
    ]
    order = [labels for each in rounds for labels in each]
    arms = [labels["arm"] for labels in order]
    assert arms.index("vector") < arms.index("symmetry-aware") < arms.index("vector + adamc")
    lengths = [labels["length"] for labels in order]
    assert lengths.index(0.8) < lengths.index(1.64)
    # A stage waits for the records of the one before.
    for each in rounds:
        assert len({(labels["stage"], labels["seed"] == 0) for labels in each}) == 1

    def first_of(**wanted):
        return next(i for i, labels in enumerate(order) if wanted.items() <= labels.items())

    # With Muon, whose seeds scatter less, each comparison comes before the same with AdamW.
    for family, arm in (("llama", "vector"), ("hybrid", "vector"), ("llama", "symmetry-aware")):
        wanted = {"family": family, "arm": arm}
        assert first_of(**wanted, optimizer="muon") < first_of(**wanted, optimizer="adamw")
    # Whole seeds: what is stopped compares the arms with fewer of them.
    finals = [labels for labels in order if labels["stage"] == "final"][:15]
    assert [labels["seed"] for labels in finals] == [seed for seed in range(1, 6) for _ in range(3)]


def test_every_arm_has_the_same_number_of_trials(played):
    _, runs, _ = played
    tuning = [run.labels for run in runs.values() if run.labels["stage"] == "tuning"]
    trials = Counter((t["family"], t["optimizer"], t["arm"]) for t in tuning)
    rivals = {arm.name for arms in headline_arms.RIVALS.values() for arm in arms}
    for (family, _, arm), count in trials.items():
        # A search ends before, where it has tried every neighbour of its best.
        most = 6 if arm in rivals - {"magnitude-direction"} else 8
        if arm == "plain":
            # Once more as the others are, mostly of trials it has made.
            most = 28 + 8 if family == "llama" else 8 + 8
            assert 8 <= count <= most
        else:
            assert most - 3 <= count <= most, (family, arm)
    assert {labels["seed"] for labels in tuning} == {0}
    assert {labels["length"] for labels in tuning} == {0.5}


def test_reported_seeds_are_none_of_the_tuning(played):
    _, runs, _ = played
    finals = [run.labels for run in runs.values() if run.labels["stage"] == "final"]
    seeds = {}
    for labels in finals:
        key = tuple(labels[name] for name in ("family", "optimizer", "arm", "length", "size"))
        seeds.setdefault(key, []).append(labels["seed"])
    for (_, _, arm, length, _), found in seeds.items():
        five = arm in ("plain", "scalar", "vector", "vector, varied") and length <= 1
        assert found == [1, 2, 3, 4, 5][: 5 if five else 3]
    # The same settings as a trial that none was better than, with other seeds and lengths.
    trials = {}
    for run in runs.values():
        if run.labels["stage"] == "tuning":
            arm = tuple(run.labels[name] for name in ("family", "optimizer", "arm"))
            trials.setdefault(arm, []).append(run)
    for run in runs.values():
        arm = tuple(run.labels[name] for name in ("family", "optimizer", "arm"))
        if run.labels["stage"] == "final" and arm[2] != "vector, varied":
            losses = [loss_of(t) for t in trials[arm] if t.config.optimizer == run.config.optimizer]
            assert min(losses) <= min(map(loss_of, trials[arm])) + MIN_GAIN


def test_variations_change_tuned_runs_and_the_better_ones_are_put_together(played, labelled):
    _, runs, _ = played
    tried = [run for run in runs.values() if run.labels["stage"] == "variation"]
    assert {run.labels["optimizer"] for run in tried} == {"muon"}
    seeds, reference = {}, {}
    for run in tried:
        seeds.setdefault(run.labels["arm"], []).append(run.labels["seed"])
        if run.labels["arm"] == "vector":
            reference[run.labels["seed"]] = run.config
    assert set(seeds) == {"vector", *VARIATIONS}
    assert all(found == [6, 7, 8][: len(found)] for found in seeds.values())
    assert seeds["rows alone"] == seeds["log scale"] == [6, 7, 8]
    # Those without an effect are dropped with the first seed that is worse, here before long.
    assert sum(map(len, seeds.values())) < 3 * len(seeds) - 8
    for run in tried:
        if run.labels["arm"] != "vector":
            assert run.config != reference[run.labels["seed"]]
            assert run.config == varied(reference[run.labels["seed"]], [run.labels["arm"]])
    finals = [run for run in runs.values() if run.labels["arm"] == "vector, varied"]
    assert {run.labels["optimizer"] for run in finals} == {"adamw", "muon"}
    for run in finals:
        assert run.config.optimizer.multiplier_scale == "log"
        assert ". only=query kind=row" in run.config.optimizer.rules
    (shown,) = (each for each in headline.tables(labelled) if each.title == "Variations")
    rows = {row[1]: row for row in shown.rows}
    assert set(rows) == set(VARIATIONS)
    assert rows["log scale"][2] == "3"
    # The gain over vector, which has one of its own.
    assert float(rows["log scale"][3].split()[0]) == pytest.approx(0.02, abs=0.003)
    assert rows["log scale"][4] == rows["rows alone"][4] == "kept"
    assert {rows[name][4] for name in VARIATIONS if len(seeds[name]) < 3} == {"worse with a seed"}


def test_variations_set_what_they_say():
    config = headline_arms.shape("gpu", "llama", 0.5)
    config = replace(config, model=replace(config.model, vocab_size=64))
    config = with_optimizer(config, placement="full", kind="muon", lr=8e-3)

    def matrix(name, *variations):
        changed = varied(config, variations)
        changed.check()
        planned = make_plan(empty_model(changed.model), changed.optimizer)
        return next(entry.matrix for entry in planned.entries if name in entry.name)

    for name in VARIATIONS:
        assert matrix("layers.0.feed_forward.down_proj", name).carries
    assert matrix("lm_head", "rows on the head").blocks[0].row
    # Of two that set the same thing, the first takes precedence; others add to it.
    down = matrix("down_proj", "columns alone", "rows alone", "raw weights start at twice the size")
    assert down.col
    assert not down.blocks[0].row
    # The effective weight is as large as without: raw weights are divided by it.
    assert down.blocks[0].init == 0.5
    assert matrix("q_proj", "one for each head of query, key, value").num_multipliers > 1


def test_of_variations_of_one_setting_the_first_takes_precedence():
    """Their factors are of the tuned value: two that are kept do not multiply."""
    config = headline_arms.shape("gpu", "llama", 0.5)
    config = with_optimizer(config, kind="muon", weight_decay=0.0125, adamw_lr_scale=2.0)
    decays = ("decay of raw weights x 4", "decay of raw weights x 16")
    rates = ("AdamW side at half the rate", "AdamW side at twice the rate")
    schedules = ("multipliers without decay of their rate", "multipliers without warmup")
    found = varied(config, (*decays, *rates, *schedules))
    assert found.optimizer.weight_decay == 4 * 0.0125
    assert found.optimizer.adamw_lr_scale == 1.0
    assert found.schedule.multipliers == "no-decay"
    assert varied(config, reversed(decays)).optimizer.weight_decay == 16 * 0.0125
    # With AdamW there is no other side: the run is the same, and is not made twice.
    config = with_optimizer(config, kind="adamw")
    assert varied(config, rates) == config


def test_runs_are_what_their_labels_say(played):
    _, runs, _ = played
    seen = set()
    for run in runs.values():
        labels, config = run.labels, run.config
        assert config.optimizer.kind == labels["optimizer"]
        assert config.optimizer.lr == labels["lr"]
        if not str(labels["arm"]).startswith("AdamW side"):
            assert labels.get("adamw_lr_scale", 0) in (0, config.optimizer.adamw_lr_scale)
        assert config.schedule.tokens == round(220e6 * labels["length"])
        assert config.schedule.decay_start == pytest.approx(0.8 * config.schedule.tokens, abs=1)
        if "rest_lr" in labels:
            rest = config.optimizer.lr * config.optimizer.rest_lr_scale
            assert rest == pytest.approx(labels["rest_lr"])
        arm = labels["family"], labels["optimizer"], labels["arm"], labels["size"]
        if arm in seen:
            continue
        seen.add(arm)
        # It can be planned and checked.
        model = empty_model(replace(config.model, vocab_size=64))
        planned = make_plan(model, config.optimizer)
        assert bool(planned.num_multipliers) == (
            labels["arm"] in ("scalar", "symmetry-aware", "magnitude-direction", *VARIATIONS)
            or str(labels["arm"]).startswith("vector")
        )
        replace(config, model=replace(config.model, vocab_size=64)).check()
    sizes = {
        labels["size"]: empty_model(replace(run.config.model, vocab_size=64))
        for run in runs.values()
        if (labels := run.labels)["family"] == "llama"
    }
    inner = {size: model.num_parameters for size, model in sizes.items()}
    assert 1.9 < inner[2] / inner[1] < 2.3


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
    found = headline_report.reached(by_length, loss)
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
    assert headline_report.verdict([]) == "not run"
    assert headline_report.verdict([0.01, 0.011]) == "too few seeds"
    assert headline_report.verdict([0.01, 0.011, 0.012, -math.inf]) == "diverged"
    # The gain over a plain run that diverged is infinite, whatever the arm has done.
    assert headline_report.verdict([0.01, 0.011, math.inf]) == "plain diverged"
    assert headline_report.verdict([0.01, -math.inf, math.inf]) == "diverged"
    assert headline_report.verdict([0.01, 0.011, math.nan]) == "diverged"
    assert headline_report.verdict([0.01, 0.011, 0.012]) == "better"
    assert headline_report.verdict([-0.01, -0.011, -0.012]) == "worse"
    assert headline_report.verdict([0.01, -0.011, 0.012]) == "no difference seen"


def test_nothing_is_asked_of_the_paper_preset():
    assert headline.follow_up("paper", {}) == []


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
