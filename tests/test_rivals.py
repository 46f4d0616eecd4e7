"""Rivals against their papers' formulas, in float64; `benchmarks/rivals.py` has the public code."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import learnable_multipliers as lrm
from learnable_multipliers.optim._batches import lr_factor
from learnable_multipliers.optim._orthogonalization import orthogonalize
from learnable_multipliers.pretrain.rivals.adamc import AdamC
from learnable_multipliers.pretrain.rivals.catalogue import RIVALS
from learnable_multipliers.pretrain.rivals.cautious import Cautious
from learnable_multipliers.pretrain.rivals.hyperball import Hyperball
from learnable_multipliers.pretrain.rivals.muown import Muown
from learnable_multipliers.pretrain.rivals.normuon import NorMuon
from learnable_multipliers.pretrain.rivals.rival import Rival
from learnable_multipliers.pretrain.rivals.sphere import Sphere
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, LLAMA, small_run

BETAS, MOMENTUM, DECAY, EPS = (0.9, 0.95), 0.95, 0.3, 1e-8
RATES = (0.01, 0.02, 0.02, 0.005)
SHAPES = ((7, 11), (13, 5), (7, 11))


def matrices():
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]


def gradients():
    draws = torch.Generator().manual_seed(1)
    return [
        [torch.randn(shape, dtype=torch.float64, generator=draws) for shape in SHAPES]
        for _ in RATES
    ]


def train(optimizer, weights):
    """Take a step at each of the rates."""
    for lr, grads in zip(RATES, gradients(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        optimizer.step()


def rival(kind, base, weights, role="hidden"):
    group = {"params": weights, "role": role, "weight_decay": DECAY}
    return kind([group], kind=base, lr=max(RATES), betas=BETAS, eps=EPS, momentum=MOMENTUM)


def adam(grads):
    """Return Adam's updates of a list of gradients."""
    m = v = 0.0
    for step, grad in enumerate(grads, start=1):
        m = BETAS[0] * m + (1 - BETAS[0]) * grad
        v = BETAS[1] * v + (1 - BETAS[1]) * grad**2
        corrected = m / (1 - BETAS[0] ** step), v / (1 - BETAS[1] ** step)
        yield corrected[0] / (corrected[1].sqrt() + EPS)


def orthogonal(grads):
    """Return Muon's orthogonalized momentum of a list of gradients."""
    momentum = 0.0
    for grad in grads:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * grad
        ahead = MOMENTUM * momentum + (1 - MOMENTUM) * grad
        yield orthogonalize(ahead[None], "quintic")[0]


def muon(grads):
    grads = list(grads)
    factor = lr_factor("match_rms_adamw", *grads[0].shape)
    return (factor * update for update in orthogonal(grads))


def even(grads):
    """Return NorMuon's updates of a list of gradients."""
    square = 0.0
    for update in orthogonal(grads):
        square = 0.95 * square + 0.05 * update.square().mean(1)
        rows = update / square.sqrt()[:, None]
        rows = rows * update.norm() / rows.norm()
        yield lr_factor("match_rms_adamw", *update.shape) * rows


def cautious(weight, update, lr, start):
    shrinks = torch.sign(update) == torch.sign(weight)
    return weight - lr * update - lr * DECAY * weight * shrinks


def corrected(weight, update, lr, start):
    return weight - lr * update - lr**2 / max(RATES) * DECAY * weight


def decayed(weight, update, lr, start):
    return weight - lr * update - lr * DECAY * weight


def on_ball(weight, update, lr, start):
    moved = weight - lr * start.norm() * update / update.norm()
    return start.norm() * moved / moved.norm()


def on_sphere(weight, update, lr, start):
    moved = weight - lr * update
    return start.norm() * moved / moved.norm()


@pytest.mark.parametrize(
    ("kind", "base", "updates", "step"),
    [
        (Rival, "adamw", adam, decayed),
        (Rival, "muon", muon, decayed),
        (Cautious, "adamw", adam, cautious),
        (Cautious, "muon", muon, cautious),
        (AdamC, "adamw", adam, corrected),
        (Hyperball, "adamw", adam, on_ball),
        (Hyperball, "muon", muon, on_ball),
        (Sphere, "adamw", adam, on_sphere),
        (Sphere, "muon", muon, on_sphere),
        (NorMuon, "muon", even, decayed),
    ],
)
def test_a_rival_takes_the_steps_of_its_formula(kind, base, updates, step):
    weights = matrices()
    expected = []
    for weight, grads in zip(weights, zip(*gradients(), strict=True), strict=True):
        start = now = weight.detach().clone()
        for lr, update in zip(RATES, updates(grads), strict=True):
            now = step(now, update, lr, start)
        expected.append(now)
    train(rival(kind, base, weights), weights)
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-7, atol=1e-9)


