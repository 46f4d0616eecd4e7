"""Settings without effect raise; nothing trains without multipliers unless the plan says so."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import learnable_multipliers as lrm
from learnable_multipliers import Rule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)

    def forward(self, ids):
        hidden = self.embed(ids)
        return hidden + self.down(torch.relu(self.norm(self.up(hidden))))


IDS = torch.arange(11)


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -- a plan, or an error ------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_parameters_without_a_plan_raise_and_name_from_model(cls):
    model = net()
    for params in (model.parameters(), model.named_parameters(), [{"params": model.parameters()}]):
        with pytest.raises(ValueError, match=rf"lrm\.{cls.__name__}\.from_model\(model\)"):
            cls(params, lr=1e-2)


def test_zero_redundancy_optimizer_raises():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="without a plan"):
            ZeroRedundancyOptimizer(net().parameters(), optimizer_class=lrm.AdamW, lr=1e-2)
    finally:
        torch.distributed.destroy_process_group()


def test_a_plan_without_multipliers_is_torch_adamw():
    ours, theirs = net(torch.float64), net(torch.float64)
    optimizer = lrm.AdamW.from_model(ours, "none", lr=1e-2, weight_decay=0.0)
    assert lrm.multipliers(optimizer) == {}
    train(ours, optimizer, 5)
    train(theirs, torch.optim.AdamW(theirs.parameters(), 1e-2, (0.9, 0.95), weight_decay=0.0), 5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


# -- one call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_from_model_is_plan_and_groups_in_one_call(cls):
    one, other = net(), net()
    settings = {"lr": 1e-2, "multiplier_lr_scale": 4.0, "max_grad_norm": 0.5}
    rules = [Rule("up", "row")]
    train(one, cls.from_model(one, "full", rules=rules, weight_decay=0.3, **settings), 4)
    groups = lrm.param_groups(other, lrm.plan(other, "full", rules), weight_decay=0.3)
    train(other, cls(groups, **settings), 4)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_from_model_takes_a_plan_but_no_rules_beside_it():
    model = net()
    plan = lrm.plan(model, "scalar")
    assert lrm.AdamW.from_model(model, plan).plan is plan
    with pytest.raises(ValueError, match=r"give them to lrm\.plan"):
        lrm.AdamW.from_model(model, plan, rules=[Rule("up", "row")])
    lrm.reparametrize(model, plan)
    with pytest.raises(ValueError, match=r"lrm\.merge"):
        lrm.AdamW.from_model(model)


def test_wrapped_optimizers_have_one_call_too():
    one, other = net(torch.float64), net(torch.float64)
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    train(one, lrm.LearnableMultipliers.from_model(torch.optim.SGD, one, "full", **sgd), 4)
    plan = lrm.plan(other, "full")
    matrices = [p for p in other.parameters() if p.dim() == 2]
    vectors = [p for p in other.parameters() if p.dim() == 1]
    inner = torch.optim.SGD([{"params": matrices}, {"params": vectors, "weight_decay": 0}], **sgd)
    train(other, lrm.LearnableMultipliers(inner, other, plan), 4)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


# -- arguments reach their target or raise --------------------------------------------------------


def test_multiplier_settings_given_to_param_groups_reach_the_optimizer():
    one, other = net(), net()
    settings = {"multiplier_lr_scale": 7.0, "multiplier_weight_decay": 0.5}
    train(one, lrm.AdamW(lrm.param_groups(one, lrm.plan(one), **settings), lr=1e-2), 3)
    train(other, lrm.AdamW(lrm.param_groups(other, lrm.plan(other)), lr=1e-2, **settings), 3)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "setting", [{"weight_decay": 0.7}, {"lr": 0.7}, {"multiplier_lr_scale": 0.7}]
)
def test_an_argument_that_no_group_takes_raises(setting):
    model = net()
    (name,) = setting
    groups = lrm.param_groups(model, lrm.plan(model), **{name: 0.1})
    with pytest.raises(ValueError, match=f"{name}=0.7 has no effect"):
        lrm.AdamW(groups, **setting)
    optimizer = lrm.AdamW(lrm.param_groups(model, lrm.plan(model)), **setting)
    assert optimizer.param_groups[0][name] == 0.7


def test_a_rule_for_a_frozen_weight_raises():
    model = net()
    model.up.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"finds 'up\.weight', which is frozen"):
        lrm.plan(model, "full", [Rule("up.weight", "row+col")])
    lrm.plan(model, "full", [Rule(r"(up|down)\.weight", "row+col")])
    lrm.plan(model, "full", [Rule("up.weight", "row+col", optional=True)])


def test_momentum_set_in_the_groups_of_muon_is_used():
    scheduled, fixed = net(), net()
    optimizer = lrm.Muon.from_model(scheduled, lr=1e-2, momentum=0.95)
    for group in optimizer.param_groups:
        group["momentum"] = 0.5
    train(scheduled, optimizer, 3)
    train(fixed, lrm.Muon.from_model(fixed, lr=1e-2, momentum=0.5), 3)
    assert all(
        torch.equal(p, q) for p, q in zip(scheduled.parameters(), fixed.parameters(), strict=True)
    )


def test_different_momentum_of_hidden_matrices_raises():
    model = net()
    rules = [Rule("up", weight_decay=0.0)]
    optimizer = lrm.Muon.from_model(model, rules=rules)
    matrix_groups = [g for g in optimizer.param_groups if g["kind"] == "matrix"]
    assert len(matrix_groups) == 2
    matrix_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="different momentum"):
        train(model, optimizer, 1)


class Kinds(torch.optim.SGD):
    """Reads `kind` and `lr_scale` from its groups, as optimizers of several parts do."""

    def step(self, closure=None):
        assert [(g["kind"], g["lr_scale"]) for g in self.param_groups] == [("mine", 3.0)]
        return super().step(closure)


def test_the_wrapper_does_not_change_settings_of_the_wrapped_optimizer():
    model = net()
    inner = Kinds([{"params": model.parameters(), "kind": "mine", "lr_scale": 3.0}], lr=0.1)
    optimizer = lrm.LearnableMultipliers(inner, model, lrm.plan(model))
    assert optimizer.param_groups[0]["kind"] == "mine"
    train(model, optimizer, 2)


BAD = {
    "eps of 0": ({"eps": 0.0}, "eps must be at least 1.2e-38, got 0.0: below, it is 0 in float32"),
    "eps that is 0 in float32": ({"eps": 1e-50}, "eps must be at least 1.2e-38, got 1e-50"),
    "eps": ({"eps": math.inf}, "eps must be at least"),
    "beta1": ({"betas": (1.0, 0.95)}, r"beta1 must lie in \[0, 1\), got 1.0"),
    "beta2": ({"betas": (0.9, math.nan)}, r"beta2 must lie in \[0, 1\), got nan"),
    "lr": ({"lr": math.nan}, "lr must be a number of at least 0, got nan"),
    "infinite lr": ({"lr": torch.tensor(math.inf)}, "lr must be a number of at least 0"),
    "decay": ({"weight_decay": math.nan}, "weight_decay must be a number of at least 0, got nan"),
    "lr and decay": (
        {"lr": 20.0, "weight_decay": 0.1},
        "lr times weight_decay is 2: one step would decay a weight to zero",
    ),
    "multipliers' rate and decay": (
        {"lr": 0.01, "multiplier_lr_scale": 100.0, "multiplier_weight_decay": 2.0},
        "one step would decay a multiplier to zero",
    ),
    "scale": ({"multiplier_lr_scale": math.inf}, "multiplier_lr_scale must be a number"),
    "multipliers' decay": ({"multiplier_weight_decay": -1.0}, "multiplier_weight_decay must be"),
    "numpy's rate": ({"lr": np.float32(-1e-2)}, "lr must be a number of at least 0, got -0.0"),
    "numpy's scale": ({"multiplier_lr_scale": np.float32("nan")}, "multiplier_lr_scale must be"),
}


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
@pytest.mark.parametrize("case", BAD)
def test_settings_that_give_nan_at_the_first_step_raise(cls, case):
    settings, message = BAD[case]
    model = net()
    with pytest.raises(ValueError, match=message):
        cls.from_model(model, **settings)
    groups = [{**group, **settings} for group in lrm.param_groups(model, lrm.plan(model))]
    with pytest.raises(ValueError, match=message):
        cls(groups)
    # Written to a group later, by a scheduler or by a state that was loaded.
    optimizer = cls.from_model(model)
    train(model, optimizer, 1)
    for group in optimizer.param_groups:
        group.update(settings)
    before = weights(model), optimizer.state_dict()["state"][0]["step"].clone()
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, 1)
    assert all(torch.equal(p, before[0][name]) for name, p in model.named_parameters())
    assert optimizer.state_dict()["state"][0]["step"] == before[1]


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_a_rate_read_as_text_and_a_whole_model_raise_type_errors(cls):
    with pytest.raises(TypeError, match="lr must be a number, got the text '1e-3'"):
        cls.from_model(net(), lr="1e-3")
    # What YAML makes of 1e-8.
    with pytest.raises(TypeError, match="eps must be a number, got the text '1e-8'"):
        cls.from_model(net(), eps="1e-8")
    name = cls.__name__
    with pytest.raises(TypeError, match=rf"{name} was given a model: use lrm.{name}.from_model"):
        cls(net(), lr=1e-3)


SGD = torch.optim.SGD
MISTAKEN = {
    "swapped": (
        lambda m: lrm.AdamW.from_model("full", m),
        r"a model \(torch.nn.Module\), got 'full'",
    ),
    "parameters": (lambda m: lrm.Muon.from_model(m.parameters()), "a model .* got a generator"),
    "a plan alone": (
        lambda m: lrm.AdamW(lrm.plan(m)),
        r"given a plan: .*from_model\(model, plan\)",
    ),
    "a rule alone": (
        lambda m: lrm.plan(m, rules=Rule("up", "row")),
        "a list of lrm.Rule, got a Rule",
    ),
    "names for rules": (lambda m: lrm.plan(m, rules=["up"]), "a list of lrm.Rule, got 'up'"),
    "no pattern": (lambda m: Rule(None, "row"), "a pattern as text, got a NoneType"),
    "groups": (lambda m: lrm.param_groups(m, "full"), "a plan, as .* got 'full'"),
    "explicit": (lambda m: lrm.reparametrize(m, "full"), "a plan, as .* got 'full'"),
    "a placement": (
        lambda m: lrm.LearnableMultipliers(SGD(m.parameters()), m, "full"),
        "a plan, as .* got 'full'",
    ),
    "the model first": (
        lambda m: lrm.LearnableMultipliers(m, SGD(m.parameters()), lrm.plan(m)),
        "an optimizer of torch in front of model and plan, got a Net",
    ),
    "made already": (
        lambda m: lrm.LearnableMultipliers.from_model(SGD(m.parameters()), m),
        "give it the class SGD",
    ),
}


@pytest.mark.parametrize("case", MISTAKEN)
def test_arguments_of_another_type_raise_and_name_what_is_expected(case):
    make, message = MISTAKEN[case]
    with pytest.raises(TypeError, match=message):
        make(net())


def test_a_model_on_the_meta_device_raises():
    with torch.device("meta"):
        model = Net()
    optimizer = lrm.AdamW.from_model(model)
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"meta device: give the model its weights \(to_empty"):
        train(model, optimizer, 1)


def test_settings_of_clipping_momentum_and_wrapped_multipliers_are_checked_too():
    model = net()
    with pytest.raises(ValueError, match="max_grad_norm must be positive or None, got nan"):
        lrm.AdamW.from_model(model, max_grad_norm=math.nan)
    with pytest.raises(TypeError, match="max_grad_norm must be a number, got the text '1'"):
        lrm.AdamW.from_model(model, max_grad_norm="1")
    with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\), got nan"):
        lrm.Muon.from_model(model, momentum=math.nan)
    with pytest.raises(ValueError, match="adamw_lr_scale must be a number of at least 0, got inf"):
        lrm.Muon.from_model(model, adamw_lr_scale=math.inf)
    for settings in ({"multiplier_eps": 0.0}, {"multiplier_betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match="eps must be at least|beta2 must lie"):
            lrm.LearnableMultipliers.from_model(torch.optim.SGD, model, lr=0.1, **settings)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_clipping_by_hand_to_no_norm_raises(max_norm):
    """Gradients would be zero or uphill."""
    model = net()
    optimizer = lrm.AdamW.from_model(model)
    model(IDS).square().mean().backward()
    before = model.up.weight.grad.clone()
    with pytest.raises(ValueError, match="max_norm must be positive or None, got"):
        lrm.clip_grad_norm_(optimizer, max_norm)
    assert torch.equal(model.up.weight.grad, before)


def test_a_decay_in_a_tensor_is_read_at_every_step():
    model, other = net(), net()
    given = torch.tensor(0.0)
    optimizer = lrm.AdamW.from_model(model, lr=1e-2, multiplier_weight_decay=given)
    expected = lrm.AdamW.from_model(other, lr=1e-2, multiplier_weight_decay=0.0)
    train(model, optimizer, 2)
    train(other, expected, 2)
    given.fill_(1.0)
    for group in expected.param_groups:
        group["multiplier_weight_decay"] = 1.0
    train(model, optimizer, 2)
    train(other, expected, 2)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon, lrm.LearnableMultipliers])
def test_a_plan_from_before_a_matrix_was_unfrozen_raises(cls):
    """The matrix would train without multipliers, where another plan has some."""
    made = (torch.optim.SGD,) if cls is lrm.LearnableMultipliers else ()
    model = net()
    model.up.requires_grad_(False)
    plans = lrm.plan(model), lrm.plan(model, "none")
    model.up.requires_grad_(True)
    with pytest.raises(ValueError, match=r"up\.weight was frozen when the plan was made"):
        cls.from_model(*made, model, plans[0], lr=1e-2)
    optimizer = cls.from_model(*made, model, plans[1], lr=1e-2)
    before = weights(model)
    train(model, optimizer, 1)
    assert not torch.equal(model.up.weight, before["up.weight"])


def test_the_smallest_eps_leaves_weights_without_a_gradient_alone():
    model = net()
    optimizer = lrm.AdamW.from_model(model, "none", lr=1e-2, weight_decay=0.0, eps=1.2e-38)
    unused = model.embed.weight.detach()[5:].clone()
    model(IDS[:5]).square().mean().backward()
    optimizer.step()
    assert torch.equal(model.embed.weight[5:], unused)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
@pytest.mark.parametrize("setting", [{"fused": True}, {"foreach": True}, {"fused": False}])
def test_fused_or_foreach_has_no_effect_and_both_raise(setting, cls):
    one, other = net(), net()
    train(one, cls.from_model(one, lr=1e-2, **setting), 2)
    train(other, cls.from_model(other, lr=1e-2), 2)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="cannot both be True"):
        cls.from_model(one, fused=True, foreach=True)


# -- frameworks that wrap or swap -----------------------------------------------------------------


def test_the_wrapper_trains_parameters_that_a_framework_swapped():
    model, straight = net(), net()
    optimizer = lrm.LearnableMultipliers.from_model(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for place, held in enumerate(group["params"]):
                name = next(n for n, p in model.named_parameters() if p is held)
                owner, _, leaf = name.rpartition(".")
                new = nn.Parameter(held.detach().clone())
                setattr(model.get_submodule(owner), leaf, new)
                group["params"][place] = new
    train(model, optimizer, 3)
    inner = lrm.LearnableMultipliers.from_model(torch.optim.SGD, straight, lr=0.1, momentum=0.9)
    train(straight, inner, 3)
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(p, q)
    saved = optimizer.state_dict()
    assert len(saved["state"]) == len(list(model.parameters()))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_weight_replaced_in_the_model_stops_the_wrapper_as_it_stops_adamw(steps):
    messages = []
    for make in (
        lambda model: lrm.AdamW.from_model(model, lr=1e-2),
        lambda model: lrm.LearnableMultipliers.from_model(torch.optim.SGD, model, lr=1e-2),
    ):
        model = net()
        optimizer = make(model)
        train(model, optimizer, steps)
        if steps:
            model.down = nn.Linear(10, 6)
        else:
            model.load_state_dict(weights(model), assign=True)
        with pytest.raises(RuntimeError, match="was replaced in the model") as error:
            train(model, optimizer, 1)
        messages.append(str(error.value))
    assert messages[0].split()[1:] == messages[1].split()[1:]


class Around:
    def __init__(self, optimizer):
        self.optimizer = optimizer


class Container:
    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)


def test_helpers_find_the_optimizer_inside_a_framework():
    model = net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, 2)
    for around in (Around(optimizer), Container(optimizer), Around(Container(optimizer))):
        assert lrm.unwrap(around) is optimizer
        assert lrm.multipliers(around).keys() == lrm.multipliers(optimizer).keys()
        assert str(lrm.diagnose(around)) == str(lrm.diagnose(optimizer))
        assert lrm.Monitor(around).health().metrics() == lrm.Monitor(optimizer).health().metrics()
        assert lrm.drift(around, ()) == ()
    with pytest.raises(ValueError, match="holds 2 optimizers"):
        lrm.unwrap(Container(optimizer, optimizer))
    with pytest.raises(TypeError, match=r"lrm\.AdamW\.from_model"):
        lrm.unwrap(torch.optim.SGD(model.parameters(), 0.1))


def test_multipliers_around_multipliers_raise():
    model = net()
    optimizer = lrm.AdamW.from_model(model)
    with pytest.raises(ValueError, match="trains multipliers already"):
        lrm.LearnableMultipliers(optimizer, model, lrm.plan(model))


@pytest.mark.parametrize("steps", [0, 2])
def test_multipliers_in_the_model_of_an_optimizer_that_has_some_raise(steps):
    model = net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, steps)
    lrm.reparametrize(model, optimizer.plan)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"by lrm\.reparametrize after .* lrm\.merge\(model\)"):
        train(model, optimizer, 1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    lrm.merge(model)
    train(model, optimizer, 1)
    other = net()
    train(other, lrm.AdamW.from_model(other, lr=1e-2), steps + 1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


# -- what happens to a model and its optimizer behind each other's back --------------------------


def test_groups_that_were_replaced_are_used():
    model = net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, 3)
    optimizer.param_groups = [{**g, "lr": 0.0} for g in optimizer.param_groups]
    before = weights(model)
    train(model, optimizer, 5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def replaced(model):
    model.down = nn.Linear(10, 6)


def reparametrized(model):
    nn.utils.parametrizations.weight_norm(model.down)


def nested(model):
    model.down = nn.Sequential(nn.Linear(10, 6))


@pytest.mark.parametrize("change", [replaced, reparametrized, nested])
@pytest.mark.parametrize("cleared", ["by the model", "to zero", "by the optimizer"])
@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_a_weight_that_the_model_replaced_raises_however_gradients_are_cleared(
    cls, cleared, change
):
    model = net()
    optimizer = cls.from_model(model, lr=1e-2)
    clear = {
        "by the model": model.zero_grad,
        "to zero": lambda: optimizer.zero_grad(set_to_none=False),
        "by the optimizer": optimizer.zero_grad,
    }[cleared]

    def step():
        clear()
        model(IDS).square().mean().backward()
        optimizer.step()

    step()
    change(model)
    with pytest.raises(RuntimeError, match=r"down\.weight was replaced in the model"):
        step()


def test_a_weight_that_is_in_another_place_or_gone_does_not_raise():
    model = net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, 1)
    # The same parameter behind a mask; and a layer whose output is not wanted any more.
    prune.l1_unstructured(model.up, "weight", 0.5)
    model.down = nn.Identity()
    model.forward = lambda ids: model.norm(model.up(model.embed(ids)))
    before = model.up.weight_orig.detach().clone()
    train(model, optimizer, 2)
    assert (model.up.weight_orig - before).abs().max() > 1e-3


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_a_matrix_in_a_group_without_a_plan_raises(cls):
    model, more = net(), nn.Linear(6, 6)
    named = {"params": [(f"more.{name}", p) for name, p in more.named_parameters()]}
    optimizer = cls.from_model(model)
    with pytest.raises(ValueError, match=r"more\.weight is in a group without a plan"):
        optimizer.add_param_group(named)
    train(model, optimizer, 1)
    groups = lrm.param_groups(model, lrm.plan(model))
    for order in ([*groups, named], [named, *groups]):
        with pytest.raises(ValueError, match=r"more\.weight is in a group without a plan"):
            cls(order)
    other = net()
    with pytest.raises(ValueError, match="two parameters are called embed.weight"):
        optimizer.add_param_group(lrm.param_groups(other, lrm.plan(other))[0])


def test_complex_parameters_raise():
    for module in (nn.Linear(4, 4, dtype=torch.complex64), nn.ParameterList([torch.zeros(3) * 1j])):
        with pytest.raises(ValueError, match="is complex, which is not supported"):
            lrm.AdamW.from_model(module, "none")


@pytest.mark.parametrize(
    "edit", [torch.Tensor.tril_, torch.Tensor.triu_, lambda w: w[5:, 3:].zero_()]
)
def test_edits_off_the_diagonal_are_detected(edit):
    """Through .data, which leaves no trace but the numbers, and in a state that is resumed."""
    model = net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    edit(model.up.weight.data)
    with pytest.raises(RuntimeError, match=r"up\.weight was changed"):
        train(model, optimizer, 1)
    again = lrm.AdamW.from_model(model, lr=1e-2)
    again.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"up\.weight was changed"):
        train(model, again, 1)


def test_one_edited_number_is_detected_when_a_state_is_resumed():
    model = net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, 2)
    again = lrm.AdamW.from_model(model, lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        model.up.weight[1, 4] += 1.0
    with pytest.raises(RuntimeError, match=r"up\.weight was changed"):
        train(model, again, 1)


@pytest.mark.parametrize("looks", [False, True])
def test_reading_small_multipliers_does_not_change_training(looks):
    model = net(torch.float64)
    rules = [Rule("down.weight", "scalar", init=0.005)]
    optimizer = lrm.AdamW.from_model(model, lr=1e-4, rules=rules)
    if looks:
        lrm.multipliers(optimizer)
    with torch.no_grad():
        model.down.weight.mul_(1.1)
    train(model, optimizer, 1)
    (scalar,) = lrm.multipliers(optimizer)["down.weight"].values()
    assert scalar.item() == pytest.approx(0.005, abs=2e-4)


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_a_clip_norm_that_is_set_later_is_checked_too(value):
    model = net()
    optimizer = lrm.AdamW.from_model(model)
    optimizer.max_grad_norm = value
    before = weights(model)
    with pytest.raises(ValueError, match="max_grad_norm must be positive or None"):
        train(model, optimizer, 1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda p: torch.optim.RAdam(p), "another class"),
        (lambda p: torch.optim.NAdam(p), "another class"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "coupled decay"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True), "amsgrad, maximize"),
    ],
)
def test_states_of_other_optimizers_than_adamw_raise(made, message):
    model = net()
    other = made(model.named_parameters())
    train(model, other, 1)
    with pytest.raises(ValueError, match=message):
        lrm.AdamW.from_model(model).load_state_dict(other.state_dict())
