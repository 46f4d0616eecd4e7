"""A loss that leaves its course: when it is noticed, and where the run goes on from."""

import math
import signal
from dataclasses import replace

import pytest
import torch

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import CheckpointConfig, SpikeConfig, TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.preflight.resume_check import without_clock
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.spikes import (
    LossPoint,
    SpikeState,
    describe_spike,
    is_spike,
    limit,
    observe,
    reset_after_spike,
    rollback_steps,
)
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from learnable_multipliers.report import Run, write_page
from runs import (
    BATCH,
    assert_same,
    damage,
    small_run,
)

RULE = SpikeConfig(max_rollbacks=1, window=5, deviations=6, min_rise=0.5, patience=2)


def after(losses, rule=RULE, state=None, every=10):
    """Return the state after some looks, one every few steps."""
    state = state or SpikeState()
    for number, loss in enumerate(losses, 1):
        state = observe(state, LossPoint(state.good_step + every * number, loss), rule)
    return state


# -- the rule ---------------------------------------------------------------------------------


def test_the_limit_is_the_median_and_so_many_deviations():
    usual = [3.0, 3.1, 2.9, 3.3, 2.6]
    # Median 3, absolute deviations 0, 0.1, 0.1, 0.3, 0.4.
    assert limit(usual, replace(RULE, min_rise=1e-9)) == pytest.approx(3 + 6 * 1.4826 * 0.1)
    assert limit(usual, replace(RULE, min_rise=2.0)) == 5.0
    assert limit(usual[:4], RULE) == math.inf


def test_one_outlier_does_not_move_the_limit_much():
    usual = [3.0 + 0.01 * (n % 5) for n in range(49)]
    rule = SpikeConfig()
    assert limit([*usual, 1e6], rule) - limit([*usual, 3.0], rule) < 0.02


@pytest.mark.parametrize(
    ("losses", "spike"),
    [
        ([3.0] * 5 + [3.6], False),
        ([3.0] * 5 + [3.6, 3.6], True),
        ([3.0] * 5 + [3.6, 3.4, 3.6], False),
        ([3.0] * 5 + [3.5, 3.5], False),
        # From above only: a loss may fall as fast as it likes.
        ([3.0] * 5 + [0.1] * 5, False),
        ([3.0] * 4 + [9.0, 9.0], False),
        ([None, None], True),
        ([3.0] * 5 + [3.6, None], True),
        ([3.0, None, 3.0, None], False),
    ],
)
def test_a_spike_is_high_looks_in_a_row(losses, spike):
    assert is_spike(after(losses), RULE) is spike


def test_high_losses_do_not_count_as_usual():
    state = after([3.0] * 5 + [9.0])
    assert state.usual == [3.0] * 5
    assert [look.loss for look in state.high] == [9.0]
    assert after([3.0] * 5 + [9.0, 3.0]).usual == [3.0] * 5
    assert len(after([3.0] * 20).usual) == 5


def test_what_was_gone_on_with_is_learned_anew():
    state = reset_after_spike(
        SpikeState([3.0] * 5, [LossPoint(60, 9.0), LossPoint(70, None), LossPoint(80, 9.5)], 50, 1)
    )
    assert state == SpikeState([9.0, 9.5], [], 80, 1)
    state = after([9.2] * 4, state=state)
    assert not state.high
    assert state.usual == [9.5] + [9.2] * 4


