"""LearnableMultipliers around optimizers that know nothing of multipliers."""

import copy
import io
import pickle

import pytest
import torch
from lion_pytorch import Lion
from prodigyopt import Prodigy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import learnable_multipliers as lrm
from paths import BETAS, DECAY, EPS, KINDS, MULTIPLIER_DECAY, Toy, optimizer_run, toy_plan
from test_adamw import LR, SCALE, ours


def take_step(model, optimizer, step):
    """Take a step on the tokens of its number."""
    ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(step))
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class SignDescent(torch.optim.Optimizer):
    """Makes its state in its constructor, and writes its step from scratch."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = torch.zeros(())

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])
                    self.state[p]["seen"] += 1


class DualAveraging(torch.optim.Optimizer):
    """As timm's MADGRAD: its step rounds weights even at rate 0 with zero gradients."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(x0=p.clone(), s=torch.zeros_like(p))
                state["s"].add_(p.grad, alpha=group["lr"])
                p.mul_(0.9).add_(state["x0"] - state["s"], alpha=0.1)


def grouped(model, plan):
    """Groups as a user would write them, decaying what the plan calls a matrix."""
    vectors = {entry.name for entry in plan.entries if entry.vector}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if n not in vectors], "weight_decay": DECAY},
        {"params": [p for n, p in named if n in vectors], "weight_decay": 0.0},
    ]