def test_muown_is_muon_and_adam_on_direction_and_magnitude():
    """Gradients of both by autograd, through W = g v / |v|."""
    weights = matrices()
    expected = []
    for weight, grads in zip(weights, zip(*gradients(), strict=True), strict=True):
        v = weight.detach().clone().requires_grad_()
        g = v.detach().norm(dim=1, keepdim=True).requires_grad_()
        momentum, split = 0.0, []
        for lr, grad in zip(RATES, grads, strict=True):
            effective = g * v / v.norm(dim=1, keepdim=True)
            grad_g, grad_v = torch.autograd.grad((effective * grad).sum(), (g, v))
            split.append(grad_g)
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * grad_v
            turned = orthogonalize(momentum[None], "quintic")[0]
            *_, magnitude = adam(split)
            with torch.no_grad():
                v -= lr * lr_factor("match_rms_adamw", *v.shape) * turned
                g.copy_((g - lr * magnitude) * (1 - lr * DECAY))
        expected.append((g * v / v.norm(dim=1, keepdim=True)).detach())
    train(rival(Muown, "muon", weights), weights)
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [AdamC, Hyperball, Sphere, NorMuon, Muown])
def test_a_rival_leaves_the_head_to_adamw(kind):
    weights, plain = matrices(), matrices()
    for weight, other in zip(weights, plain, strict=True):
        other.data.copy_(weight.data)
    train(rival(kind, "muon", weights, role="head"), weights)
    adamw = torch.optim.AdamW(plain, betas=BETAS, eps=EPS, weight_decay=DECAY)
    train(adamw, plain)
    for weight, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(weight, other)


STEPS = [
    *((kind, base) for kind in (Rival, Cautious, Hyperball, Sphere) for base in ("adamw", "muon")),
    (AdamC, "adamw"),
    (NorMuon, "muon"),
    (Muown, "muon"),
]


@pytest.mark.parametrize(("kind", "base"), STEPS)
def test_weights_that_miss_gradients_train_as_if_each_were_alone(kind, base):
    together, alone = matrices(), matrices()
    for weight, other in zip(together, alone, strict=True):
        other.data.copy_(weight.data)
    optimizers = [rival(kind, base, weights) for weights in (together, *([w] for w in alone))]
    for step, grads in enumerate(gradients()):
        for place, grad in enumerate(grads):
            # The first has all gradients; the last, of its shape, misses the first and the third.
            missing = (place + step) % 2 == 0 and place > 0
            for weights in (together, alone):
                weights[place].grad = None if missing else grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for weight, other in zip(together, alone, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-9, atol=1e-12)


