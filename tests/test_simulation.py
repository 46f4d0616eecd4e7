"""Brownian motion, drawn number by number: against closed forms, walks and real optimizers."""

import math

import pytest
import torch
from lion_pytorch import Lion
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.equilibrium import (
    adamw_walk,
    brownian_rms,
    lion_walk,
    muon_walk,
    sgdm_walk,
)

DECAY = 0.25


def settled(optimizer, rate_times_decay, shape=(80, 100), **settings):
    """Return the rms over the last third of a run long enough to forget its start."""
    steps = 200 + round(4 / rate_times_decay)
    lrs = [rate_times_decay / DECAY] * steps
    run = lrm.simulate_brownian(optimizer, lrs, DECAY, shape, **settings)
    return run.late_rms(steps // 3)


def schedule(peak):
    """Warmup, constant, an eightfold decay, and a jump back up."""
    rates = [peak * min(1.0, (t + 1) / 100) for t in range(500)]
    rates += [peak * 8 ** (-(t + 1) / 250) for t in range(250)]
    return rates + [peak / 2] * 150


BETAS = [(0.9, 0.95), (0.9, 0.999), (0.95, 0.98), (0.8, 0.95), (0.0, 0.99)]


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("rate_times_decay", [1e-2, 1e-3])
def test_adamw_comes_to_the_closed_form(rate_times_decay, betas):
    closed = lrm.equilibrium_rms(rate_times_decay / DECAY, DECAY, betas=betas)
    assert settled("adamw", rate_times_decay, betas=betas) == pytest.approx(closed, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.95, 0.98)])
