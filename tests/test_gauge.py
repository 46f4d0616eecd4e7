"""Drift along symmetries is measured, and taken back without changing what a model computes."""

import copy
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import learnable_multipliers as lrm
from families import VOCABULARY, HandWritten, build, logits
from learnable_multipliers._gauge import Orbits, symmetry_positions
from learnable_multipliers._multiplier import split_gradient
from learnable_multipliers.symmetry import Axis, Symmetry, Term
from paths import matrices_of, place
from tolerance import TOLERANCE

# Change of a logit over the largest one: 84 units in the last place of float32. Measured: 3e-7 to
# 1.1e-6 over the four cases below.
LOGIT_ROUNDING = 1e-5
# Drift that rounding the new values leaves, in log units: each is off by half a unit in the last
# place, and means over members by less.
DRIFT_ROUNDING = {torch.float32: 2e-7, torch.float64: 1e-12}

CASES = [("llama", "full"), ("llama", "scalar"), ("falcon-h1", "full"), ("falcon-h1", "scalar")]
# Every token several times: embeddings of others would be silent.
_DRAWN = torch.Generator().manual_seed(0)
EVERY_TOKEN = torch.cat([torch.randperm(VOCABULARY, generator=_DRAWN) for _ in range(4)])
EVERY_TOKEN = EVERY_TOKEN[:192].view(8, 24)


def model_of(family, dtype=torch.float32, **overrides):
    """Return a small model whose norms add nothing: symmetries of normalization are exact too."""
    if family == "hand-written":
        torch.manual_seed(1)
        return HandWritten(layers=1).to(dtype)
    return build(family, dtype=dtype, **{"num_hidden_layers": 1, "rms_norm_eps": 0.0, **overrides})


@functools.cache
def symmetries_of(family, placement):
    model = model_of(family)
    return lrm.find_symmetries(model, lrm.plan(model, placement), EVERY_TOKEN)


OPTIMIZERS = {
    "adamw": lambda model, plan: lrm.AdamW(lrm.param_groups(model, plan), lr=1e-2),
    "muon": lambda model, plan: lrm.Muon(lrm.param_groups(model, plan), lr=1e-2),
    "around adamw": lambda model, plan: lrm.LearnableMultipliers(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, plan
    ),
    "around sgd": lambda model, plan: lrm.LearnableMultipliers(
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), model, plan
    ),
}


def outputs(model, ids):
    out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


