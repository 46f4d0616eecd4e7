"""Noise and decay: the closed forms against each other and against real optimizers on noise."""

import math

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.equilibrium import (
    BrownianState,
    adamw_walk,
    brownian_rms,
    brownian_step,
    equilibrium_rms,
    lion_walk,
    mixed_walk,
    muon_walk,
    relaxation_steps,
    sgdm_walk,
)
from learnable_multipliers.equilibrium._random_walk import (
    _orthogonalized,
    orthogonalized_noise,
)
from learnable_multipliers.optim._orthogonalization import orthogonalize

NUM_WEIGHTS = 20_000


def adamw_on_noise(lrs, weight_decay, betas, start_rms=0.0):
    """Return the rms after each step of torch's AdamW on N(0,1) gradients."""
    weight = nn.Parameter(start_rms * torch.randn(NUM_WEIGHTS))
    optimizer = torch.optim.AdamW([weight], betas=betas, eps=1e-12, weight_decay=weight_decay)
    trajectory = []
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.randn(NUM_WEIGHTS)
        optimizer.step()
        trajectory.append(weight.detach().square().mean().sqrt().item())
    return trajectory


def muon_on_noise(lrs, weight_decay, shape, **settings):
    """Return the rms after each step of the library's Muon on N(0,1) gradients."""
    model = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False) for _ in range(4))
    plan = lrm.plan(model, "full", [lrm.Rule("weight", "none", role="up")])
    groups = lrm.param_groups(model, plan, weight_decay=weight_decay)
    optimizer = lrm.Muon(groups, backend="torch", **settings)
    weights = list(model.parameters())
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    trajectory = []
    for lr in lrs:
        for group in optimizer.param_groups:
            group["lr"] = lr
        for weight in weights:
            weight.grad = torch.randn(shape)
        optimizer.step()
        squares = [weight.detach().square().mean() for weight in weights]
        trajectory.append(torch.stack(squares).mean().sqrt().item())
    return trajectory


def late_rms(trajectory, steps):
    return math.sqrt(sum(rms**2 for rms in trajectory[-steps:]) / steps)


def warmup_constant_decay(peak):
    """Rates of 900 steps: a warmup of 100, constant, an eightfold decay over the last 300."""
    constant = [peak * min(1.0, (step + 1) / 100) for step in range(600)]
    return constant + [peak * 8 ** (-(step + 1) / 300) for step in range(300)]


def test_equilibrium_by_hand():
    # a = 1/2, beta1 = 1/2: 1 * sqrt(1/3) * sqrt(1.25 / (0.75 * 0.75)).
    assert equilibrium_rms(1.0, 0.5, betas=(0.5, 0.9)) == pytest.approx(math.sqrt(1.25 / 3) / 0.75)
    # No momentum: lr / sqrt(1 - a^2) with a = 0.9.
    assert equilibrium_rms(2.0, 0.05, betas=(0.0, 0.9)) == pytest.approx(2 / math.sqrt(0.19))
    # The recipe of the paper at lr 1.28e-3 and decay 0.1.
    assert equilibrium_rms(1.28e-3, 0.1) == pytest.approx(0.0800, rel=1e-3)
    assert relaxation_steps(1.28e-3, 0.1) == pytest.approx(3906.25)


@pytest.mark.parametrize("beta1", [0.0, 0.9, 0.99])
def test_slow_equilibrium_is_root_of_rate_over_twice_decay(beta1):
    lr, decay = 1e-9, 0.1
    slow = math.sqrt(lr / (2 * decay))
    assert equilibrium_rms(lr, decay, betas=(beta1, 0.95)) == pytest.approx(slow, rel=1e-7)


def test_muon_without_nesterov_is_wens_formula():
    lr, decay, mu = 0.1, 0.2, 0.95
    a = 1 - lr * decay
    wen = lr * 0.2 * math.sqrt((1 + a * mu) / ((1 - a**2) * (1 - a * mu)))
    settings = {"optimizer": "muon", "momentum": mu, "nesterov": False}
    assert equilibrium_rms(lr, decay, **settings) == pytest.approx(wen, rel=1e-12)
    original = equilibrium_rms(lr, decay, adjust_lr="original", shape=(64, 25), **settings)
    assert original == pytest.approx(wen, rel=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.95])
def test_nesterov_correlations_are_those_of_its_weights(mu):
    # The update is a moving average of noise: g_t counts 1 - mu^2, g_{t-k} (1 - mu) mu^(k+1).
    counts = torch.tensor(
        [1 - mu**2, *((1 - mu) * mu ** (k + 1) for k in range(1, 2000))], dtype=torch.float64
    )
    walk = muon_walk(mu)
    for lag in (1, 2, 7):
        measured = (counts[lag:] @ counts[:-lag] / (counts @ counts)).item()
        assert walk.overlap * mu**lag == pytest.approx(measured, abs=1e-12)


