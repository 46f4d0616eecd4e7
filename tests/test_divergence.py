"""A run that has diverged says so: no sample, an end record, an error, and no checkpoint lost."""

import math
from dataclasses import replace

import pytest
import torch

from learnable_multipliers.cli.demo import RUNS
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import CheckpointConfig, SpikeConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.preflight.resume_check import check_resume
from learnable_multipliers.pretrain.trainer import spikes
from learnable_multipliers.pretrain.trainer.evaluation import generate
from learnable_multipliers.pretrain.trainer.spikes import DivergenceError, LossPoint, SpikeState
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from learnable_multipliers.report import Run, write_page
from runs import HYBRID, killed_after, small_run
from test_cli import command_of

RULE = SpikeConfig(window=5, deviations=6, min_rise=0.5, patience=3)
GUESS = 5.5


def high(*losses):
    return [LossPoint(100 + step, loss) for step, loss in enumerate(losses)]


# -- the rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "skipped", "evaluation", "reason"),
    [
        (SpikeState([3.0] * 5), 0, 3.1, None),
        (SpikeState([3.0] * 5), 0, None, None),
        (SpikeState([3.0] * 5), 0, math.nan, "the loss on held-out text is nan"),
        (SpikeState([3.0] * 5), 0, math.inf, "the loss on held-out text is inf"),
        # One bad batch at the end is none; as many as would be a spike are.
        (SpikeState([3.0] * 5), 2, 3.1, None),
        (SpikeState([3.0] * 5), 3, 3.1, "the last 3 steps had no finite gradients and were"),
        (SpikeState(), 1, 5.5, "the last 1 steps had no finite gradients and were skipped"),
        # A high loss is an odd batch, unless held-out text says the same.
        (SpikeState([3.0] * 5, high(4.0), 99), 0, 3.1, None),
        (SpikeState([3.0] * 5, high(4.0), 99), 0, 4.1, "loss spike: 4.000 at step 100"),
        (SpikeState([3.0] * 5, high(None), 99), 1, 4.1, None),
        # Before the first window is full nothing is high.
        (SpikeState([5.6, 9.0]), 0, 9.0, "the loss is 9.000, above the 5.500 of a uniform guess"),
        (SpikeState([5.6, 6.4]), 0, 6.4, None),
        (SpikeState([11.0, 10.0]), 0, 10.0, None),
        (SpikeState([9.0] * 2, [], 4), 0, 9.0, None),
        # What a run went on with after a spike.
        (
            SpikeState([9.0] * 2, [], 5),
            0,
            9.0,
            "the loss is 9.000, above the 5.500 of a uniform guess",
        ),
        # Learned by heart: the loss on held-out text alone says nothing.
        (SpikeState([3.0, 0.1]), 0, 9.0, None),
    ],
)
def test_divergence_at_the_end_is_a_pure_function_of_what_the_run_knows(
    state, skipped, evaluation, reason
):
    found = spikes.divergence(state, skipped, evaluation, GUESS, RULE)
    assert found is None if reason is None else found.startswith(reason)


# -- samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_whose_logits_are_not_finite_gives_no_sample(value):
    model = build(replace(HYBRID, vocab_size=61))
    with torch.no_grad():
        model.lm_head.weight[3] = value
    assert generate(model, torch.tensor([3, 14]), 5, 32, seed=0) is None


def ruin(trainer):
    """Let the weights of a run be NaN from now on."""
    with trainer.optimizer.rewriting(["lm_head.weight"]) as (state,):
        state.raw.fill_(math.nan)


def test_sampling_from_a_diverged_model_does_not_stand_in_the_way_of_a_rollback(data, tmp_path):
    rule = SpikeConfig(max_rollbacks=1, patience=2)
    config = small_run(data, tmp_path / "run", steps=16, spikes=rule)
    config = replace(config, log=replace(config.log, every=1, sample_every=1))
    seen = []
    trainer = Trainer(config, seen.append)
    for count, _ in enumerate(trainer.steps(), 1):
        if count == 12:
            ruin(trainer)
    told = [record["text"] for record in seen if record["kind"] == "warning"]
    assert told[0] == "step 13: no sample: the model's logits are not finite"
    assert "rolled back to the checkpoint of step 10" in told[-1]
    assert trainer.diverged is None
    records = read_metrics(config.out)
    assert [r["step"] for r in records if r["kind"] == "sample"] == list(range(1, 17))
    assert records[-1]["kind"] == "end"
    assert records[-1]["diverged"] is None


def test_a_run_that_may_goes_back_at_its_last_step_without_patience(data, tmp_path):
    config = small_run(data, tmp_path / "run", spikes=SpikeConfig(max_rollbacks=1))
    config = replace(config, log=replace(config.log, every=1))
    seen = []
    trainer = Trainer(config, seen.append)
    for count, _ in enumerate(trainer.steps(), 1):
        if count == 11:
            ruin(trainer)
    told = [record["text"] for record in seen if record["kind"] == "warning"]
    assert told[-1].startswith(
        "the loss on held-out text is nan: rolled back to the checkpoint of step 10, continuing"
    )
    assert (trainer.step, trainer.diverged) == (12, None)
    assert checkpoints.steps(config.out / "checkpoints") == [10, 12]
    assert [r["step"] for r in read_metrics(config.out) if r["kind"] == "eval"] == [6, 12]