def test_adamw_comes_to_the_closed_form_at_slow_rates(betas):
    closed = lrm.equilibrium_rms(1e-4 / DECAY, DECAY, betas=betas)
    rms = settled("adamw", 1e-4, (50, 100), betas=betas)
    assert rms == pytest.approx(closed, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("away", [1.0, 1.3])
def test_adamw_comes_to_the_closed_form_at_the_slowest_rate(away):
    # From a start nearby: one relaxation is 50,000 steps. What is left of the start is known.
    lr, steps = 1e-5 / DECAY, 50_000
    closed = lrm.equilibrium_rms(lr, DECAY)
    assert lrm.relaxation_steps(lr, DECAY) == pytest.approx(steps)
    run = lrm.simulate_brownian("adamw", [lr] * steps, DECAY, (50, 100), start_rms=away * closed)
    left = (run.rms[0] ** 2 - closed**2) / math.e
    assert run.rms[-1] == pytest.approx(math.sqrt(closed**2 + left), rel=0.03)


FORMS = {
    "lion": {"betas": (0.9, 0.99)},
    "lion of slow betas": {"betas": (0.95, 0.98)},
    "sgdm": {"momentum": 0.9},
    "sgdm with nesterov": {"momentum": 0.95, "nesterov": True},
    "sgdm without momentum": {"momentum": 0.0},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rate_times_decay", [1e-2, 1e-3])
def test_lion_and_sgd_come_to_their_closed_forms(rate_times_decay, name):
    optimizer, settings = name.split()[0], FORMS[name]
    closed = lrm.equilibrium_rms(rate_times_decay / DECAY, DECAY, optimizer=optimizer, **settings)
    rms = settled(optimizer, rate_times_decay, **settings)
    assert rms == pytest.approx(closed, rel=0.02)


@pytest.mark.parametrize("shape", [(4, 48, 48), (4, 24, 96), (4, 96, 24), (1, 112, 112)])
@pytest.mark.parametrize("coefficients", ["quintic", "polar-express"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_comes_to_its_corrected_formula(shape, coefficients, nesterov):
    given = {"nesterov": nesterov, "coefficients": coefficients}
    closed = lrm.equilibrium_rms(0.01 / DECAY, DECAY, optimizer="muon", shape=shape[1:], **given)
    assert settled("muon", 0.01, shape, **given) == pytest.approx(closed, rel=0.03)


WALKS = {
    "adamw": adamw_walk(),
    "lion": lion_walk(),
    "sgdm": sgdm_walk(),
    "muon": muon_walk(shape=(32, 128), coefficients="polar-express"),
}


@pytest.mark.parametrize("start_rms", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", WALKS)
def test_schedules_are_followed(optimizer, start_rms):
    lrs = schedule(0.02)
    settings = {"coefficients": "polar-express"} if optimizer == "muon" else {}
    shape = (4, 32, 128)
    run = lrm.simulate_brownian(optimizer, lrs, DECAY, shape, start_rms=start_rms, **settings)
    expected = brownian_rms(lrs, DECAY, start_rms, WALKS[optimizer])
    assert run.lrs == tuple(lrs)
    # First steps are less alike than the walk's: see muon_walk and lion_walk.
    begin = {"muon": 50, "lion": 200}.get(optimizer, 0)
    assert run.rms[begin:] == pytest.approx(expected[begin:], rel=0.03)
    constant = brownian_rms([0.02] * len(lrs), DECAY, start_rms, WALKS[optimizer])
    assert run.rms[749] < 0.93 * constant[749]


def real(optimizer, weight):
    settings = {"lr": 0.1, "weight_decay": DECAY}
    if optimizer == "adamw":
        return torch.optim.AdamW([weight], betas=(0.9, 0.95), eps=1e-12, **settings)
    if optimizer == "lion":
        return Lion([weight], betas=(0.9, 0.99), **settings)
    if optimizer == "muon":
        model = nn.Linear(*weight.shape[::-1], bias=False)
        model.weight = weight
        plan = lrm.plan(model, "full", [lrm.Rule("weight", "none", role="up")])
        return lrm.Muon(lrm.param_groups(model, plan, weight_decay=DECAY), lr=0.1)
    # Decoupled decay, which torch's SGD does not have.
    return torch.optim.SGD([weight], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "sgdm"])
def test_rules_are_those_of_real_optimizers(optimizer):
    shape, lrs = (12, 20), [0.1, 0.05, 0.2, 0.01]
    run = lrm.simulate_brownian(
        optimizer, lrs, DECAY, shape, start_rms=0.5, seed=3, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(3)
    start = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = nn.Parameter(start)
    stock = real(optimizer, weight)
    for lr in lrs:
        for group in stock.param_groups:
            group["lr"] = lr
        weight.grad = torch.empty_like(start).normal_(generator=generator)
        if optimizer == "sgdm":
            weight.data.mul_(1 - lr * DECAY)
        stock.step()
    torch.testing.assert_close(run.weight, weight.detach(), rtol=1e-9, atol=1e-11)
    assert run.rms[-1] == pytest.approx(weight.square().mean().sqrt().item())


def test_rare_rows_walk_by_a_fixed_amount_at_each_gradient():
    # Alone, a gradient g moves AdamW by sign(g) (1-b1)/sqrt(1-b2) sum_k (b1/sqrt(b2))^k.
    b1, b2, lr, decay, chance = 0.9, 0.95, 1e-3, 1.0, 0.0005
    frequency = torch.tensor([chance] * 4000 + [1.0] * 500)
    run = lrm.simulate_brownian(
        "adamw", [lr] * 3000, decay, (4500, 5), betas=(b1, b2), frequency=frequency
    )
    jump = (1 - b1) / math.sqrt(1 - b2) / (1 - b1 / math.sqrt(b2))
    rare = math.sqrt(chance * jump**2 * lr / (2 * decay))
    rows = run.row_rms
    assert rows[:4000].square().mean().sqrt().item() == pytest.approx(rare, rel=0.05)
    common = lrm.equilibrium_rms(lr, decay)
    assert rows[4000:].square().mean().sqrt().item() == pytest.approx(common, rel=0.03)
    assert rare < common / 3


def test_the_seed_decides():
    runs = [lrm.simulate_brownian("lion", [0.1] * 5, 0.1, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].rms == runs[1].rms != runs[2].rms


def test_impossible_requests_raise_with_a_remedy():
    with pytest.raises(ValueError, match="choose from adamw, muon, lion, sgdm"):
        lrm.simulate_brownian("adam", [0.1], 0.1)
    with pytest.raises(ValueError, match="adamw has no momentum; it takes betas"):
        lrm.simulate_brownian("adamw", [0.1], 0.1, momentum=0.9)
    with pytest.raises(ValueError, match="lr \\* weight_decay < 2"):
        lrm.simulate_brownian("adamw", [30.0], 0.1)
    with pytest.raises(ValueError, match=r"muon cannot train a weight of shape \(5,\)"):
        lrm.simulate_brownian("muon", [0.1], 0.1, (5,))
    with pytest.raises(ValueError, match="one number for all rows, or one for each"):
        lrm.simulate_brownian("adamw", [0.1], 0.1, (4, 5), frequency=torch.ones(5))
    with pytest.raises(ValueError, match="0 to 1"):
        lrm.simulate_brownian("adamw", [0.1], 0.1, frequency=1.5)
    with pytest.raises(ValueError, match="betas must lie in"):
        lrm.simulate_brownian("adamw", [0.1], 0.1, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="unknown coefficients"):
        lrm.simulate_brownian("muon", [0.1], 0.1, coefficients="cubic")
    with pytest.raises(ValueError, match="asked for the last 3"):
        lrm.simulate_brownian("adamw", [0.1], 0.1).late_rms(3)
