"""A loss or a gradient that is not finite: the step changes nothing, and the run goes on."""

import math
from dataclasses import replace

import pytest
import torch

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import CheckpointConfig, SpikeConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.metrics.meters import LossMeter, LossReading
from learnable_multipliers.pretrain.model.loss import Losses
from learnable_multipliers.pretrain.trainer.spikes import DivergenceError
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import everything, small_run

CPU = torch.device("cpu")
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PLACES = ("loss", "reported loss", "gradient", "multiplier's gradient")


def spoil(trainer, place, value, steps):
    """Let something not be finite in some steps, counted from 0."""
    spread = trainer._train_step._parallel
    loss_of, matrix = spread.loss, trainer.model.model.layers[0].feed_forward.up_proj.weight
    step_of = trainer.optimizer.step

    def loss(tokens, z_loss):
        found = loss_of(tokens, z_loss)
        if trainer.step not in steps:
            return found
        if place == "loss":
            return Losses(found.total + value, found.cross_entropy + value)
        if place == "reported loss":
            # Finite gradients, as those of a sum that overflows at its very end.
            return Losses(found.total, found.cross_entropy + value)
        return found

    def step():
        if trainer.step in steps and place == "gradient":
            trainer.model.lm_head.weight.grad[0, 0] = value
        if trainer.step in steps and place == "multiplier's gradient":
            matrix.grad[3] = value
        return step_of()

    if place in ("loss", "reported loss"):
        trainer._train_step._parallel = replace(spread, loss=loss)
    else:
        trainer.optimizer.step = step


def train_records(folder):
    return {r["step"]: r for r in read_metrics(folder) if r["kind"] == "train"}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_is_not_finite_changes_nothing(data, tmp_path, place, value):
    config = small_run(data, tmp_path / "run")
    trainer = Trainer(config)
    spoil(trainer, place, VALUES[value], {2})
    kept = {}
    for step in trainer.steps():
        kept[step] = {name: tensor.clone() for name, tensor in everything(trainer).items()}
    assert kept[2].keys() == kept[3].keys()
    for name, before in kept[2].items():
        assert torch.equal(before, kept[3][name]), name
    assert not torch.equal(kept[3]["model/lm_head.weight"], kept[4]["model/lm_head.weight"])
    assert all(tensor.isfinite().all() for tensor in kept[12].values())
    records = train_records(config.out)
    assert [r["skipped_steps"] for r in records.values()] == [0, 0, 1, 1, 1, 1, 1]
    left_out = [r["loss_left_out"] for r in records.values()]
    assert left_out == [0, 0, int("loss" in place), 0, 0, 0, 0]
    assert all(math.isfinite(r["loss"]) for r in records.values())


@pytest.mark.parametrize("kind", ["muon", "plain"])
def test_it_is_so_for_other_optimizers(data, tmp_path, kind):
    config = small_run(data, tmp_path / "run", steps=4)
    changes = {"kind": "muon"} if kind == "muon" else {"placement": "none"}
    trainer = Trainer(replace(config, optimizer=replace(config.optimizer, **changes)))
    spoil(trainer, "reported loss", math.nan, {1})
    kept = {}
    for step in trainer.steps():
        kept[step] = {name: tensor.clone() for name, tensor in everything(trainer).items()}
    for name, before in kept[1].items():
        assert torch.equal(before, kept[2][name]), name


def test_the_logged_loss_is_the_mean_of_the_others(data, tmp_path):
    logs = {}
    for every in (1, 4):
        config = small_run(data, tmp_path / str(every), steps=8)
        trainer = Trainer(replace(config, log=replace(config.log, every=every)))
        spoil(trainer, "loss", math.nan, {2})
        trainer.train()
        logs[every] = train_records(tmp_path / str(every))
    each = {step: record["loss"] for step, record in logs[1].items()}
    assert math.isnan(each[3])
    # The first line is of step 1 alone.
    assert logs[4][4]["loss"] == pytest.approx((each[2] + each[4]) / 2, rel=1e-6)
    assert logs[4][4]["loss_left_out"] == 1


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_flag_skips_one_step_and_leaves_the_gradients_alone(data, tmp_path, kind):
    config = small_run(data, tmp_path / "run", steps=4)
    trainer = Trainer(replace(config, optimizer=replace(config.optimizer, kind=kind)))
    steps = trainer.steps()
    next(steps)
    parameters = dict(trainer.model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    before = {name: tensor.clone() for name, tensor in everything(trainer).items()}
    trainer.optimizer.found_inf = torch.tensor(True)
    trainer.optimizer.step()
    assert trainer.optimizer.num_skipped == 1
    for name, tensor in everything(trainer).items():
        assert torch.equal(tensor, before[name]), name
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in parameters.values())
    assert trainer.optimizer.grad_norm.isfinite()
    trainer.optimizer.step()
    assert trainer.optimizer.num_skipped == 1
    assert not torch.equal(before["model/lm_head.weight"], trainer.model.lm_head.weight)
    trainer.close()


