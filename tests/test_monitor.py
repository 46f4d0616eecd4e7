"""A monitor tells what is so: each number against one that was put there by hand."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers._gauge import multiply_, symmetry_positions
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.preflight.resume_check import without_clock
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import small_run, trained

LR = 0.02
UP_DOWN = "rows of up_proj against columns of down_proj, per channel (multiplicative)"


class Mlp(nn.Module):
    """A gated MLP, whose rows of up and columns of down do the same."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(24, 40, bias=False)
        self.up_proj = nn.Linear(24, 40, bias=False)
        self.down_proj = nn.Linear(40, 24, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def set_up(rules=(), make=lrm.AdamW, weight_decay=1.0, **settings):
    """Return a model, its plan and an optimizer."""
    torch.manual_seed(1)
    model = Mlp()
    plan = lrm.plan(model, "full", rules)
    groups = lrm.param_groups(model, plan, weight_decay=weight_decay)
    return model, plan, make(groups, lr=LR, **settings)


def take_steps(model, opt, count, gradient=torch.randn_like, lrs=None):
    for i in range(count):
        for group in opt.param_groups:
            group["lr"] = LR if lrs is None else lrs[i]
        for parameter in model.parameters():
            parameter.grad = gradient(parameter)
        opt.step()


def scale_along(opt, symmetry, log_scales):
    """Move an optimizer's multipliers along a symmetry."""
    multiply_(opt, symmetry.factors(log_scales))


@pytest.mark.parametrize("make", [lrm.AdamW, lrm.Muon])
def test_readings_are_those_of_a_diagnosis_with_all_rates(make):
    model, _, opt = set_up(make=make)
    start, monitor = lrm.diagnose(opt), lrm.Monitor(opt)
    lrs = [LR * (1 - i / 60) for i in range(40)]
    take_steps(model, opt, 40, lrs=lrs)
    assert monitor.health().readings == lrm.diagnose(opt, lrs=lrs, start=start).readings


def test_noise_traps_and_a_steady_gradient_frees():
    # Multipliers stand still: they would change the scale of the raw gradients.
    model, _, opt = set_up(multiplier_lr_scale=1e-6)
    monitor = lrm.Monitor(opt)
    take_steps(model, opt, 200)
    on_noise = monitor.health()
    numbers = on_noise.metrics()
    assert numbers["trapped/matrices"] == 1.0
    assert numbers["free/matrices"] == 0.0
    assert numbers["noise/matrices"] == pytest.approx(1.0, abs=0.15)
    assert "3 of 3 matrices trapped (100%)" in str(on_noise)
    model, _, opt = set_up(multiplier_lr_scale=1e-6)
    monitor = lrm.Monitor(opt)
    take_steps(model, opt, 200, gradient=torch.ones_like)
    numbers = monitor.health().metrics()
    assert (numbers["trapped/matrices"], numbers["free/matrices"]) == (0.0, 1.0)
    # (1 + beta1) / (1 - beta1), for a gradient that never changes.
    assert numbers["noise/matrices"] == pytest.approx(19.0, rel=1e-3)


def test_the_range_of_multipliers_and_crossings_are_counted():
    model, _, opt = set_up()
    monitor = lrm.Monitor(opt)
    assert monitor.health().alarms == ()
    with torch.no_grad():
        state = opt.state[model.up_proj.weight]
        state["row"].copy_(torch.linspace(0.5, 4.0, 40))
        state["row"][[3, 5]] = torch.tensor([-0.25, 0.0])
        opt.state[model.down_proj.weight]["col"][7] = -1.0
    health = monitor.health()
    numbers = health.metrics()
    assert numbers["multipliers/smallest"] == 0.0
    assert numbers["multipliers/largest"] == 4.0
    assert numbers["multipliers/crossed_zero"] == 3
    (alarm,) = health.alarms
    assert alarm.about == "multipliers that crossed zero"
    # 40 rows and 24 columns of two matrices, 24 and 40 of the third.
    assert alarm.text.startswith(
        "3 of 192 multipliers have crossed zero since the start: 2 of 40 row multipliers of "
        "up_proj.weight, and elsewhere (1 more). "
    )
    assert "lower multiplier_lr_scale" in alarm.text
    assert f"! {alarm}" in str(health)


def test_a_start_below_zero_is_no_crossing():
    model, _, opt = set_up([lrm.Rule("up_proj", init=-2.0)])
    monitor = lrm.Monitor(opt)
    assert monitor.health().alarms == ()
    with torch.no_grad():
        opt.state[model.up_proj.weight]["row"][0] *= -1
    assert monitor.health().metrics()["multipliers/crossed_zero"] == 1


def test_multipliers_on_the_log_scale_are_reported_as_themselves():
    model, _, opt = set_up([lrm.Rule("", scale="log")])
    monitor = lrm.Monitor(opt)
    with torch.no_grad():
        opt.state[model.up_proj.weight]["row"][0] = math.log(0.01)
        opt.state[model.up_proj.weight]["row"][1] = math.log(7.0)
    numbers = monitor.health().metrics()
    assert numbers["multipliers/smallest"] == pytest.approx(0.01)
    assert numbers["multipliers/largest"] == pytest.approx(7.0)
    assert numbers["multipliers/crossed_zero"] == 0


def test_drift_is_what_was_moved_along_a_symmetry():
    model, plan, opt = set_up()
    symmetries = lrm.find_symmetries(model, plan, torch.randn(16, 24))
    (channels,) = symmetries.alike()[UP_DOWN]
    # Where it starts along the symmetry counts as no drift.
    scale_along(opt, channels, torch.full((40,), 1.0, dtype=torch.float64))
    before = symmetry_positions(opt, [channels])
    monitor = lrm.Monitor(opt, symmetries, drift_bound=3.0)
    moved = torch.linspace(-1.0, 0.5, 40, dtype=torch.float64)
    scale_along(opt, channels, moved)
    assert torch.allclose(symmetry_positions(opt, [channels])[0] - before[0], moved, atol=1e-6)
    health = monitor.health()
    numbers = health.metrics()
    rms = float(moved.square().mean().sqrt())
    assert numbers[f"drift/{UP_DOWN}"] == pytest.approx(rms, rel=1e-5)
    assert health.alarms == ()
    scale_along(opt, channels, torch.full((40,), -0.5, dtype=torch.float64))
    (alarm,) = monitor.health().alarms
    assert alarm.about == "drift past the bound"
    # exp(1.5), past 3.
    assert "by a factor of 4.48 along a symmetry, past the bound of 3: rows of" in alarm.text
    lrm.rebalance_(opt, [channels])
    # Back to the middle, away from where it started.
    assert monitor.health().metrics()[f"drift/{UP_DOWN}"] == pytest.approx(1.0, rel=1e-5)


def test_a_resumed_run_is_followed_as_if_it_had_never_stopped():
    model, plan, opt = set_up()
    symmetries = lrm.find_symmetries(model, plan, torch.randn(16, 24))
    monitor = lrm.Monitor(opt, symmetries)
    torch.manual_seed(2)
    take_steps(model, opt, 10)
    kept, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
    take_steps(model, opt, 5)
    other, _, again = set_up()
    resumed = lrm.Monitor(again, symmetries)
    other.load_state_dict(weights)
    again.load_state_dict(kept)
    resumed.resume([LR] * 10)
    torch.manual_seed(2)
    for parameter in [p for _ in range(10) for p in other.parameters()]:
        torch.randn_like(parameter)
    take_steps(other, again, 5)
    assert resumed.health().readings == monitor.health().readings
    assert resumed.health().metrics() == monitor.health().metrics()


def test_a_monitor_made_after_loading_resumes_from_its_state():
    rules = [lrm.Rule("down", "row+col", init=-2.0)]
    model, plan, opt = set_up(rules)
    symmetries = lrm.find_symmetries(model, plan, torch.randn(16, 24))
    monitor = lrm.Monitor(opt, symmetries)
    take_steps(model, opt, 10)
    take_steps(model, opt, 1, gradient=lambda p: torch.full_like(p, math.nan))
    kept, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
    seen = json.loads(json.dumps(monitor.state_dict()))
    torch.manual_seed(2)
    take_steps(model, opt, 5)
    other, _, again = set_up(rules)
    other.load_state_dict(weights)
    again.load_state_dict(kept)
    resumed = lrm.Monitor(again, symmetries)
    resumed.load_state_dict(seen)
    torch.manual_seed(2)
    take_steps(other, again, 5)
    assert resumed.health() == monitor.health()
    with pytest.raises(ValueError, match="of another run"):
        lrm.Monitor(set_up(make=lrm.Muon)[2]).load_state_dict(seen)
    with pytest.raises(ValueError, match="another model or another plan"):
        lrm.Monitor(lrm.AdamW.from_model(nn.Linear(3, 3))).load_state_dict(seen)


def test_a_damaged_monitor_state_is_rejected():
    monitor = lrm.Monitor(set_up()[2])
    saved = monitor.state_dict()
    first = saved["expectations"]["walks"][0]
    for damaged in (
        {"TensorWalk(...)": [0.0, 0.0, 0, 1.0]},
        [{**first, "walk": {"rms": 1.0, "drag": 2.0}}],
        [{key: value for key, value in first.items() if key != "kept"}],
    ):
        state = {**saved, "expectations": {"steps": 0, "walks": damaged}}
        with pytest.raises(ValueError, match="not the state of a monitor"):
            monitor.load_state_dict(state)
    for walks in ([], [{**first, "lr_scale": 7.0}, *saved["expectations"]["walks"]]):
        state = {**saved, "expectations": {"steps": 0, "walks": walks}}
        with pytest.raises(ValueError, match="only one of the two has TensorWalk"):
            monitor.load_state_dict(state)


def test_skipped_steps_do_not_count():
    model, _, opt = set_up()
    monitor = lrm.Monitor(opt)
    take_steps(model, opt, 5)
    take_steps(model, opt, 2, gradient=lambda p: torch.full_like(p, math.nan))
    assert opt.num_skipped == 2
    assert {reading.note for reading in monitor.health().readings} == {""}


def test_a_decay_that_changes_during_a_run_is_reported_and_nothing_predicted():
    model, _, opt = set_up()
    monitor = lrm.Monitor(opt)
    take_steps(model, opt, 3)
    for group in opt.param_groups:
        group["weight_decay"] *= 2
    take_steps(model, opt, 3)
    notes = {(r.kind, r.predicted is None, r.note) for r in monitor.health().readings}
    assert notes == {
        ("matrix", True, "its decay was changed during the run"),
        ("multiplier", False, ""),
    }


def test_a_monitor_changes_nothing_and_stops_on_close():
    model, plan, opt = set_up()
    watched, _, other = set_up()
    monitor = lrm.Monitor(other, lrm.find_symmetries(watched, plan, torch.randn(16, 24)))
    for _ in range(4):
        seed = torch.randint(1 << 30, ()).item()
        torch.manual_seed(seed)
        take_steps(model, opt, 2)
        torch.manual_seed(seed)
        take_steps(watched, other, 2)
        monitor.health()
    for mine, theirs in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    followed = monitor._expectations.steps
    monitor.close()
    take_steps(watched, other, 1)
    assert (followed, monitor._expectations.steps) == (8, 8)


def test_metrics_are_plain_numbers():
    model, plan, opt = set_up()
    monitor = lrm.Monitor(opt, lrm.find_symmetries(model, plan, torch.randn(16, 24)))
    take_steps(model, opt, 3)
    numbers = monitor.health().metrics()
    assert all(type(value) in (int, float) for value in numbers.values())
    assert json.loads(json.dumps(numbers)) == numbers
    assert {key.partition("/")[0] for key in numbers} == {
        "multipliers",
        "drift",
        "trapped",
        "free",
        "noise",
    }


def test_any_torch_optimizer_is_followed_as_far_as_it_is_known():
    torch.manual_seed(1)
    model = Mlp()
    plan = lrm.plan(model)
    opt = lrm.LearnableMultipliers(torch.optim.SGD(model.parameters(), lr=LR), model, plan)
    monitor = lrm.Monitor(opt)
    take_steps(model, opt, 3)
    health = monitor.health()
    assert {r.note for r in health.readings if r.kind == "matrix"} == {
        "its optimizer's random walk on noise is not known"
    }
    assert health.metrics()["trapped/matrices"] == 0.0
    with pytest.raises(TypeError, match=r"got SGD; .* wrap it: lrm.LearnableMultipliers\("):
        lrm.Monitor(torch.optim.SGD(model.parameters(), lr=LR))
    with pytest.raises(ValueError, match="drift_bound is a factor greater than 1, got 0.5"):
        lrm.Monitor(opt, drift_bound=0.5)


def test_monitor_and_diagnosis_reject_arguments_without_effect():
    model = Mlp()
    opt = lrm.AdamW.from_model(model)
    with pytest.raises(ValueError, match="drift_bound has no effect without symmetries"):
        lrm.Monitor(opt, drift_bound=5.0)
    for read in (lrm.diagnose, lrm.Monitor):
        with pytest.raises(ValueError, match="`model` has no effect with AdamW"):
            read(opt, model=model)


def test_a_run_logs_its_health_and_reports_each_alarm_once(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    log = replace(config.log, drift=True, drift_bound=1.05)
    # Fast enough to cross zero within a dozen steps.
    optimizer = replace(config.optimizer, multiplier_lr_scale=60.0, max_grad_norm=0.0)
    config = replace(config, log=log, optimizer=optimizer)
    seen: list[dict[str, object]] = []
    trainer = Trainer(config, seen.append)
    assert trainer.train() == "finished"
    records = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "health"]
    assert [r["step"] for r in records] == [1, 4, 8, 12]
    first, last = records[0], records[-1]
    drifts = [key for key in last if key.startswith("drift/")]
    assert f"drift/{UP_DOWN}" in drifts
    assert last["drift/largest"] > max(first["drift/largest"], math.log(1.05))
    assert last["multipliers/crossed_zero"] > 0
    warnings = [str(r["text"]) for r in seen if r["kind"] == "warning"]
    # Each once, as it was when it began; the records have it as it is.
    assert len(warnings) == len(last["alarms"]) == 2
    for text in ("multipliers have crossed zero", "scales have drifted by a factor of"):
        assert sum(text in one for one in warnings) == 1
        assert sum(text in one for one in last["alarms"]) == 1
    assert warnings != last["alarms"]


def test_health_continues_after_a_resume(data, tmp_path):
    whole = small_run(data, tmp_path / "whole")
    trained(whole)
    config = small_run(data, tmp_path / "part")
    trainer = Trainer(config)
    for step in trainer.steps():
        if step == 7:
            break
    trainer.save()
    trainer.close()
    trained(replace(config, resume=True))
    assert without_clock(tmp_path / "part") == without_clock(tmp_path / "whole")