class Launches(TorchDispatchMode):
    """Names what a GPU would be given to do: all operations but views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("kind", "base"), STEPS)
def test_a_step_of_more_layers_is_no_more_launches(kind, base):
    """Nor does it wait for a number from the device."""
    seen = []
    for layers in (1, 5):
        shapes = {"hidden": SHAPES * layers, "head": [(17, 11)], "vector": [(11,)] * layers}
        groups = [
            {
                "params": [nn.Parameter(torch.randn(shape)) for shape in each],
                "role": role,
                "weight_decay": DECAY,
            }
            for role, each in shapes.items()
        ]
        optimizer = kind(groups, kind=base, lr=0.01)
        for group in groups:
            for weight in group["params"]:
                weight.grad = torch.randn_like(weight)
        # State is made in the first step.
        optimizer.step()
        with Launches() as launches:
            optimizer.step()
        seen.append(launches.names)
    assert seen[0] == seen[1]
    assert not any("_local_scalar_dense" in name for name in seen[0])


@pytest.mark.parametrize("base", ["adamw", "muon"])
def test_a_sphere_with_multipliers_is_magnitude_direction_decoupling(base):
    """W = row W^ col: the direction by its own step, both magnitudes by Adam without decay."""
    model = nn.Linear(11, 7, bias=False, dtype=torch.float64)
    start = hat = model.weight.detach().clone()
    row = torch.ones(7, dtype=torch.float64)
    col = torch.ones(11, dtype=torch.float64)
    seen = {"hat": [], "row": [], "col": []}
    grads = [each[0] for each in gradients()]
    for lr, grad in zip(RATES, grads, strict=True):
        seen["hat"].append(row[:, None] * col * grad)
        seen["row"].append((hat * col * grad).sum(1))
        seen["col"].append((hat * row[:, None] * grad).sum(0))
        *_, update = (adam if base == "adamw" else muon)(seen["hat"])
        hat = on_sphere(hat, update, lr, start)
        (*_, by_row), (*_, by_col) = adam(seen["row"]), adam(seen["col"])
        row, col = row - lr * by_row, col - lr * by_col
    optimizer = lrm.LearnableMultipliers(
        rival(Sphere, base, [model.weight]),
        model,
        lrm.plan(model, "full"),
        multiplier_lr_scale=1.0,
        multiplier_weight_decay=0.0,
        multiplier_betas=BETAS,
    )
    for lr, grad in zip(RATES, grads, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        model.weight.grad = grad.clone()
        optimizer.step()
    expected = row[:, None] * hat * col
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=1e-8)


# -- in the trainer ----------------------------------------------------------------------------


def configured(data, out, *, model=LLAMA, steps=6, **optimizer):
    config = small_run(data, out, steps=steps, model=model)
    return replace(config, optimizer=replace(config.optimizer, **optimizer))


CASES = [
    ("adamw", "cautious", "none"),
    ("adamw", "adamc", "none"),
    ("adamw", "hyperball", "none"),
    ("muon", "sphere", "full"),
    ("muon", "normuon", "full"),
    ("muon", "muown", "none"),
]


def test_every_rival_has_a_case():
    assert {variant for _, variant, _ in CASES} == set(RIVALS)


@pytest.mark.parametrize(("kind", "variant", "placement"), CASES)
def test_a_run_with_a_rival_resumes_bit_for_bit(data, tmp_path, kind, variant, placement):
    settings = {"kind": kind, "variant": variant, "placement": placement}
    whole = Trainer(configured(data, tmp_path / "whole", **settings))
    whole.train()
    cut = configured(data, tmp_path / "cut", **settings)
    trainer = Trainer(cut)
    for step in trainer.steps():
        if step == 3:
            trainer.save()
            break
    trainer.close()
    resumed = Trainer(replace(cut, resume=True))
    assert resumed.step == 3
    resumed.train()
    weights = dict(resumed.model.named_parameters())
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, weights[name]), name
    ends = [trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed)]
    assert ends[0].keys() == ends[1].keys()
    for index, state in ends[0].items():
        assert state.keys() == ends[1][index].keys()
        assert all(torch.equal(value, ends[1][index][name]) for name, value in state.items())


def test_the_ball_keeps_hidden_matrices_alone_at_their_norms(data, tmp_path):
    trainer = Trainer(
        configured(data, tmp_path / "run", variant="hyperball", placement="none", lr=1e-2)
    )
    before = {name: p.detach().norm().item() for name, p in trainer.model.named_parameters()}
    trainer.train()
    after = {name: p.detach().norm().item() for name, p in trainer.model.named_parameters()}
    hidden = [name for name in before if "proj" in name]
    assert hidden
    for name in hidden:
        assert math.isclose(before[name], after[name], rel_tol=1e-5)
    assert not math.isclose(before["lm_head.weight"], after["lm_head.weight"], rel_tol=1e-3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"variant": "adamc", "kind": "muon"}, "changes adamw, not muon: set optimizer.kind"),
        ({"variant": "normuon"}, "changes muon, not adamw"),
        ({"variant": "muown", "kind": "muon"}, "learns magnitudes of rows itself"),
        ({"variant": "cautious", "norm_scale": {"head": 2.0}}, "of its own"),
        ({"variant": "cautious", "adamw_lr_scale": 1e4}, "decay a weight to zero"),
    ],
)
def test_what_a_rival_cannot_train_is_rejected_in_words(data, tmp_path, settings, says):
    with pytest.raises(ValueError, match=says):
        Trainer(configured(data, tmp_path / "run", **settings))


def test_a_rival_does_not_take_several_matrices_for_one(data, tmp_path):
    config = configured(data, tmp_path / "run", model=HYBRID, variant="cautious")
    with pytest.raises(ValueError, match="in_proj.weight is several matrices in one"):
        Trainer(config)
