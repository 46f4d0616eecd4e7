"""Outside changes to weights, state and groups between two steps are used, or raise an error."""

import copy

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers import Rule
from learnable_multipliers.optim._write_guard import WeightChangedError
from test_contract import IDS, net, train, weights


def trained(cls=lrm.AdamW, dtype=torch.float32, steps=3, **settings):
    model = net(dtype)
    optimizer = cls.from_model(model, **{"lr": 1e-2, **settings})
    train(model, optimizer, steps)
    return model, optimizer


# -- weights ----------------------------------------------------------------------------------


def move_another(model, optimizer):
    model.down.weight.data = model.down.weight.data.clone()
    return model, optimizer


def add_group(model, optimizer):
    more = nn.Linear(3, 4)
    (group, *_) = lrm.param_groups(more, lrm.plan(more))
    optimizer.add_param_group({**group, "lr": 1e-2})
    return model, optimizer


def replace_groups(model, optimizer):
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    return model, optimizer


def take_a_copy(model, optimizer):
    return copy.deepcopy((model, optimizer))


@pytest.mark.parametrize("then", [move_another, add_group, replace_groups])
def test_a_written_weight_is_detected_whatever_else_changed(then):
    model, optimizer = trained()
    with torch.no_grad():
        model.up.weight[3, 5] = 7.0
    model, optimizer = then(model, optimizer)
    with pytest.raises(WeightChangedError, match=r"up\.weight was changed"):
        train(model, optimizer, 1)


def test_a_weight_written_in_a_copy_is_detected():
    model, optimizer = take_a_copy(*trained())
    with torch.no_grad():
        model.up.weight[3, 5] = 7.0
    with pytest.raises(WeightChangedError, match=r"up\.weight was changed"):
        train(model, optimizer, 1)


def test_syncing_keeps_unchanged_weights_bit_for_bit():
    """Steps below the spacing of bfloat16 add up in the raw weights, synced after each or not."""
    runs = []
    for syncs in (True, False):
        model = net(torch.bfloat16)
        optimizer = lrm.AdamW.from_model(model, lr=2e-6)
        for _ in range(20):
            train(model, optimizer, 1)
            if syncs:
                optimizer.sync_from_model_()
        runs.append(optimizer)
    for name, raw in lrm.optim.raw_weights(runs[0]).items():
        assert torch.equal(raw, lrm.optim.raw_weights(runs[1])[name]), name


def test_syncing_one_weight_keeps_small_multipliers_of_others():
    model, optimizer = trained()
    with optimizer.rewriting(["down.weight"]):
        optimizer.state[model.down.weight]["row"][0] = 0.005
        optimizer.state[model.down.weight]["col"].fill_(3.0)
    with torch.no_grad():
        model.up.weight[0, 0] += 1.0
    before = weights(model)
    optimizer.sync_from_model_()
    assert torch.equal(lrm.multipliers(optimizer)["down.weight"]["col"], torch.full((10,), 3.0))
    torch.testing.assert_close(model.up.weight.detach(), before["up.weight"])
    assert torch.equal(model.down.weight, before["down.weight"])


class EmbedAndHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("part", ["embed", "head"])
def test_a_weight_untied_later_raises(part, steps):
    model = EmbedAndHead()
    model.head.weight = model.embed.weight
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, steps)
    layer = getattr(model, part)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(RuntimeError, match=rf"{part}\.weight is no longer tied .* untie .* before"):
        train(model, optimizer, 1)


def test_a_weight_tied_later_raises():
    model = EmbedAndHead()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, optimizer, 1)
    model.head.weight = model.embed.weight
    with pytest.raises(RuntimeError, match=r"head\.weight .* tied to embed\.weight .* before"):
        train(model, optimizer, 1)


# -- groups -----------------------------------------------------------------------------------


def test_maximizing_raises():
    model = net()
    for make in (
        lambda: lrm.LearnableMultipliers.from_model(torch.optim.SGD, model, lr=0.1, maximize=True),
        lambda: lrm.AdamW(
            [{**g, "maximize": True} for g in lrm.param_groups(model, lrm.plan(model))]
        ),
    ):
        with pytest.raises(ValueError, match="maximize .* negative of the loss"):
            make()
    model, optimizer = trained()
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize"):
        train(model, optimizer, 1)


def test_a_rejected_group_changes_nothing():
    model = net()
    model.down.weight.requires_grad_(False)
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    model.down.weight.requires_grad_(True)
    groups = lrm.param_groups(model, lrm.plan(model, "scalar"))
    (late,) = (
        {**group, "params": [pair for pair in group["params"] if pair[0] == "down.weight"]}
        for group in groups
        if any(pair[0] == "down.weight" for pair in group["params"])
    )
    count, frozen = len(optimizer.param_groups), model.down.weight.detach().clone()
    with pytest.raises(ValueError, match=r"two plans for one optimizer differ at embed\.weight"):
        optimizer.add_param_group({**late, "lr": 1e-2})
    assert len(optimizer.param_groups) == count
    with pytest.warns(UserWarning, match="was frozen when the optimizer was made"):
        train(model, optimizer, 1)
    assert torch.equal(model.down.weight, frozen)