def wrapped(max_norm=None):
    def make(model, plan):
        return lrm.LearnableMultipliers(
            torch.optim.AdamW(grouped(model, plan), lr=LR, betas=BETAS, eps=EPS),
            model,
            plan,
            multiplier_betas=BETAS,
            multiplier_eps=EPS,
            multiplier_lr_scale=SCALE,
            multiplier_weight_decay=MULTIPLIER_DECAY,
            max_grad_norm=max_norm,
        )

    return make


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_around_torch_adamw_it_equals_our_adamw(kind, max_norm):
    mine, plan, fused = optimizer_run(kind, torch.float64, ours(max_norm))
    other, _, around = optimizer_run(kind, torch.float64, wrapped(max_norm))
    for name, p in mine.named_parameters():
        q = other.get_parameter(name)
        torch.testing.assert_close(q, p, rtol=1e-11, atol=1e-11)
        for key, value in fused.state[p].items():
            if key in around.state[q] and key != "step":
                torch.testing.assert_close(around.state[q][key], value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(around.grad_norm, fused.grad_norm, rtol=1e-10, atol=1e-12)


class DataDescent(torch.optim.Optimizer):
    """Puts a new tensor in place of each parameter's own, as published code does."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class ListDescent(torch.optim.Optimizer):
    """Keeps a list of its parameters from its constructor."""

    def __init__(self, params, lr, through_data):
        super().__init__(params, {"lr": lr})
        self.through_data = through_data
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        for p in self.all:
            if p.grad is not None:
                weight = p.data if self.through_data else p
                weight.sub_(p.grad, alpha=self.param_groups[0]["lr"])


OPTIMIZERS = {
    "data": DataDescent,
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "sign": SignDescent,
    "lion-pytorch": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "prodigyopt": lambda p: Prodigy(p, lr=1.0, weight_decay=0.01),
}


def explicit_run(make, model, plan, steps, scale=1.0):
    """The explicit path: the same optimizer on raw weights, AdamW on multipliers."""
    lrm.reparametrize(model, plan)
    groups = lrm.param_groups(model, plan)
    mults = [p for g in groups if g["kind"] == "multiplier" for _, p in g["params"]]
    rest = [p for g in groups if g["kind"] != "multiplier" for _, p in g["params"]]
    inner = make(rest)
    lr = inner.param_groups[0]["lr"] * scale
    adamw = torch.optim.AdamW(mults, lr=lr, betas=(0.9, 0.95), weight_decay=2e-3)
    for ids in steps:
        loss = model(ids).square().mean()
        loss.backward()
        for optimizer in (inner, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_around_any_optimizer_it_equals_the_explicit_path(name):
    torch.manual_seed(0)
    model = Toy().double()
    plan = toy_plan(model, "row+col")
    other = copy.deepcopy(model)
    steps = [torch.randint(0, 13, (2, 7)) for _ in range(8)]
    inner = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    # Prodigy finds its own rate and calls it 1.
    scale = 1e-3 if name == "prodigyopt" else 1.0
    optimizer = lrm.LearnableMultipliers(inner, model, plan, multiplier_lr_scale=scale)
    for ids in steps:
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = lrm.merge(explicit_run(OPTIMIZERS[name], other, plan, steps, scale))
    for key, p in model.named_parameters():
        torch.testing.assert_close(p, merged.get_parameter(key), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("through_data", [False, True])
def test_an_optimizer_that_keeps_a_list_of_its_parameters_raises(through_data):
    torch.manual_seed(0)
    model = Toy()
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = ListDescent(trained, 0.0, through_data)
    optimizer = lrm.LearnableMultipliers(
        inner, model, toy_plan(model, "row+col"), multiplier_lr_scale=1.0
    )
    ids = torch.randint(0, 13, (2, 7))
    model(ids).square().mean().backward()
    # At the rate of 0 that warm-up starts with there is nothing to see through `.data`.
    if through_data:
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    with pytest.raises(RuntimeError, match=r"ListDescent wrote to .* of the model"):
        optimizer.step()


def test_a_step_of_the_wrapped_optimizer_alone_raises():
    model = Toy().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    around = lrm.LearnableMultipliers(optimizer, model, lrm.plan(model))
    before = copy.deepcopy(model.state_dict())
    for steps in (0, 1):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(
            RuntimeError, match=r"the SGD inside .* call step\(\) and zero_grad\(\)"
        ):
            optimizer.step()
        if not steps:
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        around.step()


def test_an_optimizer_that_could_not_be_wrapped_still_steps_by_itself():
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match="multiplier_weight_decay must be"):
        lrm.LearnableMultipliers(optimizer, model, lrm.plan(model), multiplier_weight_decay=-1.0)
    before = model.mix.detach().clone()
    model.mix.grad = torch.ones_like(model.mix)
    optimizer.step()
    torch.testing.assert_close(model.mix.detach(), before - LR)


def test_an_optimizer_that_needs_a_closure_raises():
    model = Toy()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS computes the loss again"):
        lrm.LearnableMultipliers(optimizer, model, lrm.plan(model))


class RelativeSteps(torch.optim.Optimizer):
    """As transformers' Adafactor: without a learning rate by default."""

    def __init__(self, params, lr=None):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        return None


def test_an_optimizer_without_a_learning_rate_raises_and_names_the_argument():
    model = Toy()
    message = r"the lr of RelativeSteps is None .* give it lr=\.\.\. and relative_step=False"
    with pytest.raises(ValueError, match=message):
        lrm.LearnableMultipliers.from_model(RelativeSteps, model)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": others}]
    for scale in (None, 1.0):
        with pytest.raises(ValueError, match=message):
            lrm.LearnableMultipliers(
                RelativeSteps(groups), model, lrm.plan(model), multiplier_lr_scale=scale
            )
    lrm.LearnableMultipliers.from_model(RelativeSteps, model, lr=0.1)


def test_state_made_before_wrapping_has_the_precision_of_the_raw_weights():
    """Adagrad makes its sums in its constructor, in the dtype of the model's weights."""
    start = torch.linspace(-1, 1, 12).view(3, 4).bfloat16()
    model = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    model.weight.data.copy_(start)
    plan = lrm.plan(model, "none")
    around = lrm.LearnableMultipliers(torch.optim.Adagrad(model.parameters(), LR), model, plan)
    master = start.float().requires_grad_()
    expected = torch.optim.Adagrad([master], LR)
    # Squares of 1 stop adding up in bfloat16 at 256.
    for _ in range(300):
        model.weight.grad = torch.ones_like(model.weight)
        master.grad = torch.ones_like(master)
        around.step()
        expected.step()
    assert torch.equal(lrm.optim.raw_weights(around)["weight"], master)


def test_a_state_can_be_loaded_again_after_training_from_it():
    model = Toy()
    around = lrm.LearnableMultipliers.from_model(torch.optim.AdamW, model, lr=LR)

    def step():
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        around.step()

    step()
    saved = copy.deepcopy((model.state_dict(), around.state_dict()))
    expected = copy.deepcopy(saved[1])
    for _ in range(2):
        model.load_state_dict(saved[0])
        around.load_state_dict(saved[1])
        step()
    for index, kept in expected["state"].items():
        for key, value in kept.items():
            assert torch.equal(saved[1]["state"][index][key], value), key


def dual_averaging(placement, steps, state=None, weights=None):
    """Return a model and its optimizer after some steps, from a start or from a checkpoint."""
    torch.manual_seed(0)
    model = Toy()
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = DualAveraging(model.parameters())
    if placement is not None:
        optimizer = lrm.LearnableMultipliers(optimizer, model, lrm.plan(model, placement))
    if state is not None:
        before = copy.deepcopy(model.state_dict())
        optimizer.load_state_dict(state)
        if placement is not None:
            lrm.multipliers(optimizer)
        assert same_bits(model.state_dict(), before)
    for step in steps:
        take_step(model, optimizer, step)
    return model, optimizer


def same_bits(state, other):
    return all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize("placement", ["none", "full"])
def test_reading_the_state_of_an_optimizer_that_rounds_at_rate_zero_keeps_the_weights(placement):
    torch.manual_seed(0)
    before = copy.deepcopy(Toy().state_dict())
    model, optimizer = dual_averaging(placement, [])
    lrm.multipliers(optimizer)
    raw = {name: value.clone() for name, value in optimizer.raw_weights().items()}
    optimizer.state_dict()
    assert same_bits(model.state_dict(), before)
    assert same_bits(optimizer.raw_weights(), raw)
    take_step(model, optimizer, 0)
    assert same_bits(model.state_dict(), dual_averaging(placement, range(1))[0].state_dict())


@pytest.mark.parametrize("placement", [None, "none", "full"])
@pytest.mark.parametrize("saved_after", [0, 3])
def test_an_optimizer_that_rounds_at_rate_zero_resumes_bit_for_bit(placement, saved_after):
    model, optimizer = dual_averaging(placement, range(saved_after))
    if placement is not None:
        lrm.multipliers(optimizer)
    saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    resumed, _ = dual_averaging(placement, range(saved_after, 6), *saved)
    straight, _ = dual_averaging(placement, range(6))
    assert same_bits(resumed.state_dict(), straight.state_dict())
    if placement == "none":
        bare, _ = dual_averaging(None, range(6))
        assert same_bits(resumed.state_dict(), bare.state_dict())


def test_around_torch_muon():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 6, bias=False)
    )
    plan = lrm.plan(model, "full")
    other = copy.deepcopy(model)
    inner = torch.optim.Muon(model.parameters(), lr=1e-2)
    optimizer = lrm.LearnableMultipliers(inner, model, plan, multiplier_lr_scale=1.0)
    steps = [torch.randn(4, 6) for _ in range(5)]
    for x in steps:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = lrm.merge(explicit_run(lambda p: torch.optim.Muon(p, lr=1e-2), other, plan, steps))
    # torch's Muon rounds to bfloat16 inside, so equal inputs to rounding give 2e-3 at most.
    for key, p in model.named_parameters():
        torch.testing.assert_close(p, expected.get_parameter(key), rtol=0, atol=2e-3)