# -- the end of a run -------------------------------------------------------------------------


def ruined(config, step, seen=None):
    """Train a run whose weights become NaN after a step."""
    trainer = Trainer(config, None if seen is None else seen.append)
    for done in trainer.steps():
        if done == step:
            ruin(trainer)
    return trainer


def test_the_end_of_a_diverged_run_says_so_and_displaces_no_checkpoint(data, tmp_path):
    config = small_run(data, tmp_path / "run", checkpoint=CheckpointConfig(every=3, keep=2))
    seen = []
    trainer = ruined(config, 7, seen)
    assert trainer.diverged == "the loss on held-out text is nan"
    ending = read_metrics(config.out)[-1]
    assert (ending["kind"], ending["diverged"]) == ("end", trainer.diverged)
    # Those of steps 9 and 12 would have been of the diverged model.
    assert checkpoints.steps(config.out / "checkpoints") == [3, 6]
    (aside,) = (config.out / "checkpoints").glob("diverged-*")
    assert aside.name.startswith("diverged-step-00000012-")
    assert checkpoints.load(aside).step == 12
    assert str(aside) in seen[-1]["text"]
    with pytest.raises(DivergenceError) as refused:
        trainer.raise_if_diverged()
    assert str(refused.value).startswith(
        f"the run has diverged: {trainer.diverged}. Earlier checkpoints"
    )
    assert "--resume repeats the end from step 6" in str(refused.value)
    # It goes on from before, and that run is a good one.
    again = Trainer(replace(config, resume=True))
    assert again.step == 6
    assert again.train() == "finished"
    assert read_metrics(config.out)[-1]["diverged"] is None


def test_a_diverged_run_stays_so_when_asked_again(data, tmp_path, monkeypatch):
    """A kill between the last checkpoint and its renaming leaves it in its place."""
    config = small_run(data, tmp_path / "run", steps=6)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "set_aside", lambda path, why: path)
        ruined(config, 2)
    again = Trainer(replace(config, resume=True))
    assert again.train() == "diverged"
    with pytest.raises(DivergenceError, match="has diverged: the loss on held-out text is nan"):
        again.raise_if_diverged()


def test_a_run_stopped_after_its_last_step_is_evaluated_before_it_ends(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=6)
    trainer = Trainer(config)
    for step in trainer.steps():
        if step == 5:
            ruin(trainer)
        if step == 6:
            trainer.save()
            break
    trainer.close()
    again = Trainer(replace(config, resume=True))
    assert again.train() == "diverged"


def test_training_too_fast_ends_with_one_line_and_an_exit_code(data, ask, tmp_path):
    config = small_run(data, tmp_path / "run", steps=6)
    fast = replace(config.optimizer, lr=100.0, weight_decay=0.0)
    code, out, complaints = ask(*command_of(replace(config, optimizer=fast)))
    assert code == 1
    assert "Done" not in out
    assert complaints.startswith("lrm train: the run has diverged: the loss on held-out text is")
    assert complaints.endswith("again with a lower optimizer.lr or a longer warmup")
    assert "There is no earlier checkpoint" in complaints
    assert complaints.count("\n") == 0
    # Its report says so, too.
    text = write_page(tmp_path / "page.html", [Run.load(config.out)], title="t").read_text()
    assert "Run run has diverged: the loss on held-out text is nan." in text
    code, _, complaints = ask("train", "tiny", "--out", str(config.out), "--optimizer.eps", "0")
    assert code == 1
    assert "optimizer.eps must be at least 1.2e-38, got 0" in complaints


def test_a_demo_that_diverges_writes_its_report_and_fails(ask, data, tmp_path, monkeypatch):
    from learnable_multipliers.cli import demo

    config = small_run(data, tmp_path / "unused", steps=4)
    fast = replace(config.optimizer, lr=100.0, weight_decay=0.0)
    monkeypatch.setattr(demo, "training", lambda _: replace(config, optimizer=fast))
    code, out, complaints = ask("demo", "--out", str(tmp_path / "demo"))
    assert code == 1
    assert complaints.startswith(f"lrm demo: run {next(iter(RUNS))} has diverged: the loss on")
    assert "held-out loss nan nats per token" in out
    assert "has diverged" in (tmp_path / "demo" / "report.html").read_text()


def test_equal_runs_that_diverged_do_not_pass_for_a_good_resume(data, tmp_path):
    config = small_run(data, tmp_path / "both", model=replace(HYBRID, vocab_size=257))
    fast = replace(config.optimizer, lr=100.0, weight_decay=0.0)
    with pytest.raises(DivergenceError, match=r"has diverged after 8 steps: .* prove nothing"):
        check_resume(replace(config, optimizer=fast), 4)


def test_a_report_of_a_run_that_ends_well_has_no_word_of_divergence(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3)
    Trainer(config).train()
    run = Run.load(config.out)
    assert run.diverged is None
    assert "diverged" not in write_page(tmp_path / "page.html", [run], title="t").read_text()
    assert killed_after(replace(config, resume=True), 3).diverged is None