@pytest.mark.parametrize("which", [0, 1])
def test_replaced_layers_of_two_models_raise(which):
    models = nn.ModuleDict({"a": nn.Linear(4, 5)}), nn.ModuleDict({"b": nn.Linear(4, 5)})
    optimizer = lrm.AdamW.from_model(models[0], lr=1e-2)
    for group in lrm.param_groups(models[1], lrm.plan(models[1])):
        optimizer.add_param_group({**group, "lr": 1e-2})

    def step():
        optimizer.zero_grad()
        x = torch.ones(2, 4)
        sum(layer(x).square().sum() for model in models for layer in model.values()).backward()
        optimizer.step()

    step()
    name = "ab"[which]
    models[which][name] = nn.Linear(4, 5)
    with pytest.raises(RuntimeError, match=rf"{name}\.\w+ was replaced in the model"):
        step()


def test_parameters_taken_out_of_a_group_raise():
    model, optimizer = trained()
    group = optimizer.param_groups[0]
    group["params"] = group["params"][:1]
    with pytest.raises(ValueError, match=r"1 parameters and \d names .* param_names"):
        train(model, optimizer, 1)


def test_betas_in_tensors_are_read_at_every_step():
    given = (torch.tensor(0.9), torch.tensor(0.95))
    model, optimizer = trained(betas=given)
    other, expected = trained(betas=(0.9, 0.95))
    given[0].fill_(0.5)
    for group in expected.param_groups:
        group["betas"] = (0.5, 0.95)
    train(model, optimizer, 2)
    train(other, expected, 2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


# -- state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "col_exp_avg"])
@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_a_tensor_put_into_the_state_is_used(cls, key):
    """As if its numbers had been written into the tensor that was there."""
    runs = [trained(cls), trained(cls)]
    for (model, optimizer), replaces in zip(runs, (True, False), strict=True):
        kept = optimizer.state[model.embed.weight]
        value = torch.full_like(kept[key], 0.5)
        if replaces:
            kept[key] = value
        else:
            kept[key].copy_(value)
        train(model, optimizer, 2)
    assert_same_run(*runs)


@pytest.mark.parametrize("keys", ["", "row"])
@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_an_offloaded_and_reloaded_state_is_the_one_that_is_saved(cls, keys):
    """Offloading as it is often written: every tensor of the state gets another storage.

    Large ones may come back to where they were.
    """
    runs = [trained(cls), trained(cls)]
    for (model, optimizer), sends in zip(runs, (True, False), strict=True):
        for _ in range(2):
            for kept in optimizer.state.values() if sends else ():
                for key, value in kept.items():
                    if key.startswith(keys):
                        value.data = value.data.clone()
            train(model, optimizer, 1)
    assert_same_run(*runs)


def assert_same_run(one, other):
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p, q)
    saved = [optimizer.state_dict()["state"] for _, optimizer in (one, other)]
    for index, kept in saved[0].items():
        assert all(torch.equal(value, saved[1][index][name]) for name, value in kept.items())


def test_hooks_after_loading_see_the_loaded_state():
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    other = lrm.AdamW.from_model(model, lr=1e-2)

    def halve(loaded):
        for kept in loaded.state.values():
            kept["exp_avg"] = kept["exp_avg"] / 2

    other.register_load_state_dict_post_hook(halve)
    other.load_state_dict(saved)
    for parameter, kept in optimizer.state.items():
        assert torch.equal(other.state[parameter]["exp_avg"], kept["exp_avg"] / 2)


def test_a_converted_state_keeps_each_parameter_s_settings():
    model = net()
    own = Rule(r"^up\.weight", lr_scale=0.1, weight_decay=0.0)
    before = lrm.AdamW.from_model(model, lrm.plan(model, "full", [own]), lr=1e-2)
    train(model, before, 1)
    after = lrm.AdamW.from_model(model, "scalar", lr=1e-3)
    after.load_state_dict(before.state_dict(), from_plan=before.plan)
    (group,) = (g for g in after.param_groups if "down.weight" in g["param_names"])
    # Both matrices are in one group here: it cannot have the settings of one alone.
    assert "up.weight" in group["param_names"]
    assert (group["raw_lr_scale"], group["weight_decay"]) == (1.0, 0.1)
    assert group["lr"] == 1e-2


def test_a_converted_state_of_muon_estimates_its_mean_square_again():
    model, before = trained(lrm.Muon, placement="full")
    with before.rewriting(["up.weight"]):
        before.state[model.up.weight]["row"].fill_(10.0)
    train(model, before, 2)
    after = lrm.Muon.from_model(model, "none", lr=1e-2)
    after.load_state_dict(before.state_dict(), from_plan=before.plan)
    train(model, after, 1)
    kept = after.state[model.up.weight]
    grad = model.up.weight.grad
    # Of gradients of this raw weight, not of the one before, whose gradients were ten times these.
    assert kept["mean_sq"] < 5 * grad.square().mean()


def test_names_of_data_parallel_models_are_those_of_the_model():
    class Prefixed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model

    model = net()
    saved = torch.optim.AdamW(Prefixed(model).named_parameters(), lr=1e-2)
    train(model, saved, 2)
    ours = lrm.AdamW.from_model(model, lr=1e-2)
    ours.load_state_dict(saved.state_dict())
    for parameter, kept in saved.state.items():
        assert torch.equal(ours.state[parameter]["exp_avg"], kept["exp_avg"])


def test_reading_multipliers_in_inference_mode_does_not_change_training():
    model, expected = net(), net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    with torch.inference_mode():
        lrm.multipliers(optimizer)
        model(IDS)
    train(model, optimizer, 2)
    train(expected, lrm.AdamW.from_model(expected, lr=1e-2), 2)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