def test_state_of_both_survives_saving():
    torch.manual_seed(0)
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = Toy().bfloat16()
        plan = toy_plan(model, "row+col")

        def fresh(model=model, plan=plan):
            inner = Lion([p for p in model.parameters() if p.requires_grad], weight_decay=0.1)
            return lrm.LearnableMultipliers(inner, model, plan, max_grad_norm=1.0)

        optimizer = fresh()
        for step in range(6):
            if interrupted and step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = fresh()
                optimizer.load_state_dict(saved)
            take_step(model, optimizer, step)
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def momentum(params, **settings):
    return torch.optim.SGD(params, momentum=0.9, **settings)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, Lion, Prodigy, torch.optim.SGD, momentum])
def test_distributed_checkpoints_see_the_state_of_both(make, flat):
    """Save the way of torch.distributed.checkpoint: into the state of a fresh optimizer."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = Toy()
        plan = toy_plan(model, "row+col")

        def fresh(model=model, plan=plan):
            inner = make([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            return lrm.LearnableMultipliers(inner, model, plan, max_grad_norm=1.0)

        optimizer = fresh()
        if interrupted:
            # Looking at a fresh optimizer leaves no trace.
            get_optimizer_state_dict(model, optimizer, options=options)
        for step in range(10):
            if interrupted and step == 5:
                saved = get_optimizer_state_dict(model, optimizer, options=options)
                saved = copy.deepcopy(saved)
                seen = get_optimizer_state_dict(model, fresh(), options=options)
                # A parameter without gradients has state in the fresh one alone, as in torch.
                if flat:
                    assert seen.keys() >= {key for key in saved if key.startswith("state.")}
                else:
                    for name, state in saved["state"].items():
                        assert seen["state"][name].keys() >= state.keys()
                # Another fresh one, whose state was not read.
                optimizer = fresh()
                set_optimizer_state_dict(model, optimizer, saved, options=options)
            take_step(model, optimizer, step)
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "lr", "scale"),
    [
        (torch.optim.AdamW, 3e-3, 1.0),
        (torch.optim.RMSprop, 1e-2, 1.0),
        (Lion, 1e-4, 1.0),
        (torch.optim.SGD, 0.1, 1e-2),
        (torch.optim.Adadelta, 1.0, 1e-3),
        (Prodigy, 1.0, 1e-3),
        (SignDescent, 1e-2, 0.1),
    ],
)
def test_multipliers_do_not_train_at_a_rate_in_other_units_than_adamws(make, lr, scale):
    rates = []
    for given in ({}, {"multiplier_lr_scale": scale}):
        torch.manual_seed(0)
        model = Toy().double()
        inner = make([p for p in model.parameters() if p.requires_grad], lr=lr)
        optimizer = lrm.LearnableMultipliers(inner, model, toy_plan(model, "row+col"), **given)
        model(torch.arange(12).view(2, 6)).square().mean().backward()
        optimizer.step()
        # The first step of AdamW is as long as its rate, beside a decay of 2e-3 of it.
        row = lrm.multipliers(optimizer)["mix"]["row"]
        assert row.sub(1).abs().max().item() == pytest.approx(lr * scale, rel=3e-3)
        rates.append(row)
    assert torch.equal(*rates)


def test_multipliers_of_every_group_start_at_one_rate_and_follow_schedulers():
    torch.manual_seed(0)
    model = Toy()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if n == "mix"], "lr": 0.5},
        {"params": [p for n, p in named if n != "mix"]},
    ]
    inner = torch.optim.SGD(groups, lr=0.1)
    # Starts at 0, which is not the rate that is meant.
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda count: count / 4)
    optimizer = lrm.LearnableMultipliers(inner, model, toy_plan(model, "row+col"))
    rates = []
    for _ in range(3):
        rates.append([g["lr"] * g["multiplier_lr_scale"] for g in optimizer.param_groups])
        model(torch.arange(12).view(2, 6)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    # Ours are as of the last step.
    assert rates == [pytest.approx([r, r]) for r in (0.0, 0.0, 0.25e-3)]
    with pytest.raises(ValueError, match="SGD has a learning rate of 0, .* multiplier_lr_scale"):
        lrm.LearnableMultipliers(torch.optim.SGD(model.parameters(), lr=0.0), model, optimizer.plan)


def around(inner, steps=0, **settings):
    torch.manual_seed(0)
    model = Toy()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = lrm.LearnableMultipliers(
        inner(trained, lr=1e-2, **settings), model, toy_plan(model, "row+col")
    )
    for step in range(steps):
        take_step(model, optimizer, step)
    return model, optimizer


OTHER_CLASSES = {
    "Adam to SGD": (torch.optim.Adam, torch.optim.SGD, {"momentum": 0.9}),
    "SGD to Adam": (torch.optim.SGD, torch.optim.Adam, {}),
    "Adam to Adamax": (torch.optim.Adam, torch.optim.Adamax, {}),
    "Adam to RMSprop": (torch.optim.Adam, torch.optim.RMSprop, {}),
}


@pytest.mark.parametrize("case", OTHER_CLASSES)
def test_a_state_of_another_wrapped_class_raises_before_anything_changes(case):
    one, other, settings = OTHER_CLASSES[case]
    saved = around(one, 3)[1].state_dict()
    why = f"saved by a wrapped {one.__name__}, and this wraps {other.__name__}"
    (model, optimizer), (straight, expected) = (around(other, 2, **settings) for _ in range(2))
    with pytest.raises(ValueError, match=why):
        optimizer.load_state_dict(saved)
    for made, trained in ((optimizer, model), (expected, straight)):
        trained(torch.arange(12).view(2, 6)).square().mean().backward()
        made.step()
    assert str(optimizer) == str(expected)
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_state_that_lacks_entries_of_the_wrapped_optimizer_raises():
    saved = around(torch.optim.SGD, 3)[1].state_dict()
    with pytest.raises(ValueError, match=r"no momentum_buffer, .* saved with other settings"):
        around(momentum)[1].load_state_dict(saved)
    # torch takes what to load from the state of an optimizer that has some.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(*around(momentum, 3), options=flat)
    model, optimizer = around(momentum)
    lrm.multipliers(optimizer)
    with pytest.raises(ValueError, match=r"no momentum_buffer, .* Or it was flattened"):
        set_optimizer_state_dict(model, optimizer, saved, options=flat)


def test_schedulers_move_the_wrapped_optimizer():
    model = Toy()
    plan = toy_plan(model, "row+col")
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    optimizer = lrm.LearnableMultipliers(inner, model, plan)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(3):
        model(torch.randint(0, 13, (2, 7))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("scheduled", ["inner", "inner before wrapping", "inner of a copy"])
def test_a_scheduler_on_the_wrapped_optimizer_moves_multipliers_too(scheduled):
    runs = []
    for where in ("wrapper", scheduled):
        torch.manual_seed(0)
        model = Toy().double()
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scheduler = None

        def schedule(optimizer):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: count / 4)

        if where == "inner before wrapping":
            scheduler = schedule(inner)
        optimizer = lrm.LearnableMultipliers(
            inner, model, toy_plan(model, "row+col"), multiplier_lr_scale=0.5
        )
        if where == "inner of a copy":
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
        chosen = optimizer if where == "wrapper" else optimizer.inner
        scheduler = scheduler or schedule(chosen)
        seen = []
        for step in range(6):
            take_step(model, optimizer, step)
            scheduler.step()
            mine = optimizer.state_dict()["param_groups"][0]["lr"]
            seen.append((mine, lrm.multipliers(optimizer)["mix"]["row"]))
        runs.append((seen, lrm.optim.raw_weights(optimizer)["mix"]))
    # Nothing moves at the rate of 0 that warm-up starts with.
    assert torch.equal(runs[0][0][0][1], torch.ones_like(runs[0][0][0][1]))
    for (lr, row), (other_lr, other_row) in zip(runs[0][0], runs[1][0], strict=True):
        assert lr == other_lr
        assert torch.equal(row, other_row)
    assert torch.equal(runs[0][1], runs[1][1])


def test_foreign_parameters_and_rates_in_the_plan_raise():
    model = Toy()
    with pytest.raises(ValueError, match="not the model's"):
        lrm.LearnableMultipliers(
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), model, toy_plan(model, "row")
        )
    plan = lrm.plan(model, "full", [lrm.Rule("out", lr_scale=2.0), lrm.Rule("mix", role="down")])
    with pytest.raises(ValueError, match="learning rate or decay of its own"):
        lrm.LearnableMultipliers(torch.optim.SGD(model.parameters(), lr=1.0), model, plan)


def test_gradients_and_settings_outlive_a_wrapped_step():
    model = Toy()
    plan = toy_plan(model, "row+col")
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer = lrm.LearnableMultipliers(inner, model, plan, max_grad_norm=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=10)
    model(torch.randint(0, 13, (2, 7))).square().mean().backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    scheduler.step()
    for name, grad in before.items():
        assert torch.equal(model.get_parameter(name).grad, grad), name
    optimizer.sync_from_model_()
    optimizer.step()
    assert inner.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    with pytest.raises(ValueError, match="before wrapping it"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def by_hand(factor):
    """Return a stand-in for a scheduler: a loop that writes the rate itself."""

    def make(optimizer):
        class Loop:
            count = 0

            def step(self):
                self.count += 1
                for group in optimizer.param_groups:
                    group["lr"] = 0.5 * factor(self.count)

        for group in optimizer.param_groups:
            group["lr"] = 0.5 * factor(0)
        return Loop()

    return make


scheduled = torch.optim.lr_scheduler
SCHEDULES = {
    "constant": ({"lr": 0.5}, by_hand(lambda count: 1.0)),
    "OneCycleLR": ({}, lambda o: scheduled.OneCycleLR(o, max_lr=0.5, total_steps=8)),
    "warmup by LambdaLR": (
        {"lr": 0.5},
        lambda o: scheduled.LambdaLR(o, lambda count: min(1.0, count / 4)),
    ),
    "warmup by hand": ({"lr": 0.5}, by_hand(lambda count: min(1.0, count / 4))),
    "a rate set by hand": ({}, by_hand(lambda count: 1 - count / 16)),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_multipliers_around_sgd_peak_at_their_own_rate_under_any_schedule(name, inside):
    settings, schedule = SCHEDULES[name]
    torch.manual_seed(0)
    model = Toy()
    plan = toy_plan(model, "row+col")
    optimizer = lrm.LearnableMultipliers.from_model(
        torch.optim.SGD, model, plan, momentum=0.9, **settings
    )
    scheduler = schedule(optimizer.inner if inside else optimizer)
    rates = []
    for step in range(8):
        take_step(model, optimizer, step)
        (group, *_) = optimizer.param_groups
        rates.append((group["lr"], group["lr"] * group["multiplier_lr_scale"]))
        if step < 7:
            scheduler.step()
    assert max(lr for lr, _ in rates) == pytest.approx(0.5, rel=0.05)
    assert max(rate for _, rate in rates) == pytest.approx(1e-3, rel=0.05)
    # In proportion to the rate of raw weights throughout.
    assert all(rate == pytest.approx(lr * 1e-3 / 0.5) for lr, rate in rates)


def test_a_given_multiplier_lr_scale_is_not_changed():
    torch.manual_seed(0)
    model = Toy()
    plan = toy_plan(model, "row+col")
    runs = {}
    for name in ("set", "given", "loaded"):
        given = {"multiplier_lr_scale": 0.25} if name == "given" else {}
        optimizer = lrm.LearnableMultipliers.from_model(torch.optim.SGD, model, plan, **given)
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.5, total_steps=8, cycle_momentum=False
        )
        if name == "set":
            optimizer.param_groups[0]["multiplier_lr_scale"] = 0.25
        if name == "loaded":
            optimizer.load_state_dict(runs["given"])
        take_step(model, optimizer, 0)
        assert optimizer.param_groups[0]["multiplier_lr_scale"] == 0.25
        runs[name] = copy.deepcopy(optimizer.state_dict())


def test_a_scale_derived_at_the_first_step_is_resumed_and_copied():
    model, optimizer = around(torch.optim.SGD, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=9)
    for step in range(3):
        take_step(model, optimizer, step)
        scheduler.step()
    copies = copy.deepcopy((model, optimizer))
    other, again = around(torch.optim.SGD, momentum=0.9)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), copies, (other, again)):
        take_step(each, its, 3)
        scales = [group["multiplier_lr_scale"] for group in its.param_groups]
        assert scales == [pytest.approx(1e-3 / 0.5)]
        assert torch.equal(each.mix, model.mix)


def test_a_schedule_that_raises_multiplier_rates_far_too_high_warns_once():
    """CyclicLR keeps the rate that it will reach to itself."""
    model, optimizer = around(torch.optim.SGD, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CyclicLR(
        optimizer, base_lr=1e-3, max_lr=0.5, step_size_up=4
    )
    take_step(model, optimizer, 0)
    scheduler.step()
    with pytest.warns(UserWarning, match=r"multipliers train at a learning rate of 0\.13 now"):
        take_step(model, optimizer, 1)
    take_step(model, optimizer, 2)


def test_an_optimizer_made_from_the_groups_of_a_plan_can_be_wrapped():
    models = [Toy() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plan = lrm.plan(models[0])
    inner = torch.optim.AdamW(lrm.param_groups(models[0], plan, weight_decay=0.1), lr=1e-2)
    wrapped = lrm.LearnableMultipliers(inner, models[0], plan)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999)}
    other = lrm.LearnableMultipliers.from_model(torch.optim.AdamW, models[1], **settings)
    for step in range(2):
        for model, optimizer in zip(models, (wrapped, other), strict=True):
            take_step(model, optimizer, step)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    buffer = io.BytesIO()
    torch.save(wrapped.state_dict(), buffer)
    buffer.seek(0)
    wrapped.load_state_dict(torch.load(buffer, weights_only=True))
