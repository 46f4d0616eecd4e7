"""The rms that a run predicts for its matrices is the one that noise gives them."""

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.config import ScheduleConfig
from learnable_multipliers.pretrain.metrics.meters import describe_weights
from learnable_multipliers.pretrain.trainer.schedule import Schedule

LR, DECAY = 0.05, 0.5


class Stack(nn.Module):
    """Matrices large enough for an rms within a percent or so."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 64)
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.lm_head = nn.Linear(64, 64, bias=False)


def trained_on_noise(make, rules=(), placement="full"):
    """Return the description of the weights after a run with N(0, 1) for gradients."""
    model = Stack()
    plan = lrm.plan(model, placement, rules)
    optimizer = make(lrm.param_groups(model, plan, weight_decay=DECAY))
    monitor = lrm.Monitor(optimizer)
    schedule = ScheduleConfig(tokens=300, warmup_tokens=30, decay_tokens=100, decay_factor=8.0)
    for planned in Schedule(schedule, 1, 1):
        lr = LR * planned.lr_factor
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return describe_weights(optimizer, plan, monitor.health().readings)


def ratios(found):
    return {name: found["raw_rms"][name] / rms for name, rms in found["predicted_rms"].items()}


def adamw(groups):
    # On noise multipliers wander, and with them the scale of the raw gradients, which the
    # prediction takes for steady: at a rate this high that would be 8% after 300 steps.
    return lrm.AdamW(groups, lr=LR, max_grad_norm=1.0, multiplier_lr_scale=0.05)


RULES = {
    "one rate": [],
    "rates and decays of their own": [
        lrm.Rule("down_proj", lr_scale=0.2, weight_decay=2.0),
        lrm.Rule("up_proj", lr_scale=2.0),
        lrm.Rule("gate_proj", weight_decay=0.0),
    ],
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("placement", ["full", "scalar"])
def test_adamw_on_noise_has_the_predicted_rms(placement, rules):
    found = trained_on_noise(adamw, RULES[rules], placement)
    assert set(found["predicted_rms"]) == {
        f"{name}.weight" for name in ("gate_proj", "up_proj", "down_proj", "lm_head")
    }
    assert ratios(found) == pytest.approx(dict.fromkeys(found["predicted_rms"], 1.0), abs=0.05)
    if rules != "one rate":
        rms = {name.partition("_")[0]: value for name, value in found["predicted_rms"].items()}
        assert rms["gate"] > 1.5 * rms["lm"]
        assert rms["down"] < rms["lm"] / 3


def test_muon_on_noise_has_the_predicted_rms():
    def muon(groups):
        return lrm.Muon(groups, lr=LR, adamw_lr_scale=0.3)

    # AdamW trains the head, at a rate of its own.
    found = ratios(trained_on_noise(muon))
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05)