WALKS = [
    adamw_walk(),
    adamw_walk(0.0),
    muon_walk(),
    muon_walk(0.9, False),
    muon_walk(shape=(48, 96), coefficients="quintic"),
    lion_walk(),
    sgdm_walk(),
    sgdm_walk(0.95, nesterov=True),
]


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("start_rms", [0.0, 3.0])
def test_constant_rate_leads_to_the_closed_form_exactly(walk, start_rms):
    lr, decay = 0.2, 0.1
    end = brownian_rms([lr] * 3000, decay, start_rms, walk)[-1]
    assert end == pytest.approx(walk.equilibrium(lr, decay), rel=1e-12)


def test_closed_forms_are_those_of_their_walks():
    assert brownian_rms([0.2] * 3000, 0.1)[-1] == pytest.approx(equilibrium_rms(0.2, 0.1))
    walks = {"muon": muon_walk(), "lion": lion_walk(), "sgdm": sgdm_walk()}
    for optimizer, walk in walks.items():
        closed = equilibrium_rms(0.2, 0.1, optimizer=optimizer)
        assert brownian_rms([0.2] * 3000, 0.1, walk=walk)[-1] == pytest.approx(closed)


def test_slow_sgd_is_the_slow_form_over_one_minus_momentum():
    lr, decay = 1e-9, 0.1
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
        slow = math.sqrt(lr / (2 * decay)) / (1 - momentum)
        settings = {"momentum": momentum, "nesterov": nesterov}
        closed = equilibrium_rms(lr, decay, optimizer="sgdm", **settings)
        assert closed == pytest.approx(slow, rel=1e-6)


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.9)])
def test_lions_signs_are_as_alike_as_those_of_its_gaussian(betas):
    # u is the sign of a moving average of noise: g_t counts 1 - b1, g_{t-k} b1 (1-b2) b2^(k-1).
    b1, b2 = betas
    counts = [1 - b1, *(b1 * (1 - b2) * b2 ** (k - 1) for k in range(1, 3000))]
    counts = torch.tensor(counts, dtype=torch.float64)
    lags = range(1, 2500)
    gaussian = [(counts[k:] @ counts[:-k] / (counts @ counts)).item() for k in lags]
    alike = sum(2 / math.pi * math.asin(min(r, 1.0)) for r in gaussian)
    walk = lion_walk(betas)
    assert walk.overlap * b2 / (1 - b2) == pytest.approx(alike, rel=1e-5, abs=1e-9)
    # The linear form of the literature, within the percents its docstring names.
    k = math.sqrt((1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2))
    linear = math.sqrt(1e-9 / (math.pi * 0.1)) / k
    if b1:
        closed = equilibrium_rms(1e-9, 0.1, optimizer="lion", betas=betas)
        assert closed == pytest.approx(linear, rel=0.05)


@pytest.mark.parametrize("coefficients", ["quintic", "polar-express"])
def test_small_noise_stands_for_large(coefficients):
    large = torch.randn(2, 160, 240, generator=torch.Generator().manual_seed(1))
    mixed = 0.8 * large[0] + 0.6 * large[1]
    one, other = orthogonalize(torch.stack([large[0], mixed]), coefficients)
    rms = one.square().mean().sqrt().item() * math.sqrt(240)
    noise = orthogonalized_noise(240, 160, coefficients)
    assert noise.rms == pytest.approx(rms, rel=0.02)
    alike = ((one * other).mean() / one.square().mean()).item()
    assert noise.overlap_after(0.8) == pytest.approx(alike, abs=0.01)
    # At its own size the small matrix is orthogonalized as any other.
    small = torch.randn(3, 20, 50)
    exact = orthogonalize(small, coefficients)
    torch.testing.assert_close(_orthogonalized(small, 1.0, coefficients), exact, rtol=0, atol=1e-4)


def test_blocks_walk_each_by_itself():
    one, other = muon_walk(shape=(32, 96), coefficients="quintic"), muon_walk()
    mixed = mixed_walk([one, other], [32, 64])
    for lr in (1e-3, 0.5):
        parts = [brownian_rms([lr] * 50, 0.1, 0.2, walk)[-1] ** 2 for walk in (one, other)]
        whole = brownian_rms([lr] * 50, 0.1, 0.2, mixed)[-1] ** 2
        assert whole == pytest.approx((parts[0] + 2 * parts[1]) / 3, rel=1e-12)
    with pytest.raises(ValueError, match="one optimizer and momentum"):
        mixed_walk([one, adamw_walk()], [1, 1])


def test_relaxation_is_exponential_in_the_square():
    lr, decay = 1e-3, 0.1
    end, steps = equilibrium_rms(lr, decay), round(relaxation_steps(1e-3, 0.1))
    away = [rms**2 - end**2 for rms in brownian_rms([lr] * 2 * steps, decay, 1.0)]
    assert away[-1] / away[steps - 1] == pytest.approx(math.exp(-1), rel=1e-3)


