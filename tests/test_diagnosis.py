"""What an optimizer shows of noise and decay: on noise whose truth is known, and on a real run."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from families import build
from learnable_multipliers.equilibrium import noise_indicator, noise_ratio
from learnable_multipliers.equilibrium._prediction import _muon_walk
from learnable_multipliers.equilibrium._random_walk import muon_walk
from learnable_multipliers.equilibrium._readings import row_spread, verdict_of
from paths import KINDS, Toy, backward, toy_plan
from small_training import ENDS, median_departure, train

LR, DECAY, STEPS = 0.05, 0.5, 300


# -- the indicator ------------------------------------------------------------------------------


def moments(gradients, betas):
    first, second = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for grad in gradients:
        first.lerp_(grad, 1 - betas[0])
        second.lerp_(grad.square(), 1 - betas[1])
    return first, second


@pytest.mark.parametrize("steps", [1, 2, 10, 150])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.95, 0.98), (0.0, 0.9)])
def test_indicator_of_pure_noise_is_one_at_any_step(betas, steps):
    size = 50_000
    noise = 7.0 * torch.randn(steps, size, dtype=torch.float64)
    indicator = noise_indicator(*moments(noise, betas), *betas, steps).item()
    # At the first step m^2 and v are the same numbers, so nothing is left to chance.
    tolerance = 1e-12 if steps == 1 else 4 * math.sqrt(2 / size)
    assert indicator == pytest.approx(1.0, abs=tolerance)


@pytest.mark.parametrize("signal", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("steps", [5, 200])
def test_indicator_with_a_signal_is_what_the_signal_adds(signal, steps):
    betas, size = (0.9, 0.95), 50_000
    gradients = signal + torch.randn(steps, size, dtype=torch.float64)
    indicator = noise_indicator(*moments(gradients, betas), *betas, steps).item()
    constant = (signal * (1 - betas[0] ** steps)) ** 2 / (1 - betas[1] ** steps)
    expected = (constant / noise_ratio(*betas, steps) + 1) / (1 + signal**2)
    assert indicator == pytest.approx(expected, rel=0.02)
    assert indicator > 1


def test_indicator_at_its_ends():
    steady = torch.ones(400, 3, dtype=torch.float64)
    turning = steady * torch.tensor([1.0, -1.0] * 200, dtype=torch.float64)[:, None]
    betas = (0.9, 0.99)
    assert noise_indicator(*moments(steady, betas), *betas, 400).item() == pytest.approx(19)
    assert noise_indicator(*moments(turning, betas), *betas, 400).item() == pytest.approx(1 / 19)
    with pytest.raises(ValueError, match="before the first step"):
        noise_ratio(0.9, 0.95, 0)


def test_the_walk_of_heads_is_that_of_their_shape():
    by_heads = lrm.Muon.from_model(build("falcon-40b"), "none", split="heads")
    matrix = next(e.matrix for e in by_heads.plan.entries if "query_key_value.w" in e.name)
    assert {block.head_dim for block in matrix.blocks} == {4}
    head = muon_walk(0.9, True, adjust_lr="original", shape=(4, 16), coefficients="quintic")

    def rms(split):
        walk = _muon_walk(matrix, 0.9, True, "original", "quintic", split)
        return walk.equilibrium(1e-2, 0.1)

    assert rms("heads") == pytest.approx(head.equilibrium(1e-2, 0.1), rel=1e-12)
    # Square blocks forget their updates faster.
    assert rms("blocks") < 0.99 * rms("heads")


# -- Muon's one number --------------------------------------------------------------------------


def muon_of(model, kind="row+col", **settings):
    return lrm.Muon(lrm.param_groups(model, toy_plan(model, kind)), lr=1e-2, **settings)


@pytest.mark.parametrize("kind", ["row+col", "blocks", "scalar"])
def test_muon_averages_the_mean_square_of_its_clipped_raw_gradients(kind):
    model = Toy().double()
    optimizer = muon_of(model, kind, max_grad_norm=0.1, betas=(0.9, 0.8))
    plan = toy_plan(model, kind)
    weights = [model.qkv.weight, model.mix, model.out.weight]
    averages = []
    for step in range(4):
        backward(model, torch.randint(0, 13, (2, 7)))
        if step == 2:
            # Without a gradient a matrix rests.
            model.out.weight.grad = None
        grads = {}
        for name, weight in zip(("qkv.weight", "mix", "out.weight"), weights, strict=True):
            state = optimizer.state.get(weight, {})
            if weight.grad is not None:
                matrix = plan[name].matrix
                values = {k: state[k] for k in ("row", "col", "scalar") if k in state}
                values = values or {
                    k: torch.ones(shape, dtype=torch.float64)
                    for k, shape in matrix.value_shapes().items()
                }
                raw = state.get("raw", weight.detach())
                grads[name] = lrm.split_gradient(matrix, raw, values, weight.grad)[0].clone()
        optimizer.step()
        optimizer.zero_grad()
        clip = min(1.0, 0.1 / (optimizer.grad_norm.item() + 1e-6))
        squares = {name: (clip * grad).square().mean().item() for name, grad in grads.items()}
        averages.append(squares)
    for name, weight in zip(("qkv.weight", "mix", "out.weight"), weights, strict=True):
        expected = 0.0
        for squares in averages:
            if name in squares:
                first = expected == 0
                expected = squares[name] if first else 0.8 * expected + 0.2 * squares[name]
        assert optimizer.state[weight]["mean_sq"].item() == pytest.approx(expected, rel=1e-9)
    assert "mean_sq" not in optimizer.state[model.embed.weight]


def test_mean_square_stays_where_a_step_is_left_out():
    model = Toy()
    optimizer = muon_of(model)
    for _ in range(2):
        backward(model, torch.randint(0, 13, (2, 7)))
        optimizer.step()
        optimizer.zero_grad()
    kept = optimizer.state[model.qkv.weight]["mean_sq"].clone()
    assert kept > 0
    backward(model, torch.randint(0, 13, (2, 7)))
    model.out.weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert torch.equal(optimizer.state[model.qkv.weight]["mean_sq"], kept)


def test_state_with_and_without_the_mean_square_is_loaded():
    torch.manual_seed(1)
    model = Toy()
    optimizer = muon_of(model)
    backward(model, torch.randint(0, 13, (2, 7)))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    again = muon_of(copy.deepcopy(model))
    again.load_state_dict(saved)
    weights = {
        name: [group["params"][group["param_names"].index(name)]
               for one in (optimizer, again) for group in one.param_groups
               if name in group["param_names"]]
        for name in ("qkv.weight", "mix")
    }  # fmt: skip
    for ours, theirs in weights.values():
        assert torch.equal(again.state[theirs]["mean_sq"], optimizer.state[ours]["mean_sq"])

    # As an earlier release wrote it.
    for state in saved["state"].values():
        state.pop("mean_sq", None)
    older = muon_of(copy.deepcopy(model))
    older.load_state_dict(saved)
    for group in older.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    older.step()
    readings = {r.name: r for r in lrm.diagnose(older).readings if r.part == "weight"}
    assert 0 < readings["qkv.weight"].indicator < 10


# -- optimizers on noise ------------------------------------------------------------------------


class Stack(nn.Module):
    """Matrices large enough for an rms within a percent or so, and vectors of each kind."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(60, 64)
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.norm = nn.RMSNorm(64)
        self.lm_head = nn.Linear(64, 60, bias=False)