def backward(model, seed):
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    out = outputs(model, ids)
    F.cross_entropy(out[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()


def step(model, opt, seed):
    backward(model, seed)
    opt.step()
    opt.zero_grad()


def scattered(plan, dtype, *, zeros=True):
    """Return multipliers around 1, a third of them negative; of each axis the second is 0."""
    generator = torch.Generator().manual_seed(7)
    values = {}
    for entry in plan.entries:
        if not entry.carries:
            continue
        values[entry.name] = {}
        for kind, shape in entry.matrix.value_shapes().items():
            log = 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)
            if entry.matrix.scale == "linear":
                sign = torch.where(torch.rand(shape, generator=generator) < 0.3, -1.0, 1.0)
                log = log.exp() * sign
                if zeros and log.numel() > 1:
                    log.view(-1)[1] = 0.0
            values[entry.name][kind] = log.to(dtype)
    return values


def far_away(family, placement, *, dtype=torch.float32, optimizer="adamw", zeros=True, **overrides):
    """Return a model and its optimizer after a few steps, then with multipliers all over."""
    model = model_of(family, dtype, **overrides)
    plan = lrm.plan(model, placement)
    opt = OPTIMIZERS[optimizer](model, plan)
    for seed in range(3):
        step(model, opt, seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    place(opt, model, scattered(plan, wide, zeros=zeros))
    return model, plan, opt


def state_of(opt):
    """Return a copy of all state by parameter name, a wrapped optimizer's included."""
    saved = copy.deepcopy(opt.state_dict())
    names = [name for group in opt.param_groups for name in group["param_names"]]
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    return {name: saved["state"][i] for name, i in zip(names, ids, strict=True)}


def largest_drift(opt, symmetries):
    return max(one.largest for one in lrm.drift(opt, symmetries))


# -- what stays -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "placement"), CASES)
def test_logits_stay_to_rounding_and_every_drift_goes_to_zero(family, placement):
    model, _, opt = far_away(family, placement)
    symmetries = symmetries_of(family, placement)
    before, drifted = logits(model), largest_drift(opt, symmetries)
    assert drifted > 0.3
    lrm.rebalance_(opt, symmetries)
    change = (logits(model) - before).abs().max() / before.abs().max()
    left = largest_drift(opt, symmetries)
    print(f"drift {drifted:.2f} -> {left:.0e}, logits by {change:.1e}")
    assert 0 < change < LOGIT_ROUNDING
    assert left < DRIFT_ROUNDING[torch.float32]


@pytest.mark.parametrize(("family", "placement"), CASES)
def test_logits_stay_after_training_alone(family, placement):
    model = model_of(family)
    opt = OPTIMIZERS["adamw"](model, lrm.plan(model, placement))
    for seed in range(20):
        step(model, opt, seed)
    symmetries = symmetries_of(family, placement)
    before = logits(model)
    lrm.rebalance_(opt, symmetries)
    change = (logits(model) - before).abs().max() / before.abs().max()
    assert change < LOGIT_ROUNDING
    assert largest_drift(opt, symmetries) < DRIFT_ROUNDING[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "placement"), CASES)
def test_powers_of_two_leave_every_bit_of_the_logits(family, placement, dtype):
    model, _, opt = far_away(family, placement, dtype=dtype)
    symmetries = symmetries_of(family, placement)
    before, drifted, values = logits(model), largest_drift(opt, symmetries), lrm.multipliers(opt)
    lrm.rebalance_(opt, symmetries, powers_of_two=True)
    assert torch.equal(logits(model), before)
    assert largest_drift(opt, symmetries) < drifted
    moved = 0
    for name, kinds in lrm.multipliers(opt).items():
        for kind, value in kinds.items():
            nonzero = value != 0
            factors = (value / values[name][kind])[nonzero]
            assert (torch.frexp(factors).mantissa == 0.5).all()
            moved += int((factors != 1).sum())
    assert moved > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_leaves_every_bit_of_bfloat16_logits(optimizer):
    model, _, opt = far_away("llama", "full", dtype=torch.bfloat16, optimizer=optimizer)
    symmetries = symmetries_of("llama", "full")
    before, drifted = logits(model), largest_drift(opt, symmetries)
    lrm.rebalance_(opt, symmetries, powers_of_two=True)
    assert torch.equal(logits(model), before)
    assert largest_drift(opt, symmetries) < drifted
    step(model, opt, 3)


def test_with_the_norms_constant_only_normalization_is_inexact():
    model, _, opt = far_away("llama", "full", rms_norm_eps=1e-5)
    symmetries = symmetries_of("llama", "full")
    exact = [one for one in symmetries if one.kind != "normalization"]
    assert len(exact) == len(symmetries) - 1
    before = logits(model)
    lrm.rebalance_(opt, exact)
    between = logits(model)
    exactly = (between - before).abs().max() / before.abs().max()
    lrm.rebalance_(opt, symmetries)
    change = (logits(model) - between).abs().max() / between.abs().max()
    print(f"logits by {exactly:.1e}, along normalization by {change:.1e}")
    assert exactly < LOGIT_ROUNDING < change < 1e-2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_raw_weights_and_their_moments_are_not_touched(optimizer):
    model, plan, opt = far_away("falcon-h1", "full", optimizer=optimizer)
    symmetries = symmetries_of("falcon-h1", "full")
    before, logits_before = state_of(opt), logits(model)
    lrm.rebalance_(opt, symmetries)
    after = state_of(opt)
    compared = set()
    for entry in plan.entries:
        if entry.carries:
            for key, value in before[entry.name].items():
                if key.split("_")[0] not in ("row", "col", "scalar"):
                    assert torch.equal(value, after[entry.name][key])
                    compared.add(key)
    assert "raw" in compared
    assert len(compared) > 2
    change = (logits(model) - logits_before).abs().max() / logits_before.abs().max()
    assert change < LOGIT_ROUNDING
    assert largest_drift(opt, symmetries) < DRIFT_ROUNDING[torch.float32]
    # The watch takes the new weights for the optimizer's own, and training goes on.
    step(model, opt, 3)


DEGREES = {"exp_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 1}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("powers_of_two", [True, False])
def test_moments_become_m_over_s_and_v_over_s_squared(optimizer, powers_of_two):
    dtype = torch.float32 if powers_of_two else torch.float64
    model, plan, opt = far_away("falcon-h1", "full", optimizer=optimizer, dtype=dtype, zeros=False)
    before, raw = state_of(opt), {n: p.detach().clone() for n, p in model.named_parameters()}
    lrm.rebalance_(opt, symmetries_of("falcon-h1", "full"), powers_of_two=powers_of_two)
    after = state_of(opt)
    # Divided by a power of two every bit stays; else up to the rounding of s = x'/x itself.
    tolerance = {"rtol": 0.0, "atol": 0.0} if powers_of_two else {"rtol": 1e-14, "atol": 0.0}
    compared = set()

    def compare(key, old, new, factor):
        degree = next(d for name, d in DEGREES.items() if key.endswith(name))
        torch.testing.assert_close(new, old / factor**degree, **tolerance)
        compared.add(key)

    for entry in plan.entries:
        old, new = before[entry.name], after[entry.name]
        if entry.carries:
            for kind in entry.matrix.value_shapes():
                factor = new[kind] / old[kind]
                for moment in ("exp_avg", "exp_avg_sq"):
                    key = f"{kind}_{moment}"
                    compare(key, old[key], new[key], factor)
        elif entry.matrix is None:
            factor = model.get_parameter(entry.name).detach() / raw[entry.name]
            # A filter's row is scaled as a whole.
            assert "conv1d.weight" not in entry.name or bool((factor != 1).any())
            for key in old:
                if key.removeprefix("inner.") in DEGREES:
                    compare(key, old[key], new[key], factor)
    assert {"row_exp_avg", "row_exp_avg_sq", "col_exp_avg", "col_exp_avg_sq"} < compared


def test_a_second_time_changes_nothing_beyond_rounding():
    for powers_of_two in (False, True):
        model, _, opt = far_away("falcon-h1", "full")
        symmetries = symmetries_of("falcon-h1", "full")
        lrm.rebalance_(opt, symmetries, powers_of_two=powers_of_two)
        before = state_of(opt)
        lrm.rebalance_(opt, symmetries, powers_of_two=powers_of_two)
        for name, state in state_of(opt).items():
            for key, value in state.items():
                rtol = 0.0 if powers_of_two or key == "raw" else 5e-7
                torch.testing.assert_close(value, before[name][key], rtol=rtol, atol=0.0)


def test_at_a_half_rounding_does_not_swing_to_and_fro():
    """Of x against x / 2, log 2 comes out above or below itself, and the nearest power differs."""
    model, _, opt = far_away("llama", "full")
    pair = next(one for one in symmetries_of("llama", "full") if one.per == "per channel")
    rows, cols = (term.axis for term in pair.terms)
    for _ in range(20):
        values = lrm.multipliers(opt)
        values[rows.name]["row"] = torch.rand(24) + 1
        values[cols.name]["col"] = values[rows.name]["row"] / 2
        place(opt, model, values)
        lrm.rebalance_(opt, [pair], powers_of_two=True)
        once = lrm.multipliers(opt)
        lrm.rebalance_(opt, [pair], powers_of_two=True)
        assert torch.equal(lrm.multipliers(opt)[rows.name]["row"], once[rows.name]["row"])


def test_state_comes_back_from_a_checkpoint_and_training_resumes_bit_for_bit():
    model, plan, opt = far_away("falcon-h1", "full")
    symmetries = symmetries_of("falcon-h1", "full")
    lrm.rebalance_(opt, symmetries)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    other = model_of("falcon-h1")
    other.load_state_dict(weights)
    resumed = OPTIMIZERS["adamw"](other, plan)
    resumed.load_state_dict(saved)
    assert largest_drift(resumed, symmetries) < DRIFT_ROUNDING[torch.float32]
    for seed in range(3, 6):
        step(model, opt, seed)
        step(other, resumed, seed)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name


# -- the step after -------------------------------------------------------------------------------


def raw_gradients(model, opt):
    """Return the gradients of raw weights and of multipliers, by the chain rule (eq. 4)."""
    raw, matrices, mults = lrm.optim.raw_weights(opt), dict(matrices_of(opt)), lrm.multipliers(opt)
    gradients = {}
    for name, values in mults.items():
        grad = model.get_parameter(name).grad
        gradients[name] = split_gradient(matrices[name], raw[name], values, grad)
    return gradients


def equal_runs():
    """Return the same model and optimizer twice in float64, one of them rebalanced."""
    symmetries = symmetries_of("hand-written", "full")
    pair = []
    for rebalanced in (False, True):
        model, _, opt = far_away("hand-written", "full", dtype=torch.float64)
        # Multipliers move by their own update alone; epsilon is the one thing in it with a scale.
        for group in opt.param_groups:
            group.update(multiplier_weight_decay=0.0, eps=1e-30)
        if rebalanced:
            lrm.rebalance_(opt, symmetries)
        pair.append((model, opt))
    return pair


def test_raw_gradients_are_the_same_and_those_of_multipliers_divided():
    (model, opt), (other, moved) = equal_runs()
    backward(model, 9)
    backward(other, 9)
    before, after = lrm.multipliers(opt), lrm.multipliers(moved)
    ours, theirs = raw_gradients(model, opt), raw_gradients(other, moved)
    for name, (raw, grads) in ours.items():
        torch.testing.assert_close(theirs[name][0], raw, rtol=1e-9, atol=1e-15)
        for kind, grad in grads.items():
            nonzero = before[name][kind] != 0
            factor = (after[name][kind] / before[name][kind])[nonzero]
            divided = grad[nonzero] / factor
            torch.testing.assert_close(
                theirs[name][1][kind][nonzero], divided, rtol=1e-9, atol=1e-15
            )


def test_the_next_raw_update_is_the_same_and_relative_updates_of_multipliers_are_not():
    (model, opt), (other, moved) = equal_runs()
    before, before_moved = lrm.multipliers(opt), lrm.multipliers(moved)
    raw = {name: weight.clone() for name, weight in lrm.optim.raw_weights(opt).items()}
    step(model, opt, 9)
    step(other, moved, 9)
    after, after_moved = lrm.multipliers(opt), lrm.multipliers(moved)
    ratios, off = [], 0.0
    for name, kinds in before.items():
        ours = lrm.optim.raw_weights(opt)[name] - raw[name]
        theirs = lrm.optim.raw_weights(moved)[name] - raw[name]
        off = max(off, float((theirs - ours).abs().max() / ours.abs().max()))
        for kind, value in kinds.items():
            # Tokens that never occurred have embeddings that do not move.
            moves = (value != 0) & (after[name][kind] != value)
            factor = (before_moved[name][kind] / value)[moves]
            ours = (after[name][kind] - value)[moves]
            theirs = (after_moved[name][kind] - before_moved[name][kind])[moves]
            # AdamW's step has no scale: multipliers move by as much as before, ...
            off = max(off, float((theirs - ours).abs().max() / ours.abs().max()))
            # ... which is another share of them, by 1 / s^p.
            share = (theirs / before_moved[name][kind][moves]) / (ours / value[moves])
            torch.testing.assert_close(share, 1 / factor, rtol=1e-6, atol=0.0)
            ratios.append(share.abs())
    ratios = torch.cat(ratios)
    assert off < 1e-11
    assert ratios.min() < 0.5
    assert ratios.max() > 2.0
    # So the models, equal before the step, are not after it.
    change = (logits(other) - logits(model)).abs().max() / logits(model).abs().max()
    print(f"updates by {off:.0e}, shares {ratios.min():.2f} to {ratios.max():.2f}, {change:.1e}")
    assert change > 1e-3


def test_gradients_that_wait_for_a_step_follow():
    for family, dtype in (("hand-written", torch.float64), ("falcon-h1", torch.float32)):
        model, _, opt = far_away(family, "full", dtype=dtype)
        backward(model, 9)
        lrm.rebalance_(opt, symmetries_of(family, "full"))
        waiting = {name: p.grad.clone() for name, p in model.named_parameters()}
        opt.zero_grad()
        backward(model, 9)
        for name, parameter in model.named_parameters():
            scale = parameter.grad.abs().max()
            tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
            assert (waiting[name] - parameter.grad).abs().max() <= tolerance * scale, name


# -- the measure ----------------------------------------------------------------------------------


def test_drift_is_the_mean_log_along_the_powers():
    model, _, opt = far_away("llama", "full")
    symmetries = symmetries_of("llama", "full")
    mults = lrm.multipliers(opt)
    for one, t in zip(lrm.drift(opt, symmetries), symmetry_positions(opt, symmetries), strict=True):
        above, below = torch.zeros(2, one.symmetry.num_members, dtype=torch.float64)
        zeros = 0
        for term in one.symmetry.terms:
            name, kind = term.axis
            x = model.get_parameter(name) if kind == "vector" else mults[name][kind]
            for value, member in zip(x.flatten().tolist(), term.members.tolist(), strict=True):
                if member >= 0 and value == 0:
                    zeros += 1
                elif member >= 0:
                    above[member] += term.power * torch.tensor(value).double().abs().log()
                    below[member] += term.power**2
        # A member whose scales are all 0 is nowhere, which counts as 0.
        wanted = above / below.clamp(min=1)
        torch.testing.assert_close(t, wanted, rtol=1e-6, atol=1e-7)
        assert one.rms == pytest.approx(float(wanted.square().mean().sqrt()), rel=1e-5)
        assert one.largest == pytest.approx(float(wanted.abs().max()), rel=1e-5)
        assert one.num_zero == zeros


def test_drift_since_a_start_is_what_was_moved():
    model, plan, opt = far_away("llama", "full", zeros=False)
    symmetries = symmetries_of("llama", "full")
    pair = next(one for one in symmetries if one.kind == "multiplicative")
    start = symmetry_positions(opt, symmetries)
    assert all(one.largest == 0 for one in lrm.drift(opt, symmetries, since=start))
    rows, values = pair.terms[0].axis, lrm.multipliers(opt)
    cols = pair.terms[1].axis
    values[rows.name][rows.kind] *= 3
    values[cols.name][cols.kind] /= 3
    place(opt, model, values)
    moved = lrm.drift(opt, [pair], since=[start[list(symmetries).index(pair)]])[0]
    assert moved.rms == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
    with pytest.raises(ValueError, match="positions"):
        lrm.drift(opt, symmetries, since=start[1:])


def test_the_balanced_point_has_the_least_squared_logs():
    model, _, opt = far_away("falcon-h1", "full", dtype=torch.float64)
    orbits = Orbits(opt, symmetries_of("falcon-h1", "full"))
    num_members = sum(one.num_members for one in orbits.symmetries)
    dense = torch.zeros(len(orbits.logs), num_members, dtype=torch.float64)
    dense.index_put_((orbits.entry, orbits.member), orbits.power, accumulate=True)
    wanted = torch.linalg.lstsq(dense, -orbits.logs[:, None], driver="gelsd").solution[:, 0]
    torch.testing.assert_close(orbits.balanced(), wanted, rtol=0.0, atol=1e-10)
    # Symmetries overlap: one after the other does not end there.
    apart = torch.cat(orbits.positions())
    assert (apart + wanted).abs().max() > 0.1


def test_query_and_key_of_a_head_come_to_the_same_mean():
    model, _, opt = far_away("llama", "full", zeros=False, num_key_value_heads=4)
    plan = lrm.plan(model, "full")
    symmetries = lrm.find_symmetries(model, plan, EVERY_TOKEN)
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")
    pair = next(one for one in symmetries if {term.axis for term in one.terms} == rows_of(*names))
    assert pair.num_members == 8  # 4 heads of 4 features, which rotate in pairs
    before, logits_before = lrm.multipliers(opt), logits(model)
    lrm.rebalance_(opt, [pair])
    after = lrm.multipliers(opt)

    def means(mults, term):
        logs = mults[term.axis.name]["row"].abs().log()
        return torch.stack([logs[term.members == m].mean() for m in range(pair.num_members)])

    query, key = pair.terms
    assert (means(before, query) - means(before, key)).abs().max() > 0.5
    torch.testing.assert_close(means(after, query), means(after, key), rtol=0.0, atol=2e-7)
    # What does not take part is not touched.
    for name, kinds in before.items():
        for kind, value in kinds.items():
            assert (name in names and kind == "row") or torch.equal(value, after[name][kind])
    change = (logits(model) - logits_before).abs().max() / logits_before.abs().max()
    assert change < LOGIT_ROUNDING


def rows_of(*names):
    return {Axis(name, "row") for name in names}


def test_zero_multipliers_stay_zero_and_have_no_part():
    model, _, opt = far_away("llama", "full")
    symmetries = symmetries_of("llama", "full")
    before = lrm.multipliers(opt)
    assert sum(one.num_zero for one in lrm.drift(opt, symmetries)) > 0
    lrm.rebalance_(opt, symmetries)
    for name, kinds in lrm.multipliers(opt).items():
        for kind, value in kinds.items():
            assert torch.equal(value == 0, before[name][kind] == 0)
            assert torch.equal(value < 0, before[name][kind] < 0)
            assert value.isfinite().all()


def test_pairs_that_start_equal_stay_equal():
    """Of up and down in a channel, x dL/dx = y dL/dy: at x = y AdamW gives both the same steps."""
    model = model_of("llama")
    opt = OPTIMIZERS["adamw"](model, lrm.plan(model, "full"))
    for seed in range(50):
        step(model, opt, seed)
    drifts = {str(one.symmetry): one for one in lrm.drift(opt, symmetries_of("llama", "full"))}
    pair = next(
        one
        for words, one in drifts.items()
        if "up_proj against columns" in words and "down_proj" in words
    )
    assert pair.symmetry.per == "per channel"
    assert pair.largest < 1e-6
    assert max(one.rms for one in drifts.values()) > 1e-2


@pytest.mark.slow
def test_drift_grows_without_decay_and_stays_bounded_with_rebalancing():
    """Rows against columns of one matrix, which noise moves apart (20k+: benchmarks/drift.py)."""
    terms = (
        Term(Axis("weight", "row"), 1.0, torch.zeros(10, dtype=torch.long)),
        Term(Axis("weight", "col"), -1.0, torch.zeros(6, dtype=torch.long)),
    )
    exchange = Symmetry("exchange", terms, 1)
    curves = {}
    for rebalance in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 10, bias=False)
        true = torch.randn(10, 6)
        plan = lrm.plan(model, "full", [lrm.Rule("weight", "row+col")])
        opt = lrm.AdamW(lrm.param_groups(model, plan), lr=3e-3, multiplier_weight_decay=0.0)
        generator = torch.Generator().manual_seed(1)
        curves[rebalance] = []
        for number in range(1, 2001):
            x = torch.randn(4, 6, generator=generator)
            target = x @ true.T + 3 * torch.randn(4, 10, generator=generator)
            (model(x) - target).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if number % 50 == 0:
                curves[rebalance].append(lrm.drift(opt, [exchange])[0].largest)
                if rebalance:
                    lrm.rebalance_(opt, [exchange])
    free = curves[False]
    assert free[9] < free[19] < free[29] < free[39]
    assert free[39] > 1.25 * free[9]
    assert max(curves[True]) < 0.25 * free[39]


# -- other ways to store a scale ------------------------------------------------------------------


class Stored(nn.Module):
    """Two channels in a row that trade: a matrix, a filter between all channels, 1 + a vector."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.gain = nn.Parameter(0.3 * torch.randn(4))
        self.filter = nn.Conv1d(4, 5, 3, bias=False)
        self.head = nn.Linear(5, 2, bias=False)

    def forward(self, x):
        hidden = (1 + self.gain) * self.first(x)
        return self.head(self.filter(hidden.mT).mT)


def stored_case(scale, dtype):
    torch.manual_seed(3)
    model = Stored().to(dtype)
    rules = [lrm.Rule("first|head", "row+col", scale=scale), lrm.Rule("filter", "none")]
    plan = lrm.plan(model, "full", rules)
    opt = lrm.AdamW(lrm.param_groups(model, plan), lr=1e-2)
    x = torch.randn(2, 9, 3, dtype=dtype)
    for _ in range(3):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    place(opt, model, scattered(plan, dtype, zeros=False))
    four, five = torch.arange(4), torch.arange(5)
    into = Term(Axis("filter.weight", "col"), -1.0, four)
    out = Term(Axis("filter.weight", "row"), 1.0, five)
    symmetries = [
        Symmetry("multiplicative", (Term(Axis("first.weight", "row"), 1.0, four), into), 4),
        Symmetry("multiplicative", (Term(Axis("gain", "one-plus"), 1.0, four), into), 4),
        Symmetry("multiplicative", (out, Term(Axis("head.weight", "col"), -1.0, five)), 5),
        # As a whole, rows and columns of a filter trade without a trace.
        Symmetry(
            "exchange",
            (
                Term(Axis("filter.weight", "row"), 1.0, torch.zeros(5, dtype=torch.long)),
                Term(Axis("filter.weight", "col"), -1.0, torch.zeros(4, dtype=torch.long)),
            ),
            1,
        ),
    ]
    return model, opt, x, symmetries


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_filters_shifted_vectors_and_logs_move_along(scale):
    model, opt, x, symmetries = stored_case(scale, torch.float64)
    before, state = model(x).detach(), state_of(opt)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    mults = lrm.multipliers(opt)
    assert largest_drift(opt, symmetries) > 0.3
    lrm.rebalance_(opt, symmetries)
    torch.testing.assert_close(model(x).detach(), before, **TOLERANCE[torch.float64])
    assert largest_drift(opt, symmetries) < DRIFT_ROUNDING[torch.float64]
    after = state_of(opt)
    factor = lrm.multipliers(opt)["first.weight"]["row"] / mults["first.weight"]["row"]
    for moment, degree in (("exp_avg", 1), ("exp_avg_sq", 2)):
        old, new = state["first.weight"][f"row_{moment}"], after["first.weight"][f"row_{moment}"]
        wanted = old if scale == "log" else old / factor**degree
        torch.testing.assert_close(new, wanted, **TOLERANCE[torch.float64])
        factors = (1 + model.gain.detach()) / (1 + weights["gain"])
        wanted = state["gain"][moment] / factors**degree
        torch.testing.assert_close(after["gain"][moment], wanted, **TOLERANCE[torch.float64])
        factors = model.filter.weight.detach() / weights["filter.weight"]
        wanted = state["filter.weight"][moment] / factors**degree
        torch.testing.assert_close(
            after["filter.weight"][moment], wanted, **TOLERANCE[torch.float64]
        )


def test_powers_of_two_that_would_round_raise():
    _, opt, _, symmetries = stored_case("log", torch.float32)
    with pytest.raises(ValueError, match="first.*by its logarithm.*leave out"):
        lrm.rebalance_(opt, symmetries[:1], powers_of_two=True)
    with pytest.raises(ValueError, match="gain.*as x - 1.*leave out"):
        lrm.rebalance_(opt, symmetries[1:2], powers_of_two=True)


def test_norms_that_use_one_plus_their_weight_are_moved_in_a_whole_model():
    model, _, opt = far_away("gemma2", "full")
    symmetries = symmetries_of("gemma2", "full")
    assert any(term.axis.kind == "one-plus" for one in symmetries for term in one.terms)
    before = logits(model)
    lrm.rebalance_(opt, symmetries)
    assert (logits(model) - before).abs().max() < LOGIT_ROUNDING * before.abs().max()
    assert largest_drift(opt, symmetries) < 1e-6


# -- what is refused ------------------------------------------------------------------------------


def test_scales_that_the_optimizer_does_not_train_raise_with_the_fix():
    model, plan, opt = far_away("llama", "full")
    everything = lrm.find_symmetries(model, None, EVERY_TOKEN)
    state = state_of(opt)
    for act in (lrm.drift, lrm.rebalance_):
        with pytest.raises(ValueError, match=r"lm_head.*find_symmetries\(model, plan, inputs\)"):
            act(opt, everything)
    wider = model_of("llama", intermediate_size=32)
    other = lrm.AdamW(lrm.param_groups(wider, lrm.plan(wider, "full")))
    with pytest.raises(ValueError, match="24 entries for .*proj.* 32: .*another size"):
        lrm.rebalance_(other, symmetries_of("llama", "full"))
    for name, kept in state_of(opt).items():
        assert all(torch.equal(value, state[name][key]) for key, value in kept.items())


def test_rows_that_carry_nothing_raise():
    model = model_of("falcon-h1")
    opt = OPTIMIZERS["adamw"](model, lrm.plan(model, "symmetry-aware"))
    name = "model.layers.0.mamba.in_proj.weight"
    rows = torch.zeros(model.get_parameter(name).shape[0], dtype=torch.long)
    term = Term(Axis(name, "row"), 1.0, rows)
    with pytest.raises(ValueError, match="in_proj.*carry no multiplier"):
        lrm.drift(opt, [Symmetry("normalization", (term,), 1)])


def test_a_write_from_outside_raises_before_anything_moves():
    model, _, opt = far_away("llama", "full")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    state = state_of(opt)
    with pytest.raises(RuntimeError, match="up_proj.*sync_from_model_"):
        lrm.rebalance_(opt, symmetries_of("llama", "full"))
    for name, kept in state_of(opt).items():
        assert all(torch.equal(value, state[name][key]) for key, value in kept.items())


def test_a_wrapped_optimizer_with_unknown_moments_raises_for_vectors_alone():
    model = model_of("llama")
    plan = lrm.plan(model, "full")
    opt = lrm.LearnableMultipliers(torch.optim.Adagrad(model.parameters(), lr=1e-2), model, plan)
    step(model, opt, 0)
    symmetries = symmetries_of("llama", "full")
    with pytest.raises(ValueError, match="'sum' for .*layernorm.*Leave out the symmetries"):
        lrm.rebalance_(opt, symmetries)
    matrices_alone = [
        one for one in symmetries if not any(term.axis.is_vector for term in one.terms)
    ]
    lrm.rebalance_(opt, matrices_alone)
    assert largest_drift(opt, matrices_alone) < DRIFT_ROUNDING[torch.float32]


def test_sharded_weights_are_measured_but_not_moved():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole, plan, opt = far_away("hand-written", "full")
    symmetries = symmetries_of("hand-written", "full")
    wanted = symmetry_positions(opt, symmetries)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = copy.deepcopy(whole)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        sharded = OPTIMIZERS["adamw"](model, plan)
        sharded.load_state_dict(copy.deepcopy(opt.state_dict()))
        for ours, theirs in zip(wanted, symmetry_positions(sharded, symmetries), strict=True):
            assert torch.equal(ours, theirs)
        with pytest.raises(NotImplementedError, match="is sharded.*in one process"):
            lrm.rebalance_(sharded, symmetries)
    finally:
        dist.destroy_process_group()


def test_document_quotes_the_results():
    root = Path(__file__).parent.parent
    text = (root / "docs" / "symmetries.md").read_text()
    for name in ("drift.json", "drift-far.json"):
        script, results = root / "benchmarks" / "drift.py", root / "results" / name
        command = [sys.executable, str(script), "--read", str(results)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert shown in text
