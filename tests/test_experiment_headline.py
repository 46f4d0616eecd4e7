"""The headline's program: each stage follows from the one before, and every arm is tuned alike."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from headline_world import loss_of, play, with_labels
from learnable_multipliers.experiments import catalogue, headline
from learnable_multipliers.experiments.headline import arms as headline_arms
from learnable_multipliers.experiments.headline.search import MIN_GAIN
from learnable_multipliers.experiments.headline.variations import VARIATIONS, varied
from learnable_multipliers.experiments.presets import with_optimizer
from learnable_multipliers.experiments.record import read_file
from learnable_multipliers.pretrain.model.hybrid import empty_model
from learnable_multipliers.pretrain.trainer.build import make_plan


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
        assert len({labels["stage"] in ("tuning", "repeat") for labels in each}) == 1

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
        most = 6 if arm in rivals - {"magnitude-direction", "hyperball"} else 8
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
    (vector, together) = (run for run in tried if run.labels["optimizer"] == "adamw")
    assert [run.labels["arm"] for run in (vector, together)] == ["vector", "vector, varied"]
    assert vector.labels["seed"] == together.labels["seed"] == 6
    tried = [run for run in tried if run.labels["optimizer"] == "muon"]
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
    assert "decay of raw weights / 4" in seeds
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
    (adamw,) = (row for row in shown.rows if row[0] == "AdamW")
    assert (adamw[1], adamw[2], adamw[4]) == ("vector, varied", "1", "kept")
    rows = {row[1]: row for row in shown.rows if row[0] == "Muon"}
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
    decays = ("decay of raw weights x 4", "decay of raw weights x 16", "decay of raw weights / 4")
    rates = ("AdamW side at half the rate", "AdamW side at twice the rate")
    schedules = ("multipliers without decay of their rate", "multipliers without warmup")
    found = varied(config, (*decays, *rates, *schedules))
    assert found.optimizer.weight_decay == 4 * 0.0125
    assert found.optimizer.adamw_lr_scale == 1.0
    assert found.schedule.multipliers == "no-decay"
    assert varied(config, reversed(decays)).optimizer.weight_decay == 0.0125 / 4
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
        if "adamw_lr" in labels:
            rest = config.optimizer.lr * config.optimizer.rest_lr_scale
            assert rest == pytest.approx(labels["adamw_lr"])
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


def test_nothing_is_asked_of_the_paper_preset():
    assert headline.follow_up("paper", {}) == []


def replay(played, changed, **world):
    """Play the program with other outcomes of some runs; the records of all others are kept."""
    _, runs, records = played
    kept = {key: record for key, record in records.items() if not changed(runs[key])}
    return play(records=kept, **world)


def finals_of(runs):
    return {
        (run.labels["optimizer"], run.labels["arm"])
        for run in runs.values()
        if run.labels["stage"] == "final" and run.labels["family"] == "llama"
    }


def test_an_arm_that_crashes_keeps_no_other_from_its_runs(played):
    _, everything, _ = played

    def crashes(run):
        return run.labels["arm"] == "muown"

    _, runs, records = replay(played, crashes, fails=crashes)
    # A trial that failed is as bad as one that diverged: its neighbours are tried.
    tried = [run for run in runs.values() if run.labels["arm"] == "muown"]
    assert len(tried) == 5
    assert {run.labels["stage"] for run in tried} == {"tuning"}
    assert finals_of(runs) == finals_of(everything) - {("muon", "muown")}
    others = {key for key, run in everything.items() if run.labels["arm"] != "muown"}
    assert others == set(runs) & set(records)
    # Reports have the runs that were made after those that failed, the next call repeats them.
    named = catalogue.labelled_records("headline", "gpu", records)
    assert {one.record.key for one in named} == others
    missing = {run.key for run in headline.follow_up("gpu", records)} - set(records)
    assert missing == {tried[0].key}
    assert set(play(records=records)[2]) == set(everything)


def test_a_trial_that_crashes_is_not_the_end_of_a_search(played):
    _, everything, _ = played
    vector = {"stage": "tuning", "optimizer": "muon", "family": "llama", "arm": "vector"}
    first = next(run for run in everything.values() if vector.items() <= run.labels.items())

    def crashes(run):
        return run.key == first.key

    _, runs, _ = replay(played, crashes, fails=crashes)
    assert {("muon", "vector"), ("muon", "vector + normuon")} <= finals_of(runs)


@pytest.mark.parametrize("arms", [("vector",), ("scalar", "vector"), ("plain",), None])
def test_the_program_ends_whatever_crashes(played, arms):
    def crashes(run):
        return arms is None or run.labels["arm"] in arms

    _, runs, _ = replay(played, crashes, fails=crashes)
    found = finals_of(runs)
    assert not {arm for _, arm in found} & set(arms or ("plain", "vector", "cautious"))
    if arms is not None:
        assert ("muon", "normuon") in found


def test_runs_of_three_arms_are_followed_and_scored_and_no_others(played):
    _, runs, _ = played
    for run in runs.values():
        labels = run.labels
        followed = (
            (labels["stage"], labels["length"], labels["size"]) == ("final", 1.0, 1)
        ) and labels["arm"] in ("plain", "vector", "vector, varied")
        assert run.scored == followed
        # 220M tokens are 3,357 steps.
        assert run.config.log.evaluate_every == (279 if followed else 0)


def test_records_of_the_baselines_still_belong_to_their_runs():
    """A setting that changes their keys would have them trained again."""
    folder = Path(__file__).parents[1] / "results" / "experiments"
    made = {record.key: record for record in read_file(folder / "headline.jsonl.xz")}
    named = catalogue.labelled_records("headline", "gpu", made)
    (left,) = set(made) - {one.record.key for one in named}
    # The one that docs/headline.md leaves out.
    optimizer = made[left].config["optimizer"]
    assert (optimizer["lr"], optimizer["weight_decay"]) == (1.13e-2, 0.0125)


def adamw(runs, **labels):
    labels |= {"family": "llama", "optimizer": "adamw"}
    return [run for run in runs.values() if labels.items() <= run.labels.items()]


def settings(run):
    names = [axis.name for axis in headline_arms.baseline_axes("llama", "adamw")]
    return ", ".join(f"{name} {run.labels[name]:g}" for name in names)


def test_the_best_trials_of_adamw_are_repeated_and_the_better_mean_is_the_baseline(played):
    _, runs, _ = played
    repeats = adamw(runs, stage="repeat")
    assert [run.labels["seed"] for run in repeats] == [9, 10, 9, 10]
    assert all(run.labels["arm"] == "plain" for run in repeats)
    first, second = (settings(run) for run in repeats[::2])
    assert first != second
    assert not any(
        run.labels["stage"] == "repeat" and run.labels["optimizer"] == "muon"
        for run in runs.values()
    )

    for lucky, start in ((first, second), (second, first)):

        def world(run, lucky=lucky):
            """Return losses in which one of the two was good by its seed alone."""
            is_repeat = run.labels["stage"] == "repeat"
            return loss_of(run) + 0.1 * (is_repeat and settings(run) == lucky)

        _, found, records = replay(played, lambda run: run in adamw(runs), loss_of=world)
        for arm in ("plain", "cautious"):
            finals = adamw(found, stage="final", arm=arm, length=1.0, size=1)
            trials = adamw(found, stage="tuning", arm=arm)
            assert settings(finals[0] if arm == "plain" else trials[0]) == start
        tables = {each.title: each for each in headline.tables(with_labels(found, records))}
        means = {row[3]: float(row[5]) for row in tables["Repeated trials"].rows}
        assert len(means) == 2
        chosen = min(means, key=means.__getitem__)
        assert chosen == start


def test_adamw_has_the_variations_of_muon_only_if_they_are_better(played):
    def is_adamw(run):
        return run.labels["optimizer"] == "adamw" and run.labels["arm"] == "vector, varied"

    assert ("adamw", "vector, varied") in finals_of(played[1])
    _, runs, _ = replay(played, is_adamw, loss_of=lambda run: loss_of(run) + 0.1 * is_adamw(run))
    assert finals_of(runs) == finals_of(played[1]) - {("adamw", "vector, varied")}


def test_a_combination_starts_from_the_rate_that_vector_was_tuned_to(played):
    ratio = "multiplier_lr_scale"

    def with_muon(run):
        return ratio in run.labels and run.labels["optimizer"] == "muon"

    def likes_fast(run):
        return loss_of(run) + 0.01 * abs(math.log2(run.labels.get(ratio, 16.0) / 16.0))

    _, runs, _ = replay(played, with_muon, loss_of=likes_fast)
    muon = [run.labels for run in runs.values() if run.labels["optimizer"] == "muon"]
    tuned = next(at for at in muon if (at["stage"], at["arm"]) == ("final", "vector"))
    first = next(at for at in muon if str(at["arm"]).startswith("vector + "))
    assert first[ratio] == tuned[ratio] > 4.0


def test_runs_and_minutes_of_the_docs_are_those_of_the_program(played):
    _, runs, _ = played
    text = (Path(__file__).parents[1] / "docs" / "headline.md").read_text()
    estimate = re.search(r"about (\d+) runs and takes about (\d+) minutes", text.replace("\n", " "))
    speeds = {"llama": 2.45e6, "hybrid": 1.58e6}

    def size(run):
        return run.config.model.num_layers * run.config.model.hidden_size**2

    usual = {run.labels["family"]: size(run) for run in runs.values() if run.labels["size"] == 1}
    seconds = 0.0
    for run in runs.values():
        family = run.labels["family"]
        seconds += run.config.schedule.tokens / speeds[family] * size(run) / usual[family]
        seconds += 7 * run.scored
    assert len(runs) == pytest.approx(int(estimate[1]), abs=5)
    assert seconds / 60 == pytest.approx(int(estimate[2]), abs=5)