def groups_of(model, plan):
    return lrm.param_groups(model, plan, weight_decay=DECAY)


def wrapped(make):
    def build(model, plan):
        return lrm.LearnableMultipliers(make(model), model, plan, multiplier_lr_scale=0.05)

    return build


OPTIMIZERS = {
    "adamw": lambda m, p: lrm.AdamW(groups_of(m, p), lr=LR, multiplier_lr_scale=0.05),
    "muon": lambda m, p: lrm.Muon(
        groups_of(m, p), lr=LR, multiplier_lr_scale=0.05, adamw_lr_scale=0.3
    ),
    "torch AdamW": wrapped(
        lambda m: torch.optim.AdamW(m.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    ),
    "torch Adam": wrapped(
        lambda m: torch.optim.Adam(m.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    ),
    "torch SGD": wrapped(
        lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    ),
}
HIDDEN = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
SHARE = torch.cat([torch.zeros(10), torch.full((20,), 0.03), torch.ones(30)])


def on_noise(name, kind="row+col", signal=0.0):
    """Train on N(0, 1) gradients, the embedding's rows at their frequencies."""
    torch.manual_seed(0)
    model = Stack()
    plan = lrm.plan(model, "full", [] if kind == "row+col" else [lrm.Rule("", kind)])
    optimizer = OPTIMIZERS[name](model, plan)
    start = lrm.diagnose(optimizer)
    lrs = [LR * min(1.0, (t + 1) / 30) * 8 ** (-max(0, t - 199) / 100) for t in range(STEPS)]
    for lr in lrs:
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter in model.parameters():
            parameter.grad = signal + torch.randn_like(parameter)
        model.embed_tokens.weight.grad *= torch.bernoulli(SHARE)[:, None]
        optimizer.step()
    return optimizer, lrs, start


@pytest.mark.parametrize("kind", ["row+col", "none"])
@pytest.mark.parametrize("name", ["adamw", "muon", "torch AdamW"])
def test_noise_is_recognized_as_such(name, kind):
    optimizer, lrs, start = on_noise(name, kind)
    diagnosis = lrm.diagnose(optimizer, lrs=lrs, start=start, frequency=SHARE)
    for matrix in [*HIDDEN, "lm_head.weight"]:
        reading = diagnosis[matrix]
        scale = 0.3 if name == "muon" and matrix == "lm_head.weight" else 1.0
        assert reading.settling == pytest.approx(2 * DECAY * scale * sum(lrs), rel=0.02)
        assert reading.log_ratio == pytest.approx(0, abs=0.04)
        assert reading.indicator == pytest.approx(1, abs=0.1)
        assert reading.verdict == ("trapped" if reading.settling >= 4 else "open")
        assert reading.error == pytest.approx(1 / math.sqrt(2 * reading.size), rel=0.1)
    norm = diagnosis["norm.weight"]
    assert abs(norm.log_ratio) < 4 * norm.error
    if name == "torch AdamW":
        # One group, one decay.
        assert (norm.kind, norm.verdict) == ("vector", "trapped")
    else:
        # No decay, so no equilibrium; on noise the norm walks away from 1 as it should.
        assert (norm.kind, norm.settling, norm.verdict) == ("vector", 0.0, "open")
    if kind == "row+col":
        row = diagnosis["up_proj.weight", "row"]
        assert (row.kind, row.size, row.verdict) == ("multiplier", 96, "open")
        assert abs(row.log_ratio) < 4 * row.error
    assert len(diagnosis.readings) == len(start.readings)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_signal_makes_a_tensor_free(name):
    optimizer, lrs, start = on_noise(name, signal=1.0)
    diagnosis = lrm.diagnose(optimizer, lrs=lrs, start=start)
    assert all(diagnosis[matrix].indicator > 3 for matrix in HIDDEN)
    assert {diagnosis[matrix].verdict for matrix in HIDDEN} == {"free"}
    assert diagnosis["norm.weight"].verdict == "free"


@pytest.mark.parametrize(
    ("ratio", "indicator", "shown"),
    [
        (0.0, 9.0, "free (signal in gradients)"),
        (None, 9.0, "free (signal in gradients)"),
        (1.0, 9.0, "free"),
        (1.0, 1.0, "free"),
        (0.0, 1.0, "trapped"),
    ],
)
def test_a_tensor_that_is_free_by_its_signal_alone_is_reported_as_such(ratio, indicator, shown):
    optimizer, lrs, start = on_noise("adamw")
    reading = lrm.diagnose(optimizer, lrs=lrs, start=start)["up_proj.weight"]
    verdict = verdict_of(ratio, reading.error, reading.settling, indicator, reading.size)
    changed = replace(reading, log_ratio=ratio, indicator=indicator, verdict=verdict)
    assert lrm.Diagnosis((changed,), {}).table()[1][-1] == shown


def test_rare_rows_are_predicted_as_many_of_them_walk():
    lrs, frequency = [4e-3] * 300, torch.logspace(-2, 0, 7, dtype=torch.float64)
    spread = row_spread(lrs, 1.0, (0.9, 0.95), frequency)
    chance = frequency[:, None].expand(-1, 1500)
    run = lrm.simulate_brownian("adamw", lrs, 1.0, (7, 1500, 4), frequency=chance, seed=5)
    # One row for each frequency would err by half where gradients are few.
    torch.testing.assert_close(
        spread, run.row_rms.double().square().mean(-1).sqrt(), rtol=0.06, atol=0
    )
    assert bool((spread.diff() > 0).all())


def test_rows_of_an_embedding_walk_by_their_frequency():
    optimizer, lrs, start = on_noise("adamw", "none")
    diagnosis = lrm.diagnose(optimizer, lrs=lrs, start=start, frequency=SHARE)
    rows = diagnosis.rows["embed_tokens.weight"]
    never, rare, always = rows.bands
    assert [band.num_rows for band in rows.bands] == [10, 20, 30]
    assert (never.high, rare.low, always.high) == (0.0, 0.01, 1.0)
    assert never.log_ratio == pytest.approx(0, abs=1e-5)
    assert rare.log_ratio == pytest.approx(0, abs=0.15)
    assert always.log_ratio == pytest.approx(0, abs=0.05)
    assert always.indicator == pytest.approx(1, abs=0.1)
    assert rare.predicted < 0.8 * always.predicted
    assert always.verdict == "trapped"
    assert rows.predicted.shape == rows.rms.shape == (60,)
    assert diagnosis["embed_tokens.weight"].note.startswith("row by row")
    # Without frequencies rows are read, not predicted.
    bare = lrm.diagnose(optimizer, lrs=lrs, start=start).rows["embed_tokens.weight"]
    assert bare.predicted is None
    torch.testing.assert_close(bare.rms, rows.rms)
    assert [band.num_rows for band in bare.bands] == [60]
    # Every row in every step: one band, up to and with 1.
    steady = lrm.diagnose(optimizer, frequency=torch.ones(60)).rows["embed_tokens.weight"]
    assert [(band.low, band.num_rows) for band in steady.bands] == [(0.1, 60)]


def test_row_frequency_is_the_chance_of_being_in_a_batch():
    counts = torch.tensor([0, 1, 9, 990])
    frequency = lrm.row_frequency(counts, 100)
    expected = [1 - (1 - c / 1000) ** 100 for c in counts.tolist()]
    assert frequency.tolist() == pytest.approx(expected, rel=1e-9)


def test_wrapped_adamw_reads_like_our_own():
    ours, theirs = (
        lrm.diagnose(optimizer, lrs=lrs, start=start)
        for optimizer, lrs, start in map(on_noise, ("adamw", "torch AdamW"))
    )
    for name in HIDDEN:
        assert theirs[name].indicator == pytest.approx(ours[name].indicator, rel=1e-3)
        assert theirs[name].measured == pytest.approx(ours[name].measured, rel=1e-3)
        assert theirs[name].predicted == pytest.approx(ours[name].predicted, rel=1e-9)


@pytest.mark.parametrize("name", ["torch Adam", "torch SGD"])
def test_a_walk_that_is_not_known_is_not_predicted(name):
    optimizer, lrs, start = on_noise(name)
    diagnosis = lrm.diagnose(optimizer, lrs=lrs, start=start)
    reading = diagnosis["up_proj.weight"]
    assert (reading.predicted, reading.verdict) == (None, "open")
    assert reading.note == "its optimizer's random walk on noise is not known"
    assert (reading.indicator is None) == (name == "torch SGD")
    # AdamW trains the multipliers whatever trains the rest.
    assert diagnosis["up_proj.weight", "row"].predicted is not None


def test_without_rates_the_present_rate_counts():
    optimizer, lrs, start = on_noise("adamw")
    for group in optimizer.param_groups:
        group["lr"] = LR
    reading = lrm.diagnose(optimizer)["up_proj.weight"]
    assert reading.predicted == pytest.approx(lrm.equilibrium_rms(LR, DECAY), rel=1e-3)
    assert reading.settling == pytest.approx(2 * DECAY * LR * STEPS, rel=0.02)
    for group in optimizer.param_groups:
        group["lr"] = LR / 10
    slow = lrm.diagnose(optimizer)["up_proj.weight"]
    assert (slow.predicted, slow.verdict) == (None, "open")
    assert slow.note.startswith("too early for the equilibrium at the present rate")
    assert slow.settling == pytest.approx(2 * DECAY * LR / 10 * STEPS, rel=0.02)
    # Nor of multipliers, whose decay has hardly begun.
    row = lrm.diagnose(optimizer, start=start)["up_proj.weight", "row"]
    assert (row.predicted, row.verdict) == (None, "open")
    note = lrm.diagnose(optimizer)["norm.weight"].note
    assert note == "no decay, so no equilibrium: give lrs and start"
    # With rates and no start, what has forgotten its start is predicted, and multipliers are.
    diagnosis = lrm.diagnose(optimizer, lrs=lrs)
    assert diagnosis["up_proj.weight"].predicted > 0
    assert diagnosis["up_proj.weight", "row"].predicted > 0
    assert diagnosis["norm.weight"].note.startswith("its start is not forgotten: give start")
    # After a schedule that ends at 0.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    reading = lrm.diagnose(optimizer)["up_proj.weight"]
    assert reading.note == "the rate is 0 now, so no equilibrium: give lrs and start"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_every_trained_tensor_is_read(optimizer_class, kind):
    model = Toy()
    plan = toy_plan(model, kind)
    optimizer = optimizer_class(lrm.param_groups(model, plan), lr=1e-2)
    before = lrm.diagnose(optimizer)
    assert {reading.note for reading in before.readings} == {"no step yet"}
    for _ in range(3):
        backward(model, torch.randint(0, 13, (2, 7)))
        optimizer.step()
        optimizer.zero_grad()
    diagnosis = lrm.diagnose(optimizer, lrs=[1e-2] * 3, start=before)
    carried = sum(len(values) for values in lrm.multipliers(optimizer).values())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(diagnosis.readings) == len(trained) + carried
    for name, raw in optimizer.raw_weights().items():
        rms = raw.square().mean().sqrt().item()
        assert diagnosis[name].measured == pytest.approx(rms, rel=1e-6)
        assert diagnosis[name].steps == (0 if name.startswith("unused") else 3)
    if kind == "log":
        # The logarithm is what trains: it starts at 0.
        assert 0 < diagnosis["out.weight", "row"].measured < 0.1
    elif kind == "blocks":
        assert diagnosis["qkv.weight", "row"].size == 4
    text = str(diagnosis)
    assert all(name in text for name in ("norm.weight", "head.weight", "verdict"))
    plain = json.loads(json.dumps(diagnosis.to_dict()))
    assert [reading["name"] for reading in plain["readings"]] == [
        r.name for r in diagnosis.readings
    ]


def test_verdicts():
    assert verdict_of(0.1, 0.01, 5.0, 1.2, 4096) == "trapped"
    assert verdict_of(-0.1, 0.01, 3.0, 1.2, 4096) == "open"
    assert verdict_of(0.3, 0.01, 3.0, 1.2, 4096) == "free"
    assert verdict_of(0.3, 0.1, 5.0, None, 40) == "trapped"
    assert verdict_of(0.0, 0.01, 5.0, 2.5, 4096) == "free"
    assert verdict_of(None, None, None, 2.5, 4) == "open"


def test_impossible_requests_raise_with_a_remedy():
    model = Stack()
    plan = lrm.plan(model)
    with pytest.raises(TypeError, match=r"expected an optimizer of this library"):
        lrm.diagnose(torch.optim.AdamW(model.parameters()))
    optimizer = lrm.AdamW(lrm.param_groups(model, plan))
    with pytest.raises(ValueError, match="lrs has 2 learning rates, but the optimizer has taken 0"):
        lrm.diagnose(optimizer, lrs=[0.1, 0.1])
    with pytest.raises(ValueError, match="embed_tokens.weight has 60 rows"):
        lrm.diagnose(optimizer, frequency=torch.ones(59))
    with pytest.raises(KeyError, match="no row of 'lm_head.weight'"):
        lrm.diagnose(optimizer)["lm_head.weight", "row"]
    alone = nn.Linear(3, 3)
    optimizer = lrm.AdamW(lrm.param_groups(alone, lrm.plan(alone)))
    with pytest.raises(ValueError, match="trains no embedding"):
        lrm.diagnose(optimizer, frequency=torch.ones(3))


# -- a real run ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_matrices_of_a_real_run_follow_brownian_motion_and_multipliers_do_not():
    run = train()
    diagnosis = run.diagnosis()
    hidden = [r for r in diagnosis.readings if r.kind == "matrix" and r.role not in ENDS]
    assert len(hidden) == 14
    assert all(reading.settling >= 4 for reading in hidden)
    assert median_departure(diagnosis, "matrix") < 0.1
    assert median_departure(diagnosis, "multiplier") > 0.3
    verdicts = [reading.verdict for reading in hidden]
    assert verdicts.count("trapped") >= 0.8 * len(verdicts)
    # It has learned: by their frequencies alone the bytes cost 3.3 nats.
    assert run.loss < 1.8

    # A wrong schedule fails the same check.
    constant = [max(run.lrs)] * len(run.lrs)
    assert median_departure(run.diagnosis(constant), "matrix") > 0.1

    # Samples say the same as the expected walk.
    name = hidden[0].name
    sampled = lrm.simulate_brownian(
        "adamw", run.lrs, run.weight_decay, (100, 100), start_rms=run.start[name].measured
    )
    assert sampled.rms[-1] == pytest.approx(diagnosis[name].predicted, rel=0.03)


def test_a_hybrid_shows_conv1d_and_d_and_norms():
    run = train(placement="full", steps=3, ssm_size=64)
    diagnosis = run.diagnosis()
    layer = "model.layers.0"
    for name in ("mamba.D", "mamba.conv1d.weight", "input_layernorm.weight"):
        reading = diagnosis[f"{layer}.{name}"]
        assert (reading.kind, reading.settling) == ("vector", 0.0)
        assert reading.predicted == pytest.approx(reading.measured, rel=0.1)
        assert reading.indicator is not None
    assert diagnosis[f"{layer}.mamba.in_proj.weight"].role.startswith("ssm")