def test_losses_of_a_usual_course_are_no_spike():
    """Falls as a tiny run does, with noise ten times as large and a heavy-tailed batch at times."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=generator).tolist()
    losses = [
        3.1 + 4 * math.exp(-n / 20) + 0.1 * noise[n] + (0.8 if n % 50 == 49 else 0)
        for n in range(400)
    ]
    state, rule = SpikeState(), SpikeConfig()
    for step, loss in enumerate(losses):
        state = observe(state, LossPoint(step, loss), rule)
        assert not is_spike(state, rule)


def test_a_checkpoint_counts_once_its_weights_were_seen_to_be_good():
    state = SpikeState(good_step=30)
    assert rollback_steps([10, 20, 30, 40], state, 10) == [10, 20]
    assert rollback_steps([20, 29], state, 10) == [20]
    assert rollback_steps([30, 40], state, 10) == []


@pytest.mark.parametrize(
    ("kept", "expected"),
    [([5, 10, 15], 2), ([5, 7, 10], 3), ([5, 10, 12], 3), ([5, 7, 8, 10, 15], 2), ([3], 2)],
)
def test_checkpoints_of_a_stopped_run_do_not_displace_the_others(kept, expected):
    assert checkpoints.num_to_keep(kept, 5, 2) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rollbacks": -1}, "spikes.max_rollbacks must be a number of at least 0, got -1"),
        ({"window": 1}, "spikes.window must be a number of at least 2, got 1"),
        ({"patience": 0}, "spikes.patience must be a number of at least 1, got 0"),
        ({"max_skipped": -1}, "spikes.max_skipped must be a number of at least 0, got -1"),
        ({"deviations": 0.0}, "spikes.deviations must be a positive number, got 0"),
        ({"min_rise": math.nan}, "spikes.min_rise must be a positive number, got nan"),
    ],
)
def test_impossible_rules_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        SpikeConfig(**changes)


@pytest.mark.parametrize("section", ["log", "checkpoint"])
def test_going_back_without_anything_to_go_back_to_is_rejected(section):
    config = TrainConfig()
    changes = {section: replace(getattr(config, section), every=0)}
    replace(config, **changes).check()
    with pytest.raises(ValueError, match="needs logged losses and checkpoints"):
        replace(config, spikes=RULE, **changes).check()


# -- a run ------------------------------------------------------------------------------------

# Steps 16 and 17 read these.
BAD = range(15 * BATCH, 17 * BATCH)


@pytest.fixture
def poisoned(monkeypatch):
    """Let some samples be noise, by their index."""
    good, bad = TrainingData.batch, set(BAD)

    def batch(self, start, size, device):
        tokens = good(self, start, size, device).clone()
        for row, index in enumerate(range(start, start + size)):
            if index in bad:
                noise = torch.Generator().manual_seed(index)
                tokens[row] = torch.randint(257, tokens[row].shape, generator=noise)
        return tokens

    monkeypatch.setattr(TrainingData, "batch", batch)
    return bad


def watched(data, out, steps=26, **changes):
    config = small_run(data, out, steps, name="run", spikes=RULE)
    config = replace(config, log=replace(config.log, every=1))
    return replace(config, **changes)


def observed(config):
    """Train a run to its end; return it with the warnings it gave."""
    seen = []
    trainer = Trainer(config, seen.append)
    assert trainer.train() == "finished"
    return trainer, [record["text"] for record in seen if record["kind"] == "warning"]


def test_a_run_goes_back_and_on_with_the_data_after_the_spike(data, tmp_path, poisoned):
    trainer, told = observed(watched(data, tmp_path / "run"))
    # Step 10 is the newest checkpoint that a usual look came after. 17 steps were read.
    assert len(told) == 2
    assert "set aside" in told[0]
    assert "step-00000015" in told[0]
    assert "high since step 16" in told[1]
    assert "back to the checkpoint of step 10" in told[1]
    assert "rollback 1 of 1" in told[1]
    assert trainer.passed_over == 7 * BATCH
    # Neither steps nor tokens of the schedule are lost.
    assert (trainer.step, trainer.tokens) == (26, 26 * BATCH * 32)
    poisoned.clear()

    class Jumping(Trainer):
        def _take_step(self):
            self.passed_over = 7 * BATCH if self.step >= 10 else 0
            super()._take_step()

    by_hand = Jumping(watched(data, tmp_path / "hand", spikes=SpikeConfig()))
    by_hand.train()
    assert_same(by_hand, trainer)
    records = without_clock(tmp_path / "run")
    (rollback,) = (r for r in records if r["kind"] == "rollback")
    assert [look[0] for look in rollback["high"]] == [16, 17]
    assert rollback["high"][0][1] > rollback["usual_loss"] + 0.5
    del rollback["high"], rollback["usual_loss"]
    assert rollback == {
        "step": 11,
        "kind": "rollback",
        "tokens": 10 * BATCH * 32,
        "checkpoint": 10,
        "num_rollbacks": 1,
        "passed_over": 7 * BATCH,
    }
    # Health too is that of a run that has taken 10 steps, not 17.
    assert [r for r in records if r["kind"] != "rollback"] == without_clock(tmp_path / "hand")


@pytest.mark.slow
@pytest.mark.parametrize("taken", [8, 13, 16, 17, 18, 23, 30])
def test_a_run_that_goes_back_can_be_killed_at_any_step(data, tmp_path, poisoned, taken):
    whole, _ = observed(watched(data, tmp_path / "whole"))
    config = watched(data, tmp_path / "part")
    killed = Trainer(config)
    for count, _ in enumerate(killed.steps(), 1):
        if count == taken:
            break
    killed.close()
    resumed, _ = observed(replace(config, resume=True))
    assert_same(whole, resumed)
    assert without_clock(tmp_path / "whole") == without_clock(tmp_path / "part")


@pytest.mark.parametrize("stop", [7, 12, 14])
def test_a_run_that_was_stopped_goes_back_to_where_another_would(data, tmp_path, poisoned, stop):
    whole, _ = observed(watched(data, tmp_path / "whole"))
    config = watched(data, tmp_path / "part")
    stopped, interrupt = Trainer(config), Interrupt()
    for step in stopped.steps():
        if step == stop:
            interrupt.received = signal.SIGINT
            assert stopped.train(interrupt) == "interrupted"
            break
    # The step after it, which `train` takes before it looks.
    assert stop + 1 in checkpoints.steps(config.out / "checkpoints")
    resumed, _ = observed(replace(config, resume=True))
    assert_same(whole, resumed)
    assert without_clock(tmp_path / "whole") == without_clock(tmp_path / "part")


def test_when_the_budget_is_spent_a_run_continues(data, tmp_path, poisoned):
    # The data between are taken once: 28 sequences are passed over with the first spike.
    poisoned.update(range(27 * BATCH, 29 * BATCH))
    trainer, told = observed(watched(data, tmp_path / "run"))
    assert [r["kind"] for r in read_metrics(tmp_path / "run")].count("rollback") == 1
    assert trainer.step == 26
    assert "rollback 1 of 1" in told[1]
    assert "the run continues (spikes.max_rollbacks=1)" in told[2]
    assert len(told) == 3


def test_without_a_budget_a_spike_is_reported_and_changes_nothing(data, tmp_path, poisoned):
    quiet = replace(RULE, max_rollbacks=0)
    trainer, told = observed(watched(data, tmp_path / "told", spikes=quiet))
    assert len(told) == 1
    assert "high since step 16" in told[0]
    blind = replace(quiet, min_rise=1e9)
    other, nothing = observed(watched(data, tmp_path / "blind", spikes=blind))
    assert nothing == []
    assert_same(trainer, other)


def test_a_spike_before_any_checkpoint_is_reported(data, tmp_path, poisoned):
    late = CheckpointConfig(every=20)
    trainer, told = observed(watched(data, tmp_path / "run", checkpoint=late))
    assert "there is no checkpoint from before the loss spike" in told[0]
    assert "the run continues" in told[1]
    assert trainer.step == 26


def test_no_checkpoint_is_written_while_the_loss_is_high(data, tmp_path, poisoned):
    patient = replace(RULE, patience=3)
    poisoned.update(range(14 * BATCH, 15 * BATCH))
    config = watched(data, tmp_path / "run", spikes=patient)
    trainer = Trainer(config)
    for step in trainer.steps():
        if step == 16:
            break
    trainer.close()
    # The look at step 15 was the first high one.
    assert checkpoints.steps(config.out / "checkpoints") == [5, 10]


def test_a_damaged_checkpoint_is_passed_over_on_the_way_back(data, tmp_path, poisoned):
    for keep, ending in ((3, "rolled back to the checkpoint of step 5"), (2, "cannot roll back")):
        config = watched(
            data, tmp_path / str(keep), checkpoint=CheckpointConfig(every=5, keep=keep)
        )
        seen = []
        trainer = Trainer(config, seen.append)
        for count, _ in enumerate(trainer.steps(), 1):
            if count == 12:
                damage(config.out / "checkpoints" / "step-00000010" / "model.safetensors")
        texts = [record["text"] for record in seen if record["kind"] == "warning"]
        assert "model.safetensors is damaged" in texts[0]
        assert any(ending in text for text in texts)
        assert trainer.step == 26


def test_a_report_reads_on_after_a_rollback(data, tmp_path, poisoned):
    observed(watched(data, tmp_path / "run"))
    run = Run.load(tmp_path / "run")
    assert run.finished
    steps, _ = run.series("train", "loss", by="step")
    assert steps == list(range(1, 27))
    assert (
        "Run run left its course once and went back: from step 17 to the checkpoint of step 10."
        in write_page(tmp_path / "page.html", [run], title="t").read_text()
    )


def test_a_spike_is_reported_in_words():
    spike = SpikeState([3.0, 3.2, 3.1], [LossPoint(1010, 4.5), LossPoint(1020, 5.25)], 1000)
    assert describe_spike(spike, 0) == (
        "loss spike: 5.250 at step 1,020, high since step 1,010, 3.100 before"
    )
    lost = SpikeState([], [LossPoint(10, None)])
    assert describe_spike(lost, 10) == "the last 10 steps had no finite gradients and were skipped"