# -- too many ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_too_many_in_a_row_end_the_run_with_what_to_try(data, tmp_path, place):
    config = small_run(data, tmp_path / "run", steps=20, spikes=SpikeConfig(max_skipped=5))
    config = replace(config, checkpoint=CheckpointConfig(every=2))
    trainer = Trainer(config)
    spoil(trainer, place, math.nan, set(range(7, 20)))
    with pytest.raises(DivergenceError) as refused:
        trainer.train()
    trainer.close()
    # Step 8 is the first bad one, 12 the fifth, and a multiple of log.every.
    assert str(refused.value).startswith("step 12: the last 5 steps had no finite gradients")
    for advice in ("--resume", "--spikes.max-rollbacks", "optimizer.lr", "--runtime.dtype float32"):
        assert advice in str(refused.value)
    # Those of steps 8, 10 and 12 would have taken the place of good ones.
    assert checkpoints.steps(config.out / "checkpoints") == [4, 6]
    again = Trainer(replace(config, resume=True))
    assert again.step == 6
    assert again.train() == "finished"


def test_too_many_are_noticed_without_a_log(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=20, spikes=SpikeConfig(max_skipped=5))
    trainer = Trainer(replace(config, log=replace(config.log, every=0)))
    spoil(trainer, "loss", math.inf, set(range(3, 20)))
    with pytest.raises(DivergenceError, match="step 10: the last 7 steps"):
        trainer.train()
    trainer.close()


@pytest.mark.parametrize("limit", [0, 6])
def test_as_many_as_allowed_do_not_end_it(data, tmp_path, limit):
    config = small_run(data, tmp_path / "run", steps=14, spikes=SpikeConfig(max_skipped=limit))
    trainer = Trainer(config)
    # Ten in all, five in a row.
    spoil(trainer, "gradient", math.nan, {2, 3, 4, 5, 6, 8, 9, 10, 11, 12})
    assert trainer.train() == "finished"
    assert trainer.skipped_steps == 10


def test_a_streak_continues_across_a_resume(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=20, spikes=SpikeConfig(max_skipped=6))
    bad = set(range(4, 20))
    trainer = Trainer(config)
    spoil(trainer, "gradient", math.nan, bad)
    for step in trainer.steps():
        if step == 7:
            trainer.save()
            break
    trainer.close()
    resumed = Trainer(replace(config, resume=True))
    spoil(resumed, "gradient", math.nan, bad)
    with pytest.raises(DivergenceError, match="step 10: the last 6 steps"):
        resumed.train()
    resumed.close()


def test_a_run_that_may_goes_back_instead(data, tmp_path):
    rule = SpikeConfig(max_skipped=5, max_rollbacks=1)
    config = small_run(data, tmp_path / "run", steps=20, spikes=rule)
    seen = []
    trainer = Trainer(config, seen.append)
    spoil(trainer, "gradient", math.nan, set())
    bad = range(11 * 4, 18 * 4)
    batch = trainer.data.batch
    step_of = trainer.optimizer.step

    def watched(start, size, device):
        trainer.reads = start
        return batch(start, size, device)

    def step():
        if trainer.reads in bad:
            trainer.model.lm_head.weight.grad[0, 0] = math.nan
        return step_of()

    trainer.data.batch, trainer.optimizer.step = watched, step
    assert trainer.train() == "finished"
    (told,) = (r["text"] for r in seen if r["kind"] == "warning")
    assert told.startswith(
        "the last 5 steps had no finite gradients and were skipped: rolled back to"
    )
    assert "checkpoint of step 10" in told
    # Steps 12 to 16 were lost; of the two bad ones that were left, both are skipped after all.
    assert trainer.passed_over == 6 * 4
    assert trainer.skipped_steps == 2
    (rollback,) = (r for r in read_metrics(config.out) if r["kind"] == "rollback")
    assert (rollback["checkpoint"], rollback["high"]) == (10, [])


# -- the meter --------------------------------------------------------------------------------


def test_a_meter_continues_from_its_reading():
    def fed(meter, losses):
        for loss in losses:
            meter.add(torch.tensor(loss), torch.tensor(not math.isfinite(loss)))
        return meter

    first, second = [2.5, math.nan, 0.1], [math.inf, -math.inf]
    reading = fed(LossMeter(CPU), first).read()
    assert reading == LossReading(reading.total, 3, 1, 0)
    assert reading.mean == pytest.approx(1.3)
    whole = fed(LossMeter(CPU), first + second).read()
    assert fed(LossMeter(CPU, reading), second).read() == whole
    assert (whole.left_out, whole.skipped_in_a_row) == (3, 2)


def test_a_new_reading_begins_empty_but_for_the_streak():
    meter = LossMeter(CPU)
    meter.add(torch.tensor(1.0), torch.tensor(True))
    meter.reset()
    assert meter.read() == LossReading(skipped_in_a_row=1)
    assert meter.read().mean is None