def test_walk_without_decay_spreads_by_rate_times_root_steps():
    end = brownian_rms([0.01] * 100_000, 0.0)[-1]
    assert end == pytest.approx(0.01 * math.sqrt(100_000), rel=1e-4)


def test_a_run_in_two_parts_is_the_run_in_one():
    lrs = warmup_constant_decay(0.1)
    state = BrownianState(0.3)
    for lr in lrs[:77]:
        state = brownian_step(state, lr, 0.1)
    state = BrownianState(*state)
    for lr in lrs[77:]:
        state = brownian_step(state, lr, 0.1)
    assert state.rms == brownian_rms(lrs, 0.1, 0.3)[-1]


@pytest.mark.parametrize("rate_times_decay", [0.1, 0.02, 0.005])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.99), (0.0, 0.95)])
def test_adamw_on_noise_reaches_the_equilibrium(rate_times_decay, betas):
    lr, decay = rate_times_decay * 4, 0.25
    steps = 100 + round(4 / rate_times_decay)
    trajectory = adamw_on_noise([lr] * steps, decay, betas)
    expected = equilibrium_rms(lr, decay, betas=betas)
    assert late_rms(trajectory, steps // 3) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("start_rms", [0.0, 0.02, 1.0])
def test_adamw_on_noise_follows_the_walk_through_a_schedule(start_rms):
    lrs = warmup_constant_decay(0.05)
    measured = adamw_on_noise(lrs, 0.2, (0.9, 0.95), start_rms)
    expected = brownian_rms(lrs, 0.2, start_rms)
    assert measured == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_on_noise_follows_the_walk_through_a_schedule(nesterov):
    # A flat matrix and Polar Express: where orthogonalizing comes nearest to rescaling.
    lrs = warmup_constant_decay(0.05)
    settings = {"nesterov": nesterov, "coefficients": "polar-express"}
    measured = muon_on_noise(lrs, 0.2, (16, 128), **settings)
    expected = brownian_rms(lrs, 0.2, walk=muon_walk(0.95, nesterov))
    # The walk's first Nesterov steps are a little long: see muon_walk.
    assert measured[:20] == pytest.approx(expected[:20], rel=0.08)
    assert measured[20:] == pytest.approx(expected[20:], rel=0.04)


@pytest.mark.parametrize(
    ("shape", "coefficients", "ratio"),
    [
        ((48, 48), "quintic", 0.72),
        ((32, 96), "quintic", 0.78),
        ((16, 128), "quintic", 0.85),
        ((48, 48), "polar-express", 0.88),
        ((96, 32), "polar-express", 0.98),
    ],
)
def test_muon_on_noise_stays_below_the_estimate_by_what_is_documented(shape, coefficients, ratio):
    lr, decay = 0.1, 0.2
    trajectory = muon_on_noise([lr] * 800, decay, shape, coefficients=coefficients)
    measured = late_rms(trajectory, 600)
    estimate = equilibrium_rms(lr, decay, optimizer="muon")
    assert measured / estimate == pytest.approx(ratio, abs=0.04)
    corrected = equilibrium_rms(lr, decay, optimizer="muon", shape=shape, coefficients=coefficients)
    assert measured == pytest.approx(corrected, rel=0.04)


def test_limits_and_impossible_settings():
    assert equilibrium_rms(0.0, 0.1) == 0.0
    assert equilibrium_rms(0.1, 0.0) == math.inf
    assert relaxation_steps(0.1, 0.0) == math.inf
    for lr, decay in ((-1.0, 0.1), (1.0, -0.1), (20.0, 0.1), (math.nan, 0.1)):
        with pytest.raises(ValueError, match="weight_decay"):
            equilibrium_rms(lr, decay)
    with pytest.raises(ValueError, match="beta1"):
        equilibrium_rms(0.1, 0.1, betas=(1.0, 0.95))
    with pytest.raises(ValueError, match="choose from adamw, muon, lion, sgdm"):
        equilibrium_rms(0.1, 0.1, optimizer="adam")
    with pytest.raises(ValueError, match="adamw has no momentum; it takes betas"):
        equilibrium_rms(0.1, 0.1, momentum=0.9)
    for settings in ({}, {"optimizer": "sgdm"}, {"optimizer": "muon"}):
        with pytest.raises(ValueError, match="shape has no effect here"):
            equilibrium_rms(0.1, 0.1, shape=(4, 8), **settings)
    with pytest.raises(ValueError, match="shape"):
        muon_walk(adjust_lr="original")
    with pytest.raises(ValueError, match="shape"):
        muon_walk(coefficients="quintic")
    with pytest.raises(ValueError, match="Lion's beta2"):
        lion_walk((0.9, 0.0))
