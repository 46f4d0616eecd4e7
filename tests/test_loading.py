"""States of other plans and optimizers are converted or adopted, or raise an error."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import learnable_multipliers as lrm
from families import build, token_ids
from learnable_multipliers import Rule
from test_contract import IDS, net, train, weights


def states(optimizer):
    named = [n for group in optimizer.param_groups for n in group["param_names"]]
    return dict(
        zip(
            named,
            (optimizer.state[p] for g in optimizer.param_groups for p in g["params"]),
            strict=True,
        )
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("old", "new"), [("scalar", "full"), ("full", "scalar"), ("full", "none"), ("none", "full")]
)
def test_a_state_of_another_plan_raises_unless_from_plan_converts_it(old, new, dtype):
    model = net(dtype)
    before = lrm.AdamW.from_model(model, old, lr=1e-2)
    train(model, before, 4)
    saved = copy.deepcopy(before.state_dict())
    other = net(dtype)
    other.load_state_dict(model.state_dict())
    after = lrm.AdamW.from_model(other, new, lr=0.5)
    kept = weights(other)
    with pytest.raises(ValueError, match="saved under another plan, which differs at "):
        after.load_state_dict(saved)
    assert not after.state
    wrong = lrm.plan(other, "full", [Rule("up.weight", "col")])
    with pytest.raises(ValueError, match="from_plan is not the plan"):
        after.load_state_dict(saved, from_plan=wrong)
    after.load_state_dict(saved, from_plan=lrm.plan(other, old))
    assert all(torch.equal(p, kept[name]) for name, p in other.named_parameters())
    assert after.param_groups[0]["lr"] == 1e-2
    mults, raws = lrm.multipliers(after), lrm.optim.raw_weights(after)
    for entry in after.plan.entries:
        if entry.matrix is None:
            continue
        made = lrm.effective(entry.matrix, raws[entry.name], mults.get(entry.name, {}))
        tolerance = (
            {"rtol": 1e-12, "atol": 1e-13}
            if dtype == torch.float64
            else {"rtol": 1e-2, "atol": 1e-3}
        )
        torch.testing.assert_close(made.to(dtype), kept[entry.name], **tolerance)
    train(other, after, 1)


def test_a_converted_state_keeps_common_multipliers_and_scales_the_moments():
    """Dropped multipliers become part of the raw weight, whose gradient is smaller by them."""
    model = net(torch.float64)
    before = lrm.AdamW.from_model(model, lr=0.1)
    train(model, before, 5)
    saved = copy.deepcopy(before.state_dict())
    after = lrm.AdamW.from_model(model, rules=[Rule("up.weight", "col")])
    after.load_state_dict(saved, from_plan=before.plan)
    lrm.multipliers(after)
    old, new = states(before)["up.weight"], states(after)["up.weight"]
    assert "row" not in new
    assert torch.equal(new["col"], old["col"])
    assert torch.equal(new["col_exp_avg"], old["col_exp_avg"])
    row = old["row"][:, None]
    torch.testing.assert_close(new["raw"], row * old["raw"], rtol=1e-14, atol=0)
    torch.testing.assert_close(new["exp_avg"], old["exp_avg"] / row, rtol=1e-13, atol=0)
    torch.testing.assert_close(new["exp_avg_sq"], old["exp_avg_sq"] / row**2, rtol=1e-13, atol=0)


def hf_groups(model):
    decay = [p for n, p in model.named_parameters() if "norm" not in n and "bias" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


GROUPS = {
    "named": lambda model: model.named_parameters(),
    "in one group": lambda model: model.parameters(),
    "by dimension": lambda model: [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ],
    "as the Trainer": hf_groups,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_the_state_of_torch_adamw_is_adopted(groups):
    model = net(torch.float64)
    theirs = torch.optim.AdamW(GROUPS[groups](model), lr=1e-2, betas=(0.9, 0.95))
    train(model, theirs, 3)
    kept = weights(model)
    ours = lrm.AdamW.from_model(model, lr=2e-2)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 2e-2
    mults = lrm.multipliers(ours)
    assert all((value == 1).all() for matrix in mults.values() for value in matrix.values())
    for name, p in model.named_parameters():
        state = ours.state[p]
        assert state["step"] == 3
        assert torch.equal(state["exp_avg"], theirs.state[p]["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], theirs.state[p]["exp_avg_sq"])
        assert torch.equal(p, kept[name])
        assert torch.equal(state.get("raw", p), p)


def test_adopted_moments_continue_the_run_of_torch():
    """With the multipliers held at 1, the next steps are those of torch's AdamW."""
    model, other = net(torch.float64), net(torch.float64)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}
    theirs = torch.optim.AdamW(model.named_parameters(), **settings)
    train(model, theirs, 3)
    other.load_state_dict(model.state_dict())
    held = {"multiplier_lr_scale": 0.0}
    ours = lrm.AdamW.from_model(other, **settings, **held)
    ours.load_state_dict(theirs.state_dict())
    train(model, theirs, 3)
    train(other, ours, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_states_that_cannot_be_matched_raise():
    model = net()
    ours = lrm.AdamW.from_model(model)
    reordered = torch.optim.AdamW(list(model.parameters())[::-1])
    train(model, reordered, 1)
    with pytest.raises(ValueError, match="in no common order"):
        ours.load_state_dict(reordered.state_dict())
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, sgd, 1)
    with pytest.raises(ValueError, match="neither by this library nor by torch's AdamW"):
        ours.load_state_dict(sgd.state_dict())
    theirs = torch.optim.AdamW(model.named_parameters())
    train(model, theirs, 1)
    with pytest.raises(ValueError, match="has no momentum_buffer for up.weight"):
        lrm.Muon.from_model(model).load_state_dict(theirs.state_dict())
    assert not ours.state


@pytest.mark.parametrize(
    ("saver", "loader", "missing"),
    [(lrm.AdamW, lrm.Muon, "momentum_buffer"), (lrm.Muon, lrm.AdamW, "exp_avg")],
)
def test_the_state_of_another_kind_raises_and_names_what_is_missing(saver, loader, missing):
    model = net()
    optimizer = saver.from_model(model)
    train(model, optimizer, 1)
    other = loader.from_model(model)
    with pytest.raises(ValueError, match=f"has no {missing} for "):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


SHAPES_DIFFER = r"^embed\.weight: saved 11x6, here 7x6: start with fresh optimizer state$"


def with_seven_tokens():
    model = net()
    model.embed = nn.Embedding(7, 6)
    return model


@pytest.mark.parametrize("flat", [None, False, True])
@pytest.mark.parametrize("placement", ["full", "none"])
@pytest.mark.parametrize("kind", ["adamw", "muon", "wrapped"])
def test_a_state_of_other_shapes_raises_and_names_the_parameter(kind, placement, flat):
    """Loaded by the optimizer itself, or by torch's tools for checkpoints, flattened or not."""

    def make(model):
        if kind != "wrapped":
            return MADE[kind](model, placement)
        settings = {"lr": 1e-2, "momentum": 0.9}
        return lrm.LearnableMultipliers.from_model(torch.optim.SGD, model, placement, **settings)

    model, other = net(), with_seven_tokens()
    saver, loader = make(model), make(other)
    train(model, saver, 1)
    kept = weights(other)
    if flat is None:
        saved = copy.deepcopy(saver.state_dict())
        with pytest.raises(ValueError, match=SHAPES_DIFFER):
            loader.load_state_dict(saved)
        if kind != "wrapped":
            with pytest.raises(ValueError, match=SHAPES_DIFFER):
                loader.load_state_dict(saved, from_plan=saver.plan)
            assert not loader.state
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = get_optimizer_state_dict(model, saver, options=options)
        with pytest.raises(ValueError, match=SHAPES_DIFFER):
            set_optimizer_state_dict(other, loader, saved, options=options)
    assert all(torch.equal(p, kept[name]) for name, p in other.named_parameters())


def test_a_state_of_torch_adamw_of_other_shapes_raises_and_names_the_parameter():
    model = net()
    theirs = torch.optim.AdamW(model.named_parameters())
    train(model, theirs, 1)
    ours = lrm.AdamW.from_model(with_seven_tokens())
    with pytest.raises(ValueError, match=SHAPES_DIFFER):
        ours.load_state_dict(theirs.state_dict())
    assert not ours.state


def test_a_state_loads_while_parameters_are_offloaded():
    model = net()
    optimizer = lrm.AdamW.from_model(model)
    train(model, optimizer, 2)
    again = lrm.AdamW.from_model(model)
    kept = {p: p.data for p in model.parameters()}
    for p in kept:
        p.data = torch.empty(0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, value in kept.items():
        p.data = value
    train(model, again, 1)
    assert again.state[model.up.weight]["step"] == 3


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_a_wrapped_optimizer_rejects_a_state_that_no_wrapped_one_saved(inner, steps):
    model = net()
    optimizer = lrm.AdamW.from_model(model)
    train(model, optimizer, steps)
    around = lrm.LearnableMultipliers.from_model(inner, model, lr=0.1)
    with pytest.raises(ValueError, match="was not saved by a wrapped optimizer"):
        around.load_state_dict(optimizer.state_dict())


# -- before the first step ------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["copy_", "data", "load_state_dict", "after a look"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_loaded_before_the_first_step_are_adopted(write, dtype):
    model, other = net(dtype), net(dtype)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3.0)
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    if write == "after a look":
        # Checkpointing tools take a step without rate and gradient where there is no state.
        get_optimizer_state_dict(model, optimizer)
    lrm.multipliers(optimizer)
    if write in ("load_state_dict", "after a look"):
        model.load_state_dict(other.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if write == "data":
            p.data = q.data.clone()
        elif write == "copy_":
            p.data.copy_(q.data)
    train(model, optimizer, 3)
    train(other, lrm.AdamW.from_model(other, lr=1e-2), 3)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    with torch.no_grad():
        model.up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="was changed since the last step"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("small", [0.0, 1e-40, 1e-6, 9e-3])
def test_syncing_near_a_zero_multiplier_restarts_it(small):
    model = net()
    optimizer = lrm.AdamW.from_model(model, lr=1e-3)
    train(model, optimizer, 2)
    state = optimizer.state[model.up.weight]
    state["row"][3] = small
    optimizer.sync_from_model_()
    kept = weights(model)
    assert (lrm.multipliers(optimizer)["up.weight"]["row"] == 1).all()
    train(model, optimizer, 1)
    for name, p in model.named_parameters():
        assert p.isfinite().all()
        assert (p - kept[name]).abs().max() < 0.01, name


# -- what users look at ---------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_optimizer_fits_a_screen_when_printed():
    text = repr(lrm.AdamW.from_model(Deep(64)))
    assert len(text) < 1500
    assert "64 of 64 matrices carry multipliers" in text
    assert "lr=0.001" in text


def test_flattened_state_grows_with_the_model_and_not_faster():
    """Checkpointing tools repeat what a group holds for each of its parameters."""

    def size(depth):
        model = Deep(depth)
        optimizer = lrm.AdamW.from_model(model)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        # Lists of names are torch's own, and repeated by it for any optimizer that has names.
        return sum(
            len(str(value))
            for key, value in saved.items()
            if key.startswith("param_groups") and not key.endswith("param_names")
        )

    assert size(64) < 5 * size(16)


# -- parameters that change under the optimizer ---------------------------------------------------


def test_an_embedding_replaced_after_the_optimizer_was_made_raises():
    model = net()
    optimizer = lrm.AdamW.from_model(model)
    train(model, optimizer, 1)
    model.embed = nn.Embedding(20, 6)
    with pytest.raises(RuntimeError, match=r"embed\.weight was replaced in the model"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("stepped", [False, True])
def test_resized_token_embeddings_raise_tied_or_not(family, stepped):
    model = build(family)
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)

    def step():
        model(token_ids(), labels=token_ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if stepped:
        step()
    model.resize_token_embeddings(70)
    embedding = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    before = weights(model)
    with pytest.raises(ValueError, match=f"{embedding} has shape .70, 16.*resize the model first"):
        step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    optimizer.zero_grad()
    step()
    changed = weights(model)
    assert not torch.equal(changed[embedding], before[embedding])
    if family != "llama":
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


MADE = {
    "adamw": lambda model, *plan: lrm.AdamW.from_model(model, *plan),
    "muon": lambda model, *plan: lrm.Muon.from_model(model, *plan),
    "wrapped": lambda model, *plan: lrm.LearnableMultipliers.from_model(
        torch.optim.SGD, model, *plan, lr=1e-2
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_weight_unfrozen_later_warns_once(kind):
    model = net()
    model.up.weight.requires_grad_(False)
    optimizer = MADE[kind](model)
    train(model, optimizer, 1)
    model.up.weight.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"up\.weight was frozen when the optimizer was made"):
        train(model, optimizer, 1)
    train(model, optimizer, 1)
    again = MADE[kind](model)
    train(model, again, 1)


def test_two_optimizers_of_one_model_warn_of_what_they_do_not_train():
    model = Deep(4)
    halves = model.layers[:2], model.layers[2:]
    optimizers = []
    for half in halves:
        model.requires_grad_(False)
        half.requires_grad_(True)
        optimizers.append(lrm.AdamW.from_model(model))
    model.requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    for optimizer, name in zip(optimizers, ("layers.2.weight", "layers.0.weight"), strict=True):
        message = (
            f"{name} (and 3 more) was frozen when the optimizer was made and requires a gradient "
            "now: this optimizer does not train it. If no other one does, make the optimizer again"
        )
        with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
            optimizer.step()


def bad_steps(model, optimizer, count):
    """Take steps without finite gradients; return how many warnings they give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.nan)
            optimizer.step()
    assert all("optimizer steps were skipped" in str(one.message) for one in caught)
    return len(caught)


@pytest.mark.parametrize("kind", MADE)
def test_each_long_series_of_skipped_steps_warns_once(kind):
    model = net()
    optimizer = MADE[kind](model)
    train(model, optimizer, 1)
    assert bad_steps(model, optimizer, 15) == 0
    train(model, optimizer, 4)
    assert bad_steps(model, optimizer, 60) == 1
    assert optimizer.num_skipped == 75
    # Recovered, and worse again: reported within forty steps.
    train(model, optimizer, 7)
    assert bad_steps(model, optimizer, 39) == 1
    train(model, optimizer, 1)
    assert bad_steps(model, optimizer, 19) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_counting_skipped_steps_does_not_make_a_gpu_wait(kind):
    model = net().cuda()
    optimizer = MADE[kind](model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(20):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(19):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- multipliers alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_multipliers_alone_train_over_fixed_raw_weights_as_on_the_explicit_path(cls, dtype):
    model, explicit = net(dtype), net(dtype)
    kept = weights(model)
    optimizer = cls.from_model(model, lrm.plan(model, train="multipliers"), lr=1e-2)
    train(model, optimizer, 5)
    raws, mults = lrm.optim.raw_weights(optimizer), lrm.multipliers(optimizer)
    for name, raw in raws.items():
        assert torch.equal(raw, kept[name]), name
    for name in ("up.bias", "norm.weight", "norm.bias"):
        assert torch.equal(model.get_parameter(name), kept[name])
    assert "exp_avg" not in optimizer.state[model.up.weight]
    plan = lrm.plan(explicit, train="multipliers")
    lrm.reparametrize(explicit, plan)
    groups = lrm.param_groups(explicit, plan, lr=1e-2)
    assert {group["kind"] for group in groups} == {"multiplier"}
    train(explicit, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), 5)
    for name, value in lrm.multipliers(explicit).items():
        for part in value:
            torch.testing.assert_close(mults[name][part], value[part], rtol=1e-5, atol=1e-6)
            assert (value[part] - 1).abs().max() > 0.01
    merged = lrm.merge(explicit)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, merged.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_one_matrix_can_be_fixed_while_the_rest_trains():
    model = net()
    kept = weights(model)
    optimizer = lrm.AdamW.from_model(
        model, rules=[Rule("down.weight", train="multipliers")], lr=1e-2
    )
    train(model, optimizer, 3)
    raws = lrm.optim.raw_weights(optimizer)
    assert torch.equal(raws["down.weight"], kept["down.weight"])
    assert not torch.equal(model.down.weight, kept["down.weight"])
    assert not torch.equal(raws["up.weight"], kept["up.weight"])
    again = lrm.AdamW.from_model(model, optimizer.plan, lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(lrm.optim.raw_weights(again)["down.weight"], kept["down.weight"])


def test_multipliers_over_a_weight_without_gradient_raise():
    model = net()
    model.up.weight.requires_grad_(False)
    plan = lrm.plan(model, rules=[Rule("up.weight", train="multipliers")])
    assert plan["up.weight"].carries
    with pytest.raises(ValueError, match=r"up\.weight are learned from its gradient"):
        lrm.AdamW.from_model(model, plan)


@pytest.mark.parametrize("kind", MADE)
def test_a_state_of_another_format_raises_before_anything_changes(kind):
    """Format 2 called the scale of a raw weight's rate `lr_scale`, and named no wrapped class."""
    model = net()
    optimizer, fresh = MADE[kind](model), MADE[kind](model)
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group |= {"format": 2, "lr": 7.0, "lr_scale": group.pop("raw_lr_scale")}
        group.pop("wrapped", None)
    with pytest.raises(ValueError, match="is of format 2, and only format 3 is read here"):
        fresh.load_state_dict(saved)
    assert not fresh.state
    assert all(group["lr"] < 1 for group in fresh.param_groups)


# -- stages of a run ------------------------------------------------------------------------------


def stages(cls, first, second, dtype=torch.float32):
    """Train a stage of three steps; return its model, optimizer, and that of the next stage."""
    model = net(dtype)
    before = cls.from_model(model, lrm.plan(model, **first), lr=1e-2)
    train(model, before, 3)
    return model, before, cls.from_model(model, lrm.plan(model, **second), lr=1e-3)


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_raw_weights_fixed_by_the_plan_stay_fixed_when_a_full_state_is_loaded(cls):
    fixing = {"rules": [Rule("weight", train="multipliers")]}
    model, before, after = stages(cls, {}, fixing)
    saved = copy.deepcopy(before.state_dict())
    with pytest.raises(ValueError, match=r'saved with train="all" for .*is train="multipliers" he'):
        after.load_state_dict(saved)
    assert not after.state
    after.load_state_dict(saved, from_plan=before.plan)
    mults = lrm.multipliers(before)
    for name, parts in lrm.multipliers(after).items():
        assert all(torch.equal(value, mults[name][part]) for part, value in parts.items())
    raws = {name: raw.clone() for name, raw in lrm.optim.raw_weights(before).items()}
    train(model, after, 3)
    assert all(
        group.get("train") == "multipliers" or "up.bias" in group["param_names"]
        for group in after.param_groups
    )
    for name in ("embed.weight", "up.weight", "down.weight"):
        assert torch.equal(lrm.optim.raw_weights(after)[name], raws[name])
        assert "exp_avg" not in after.state[model.get_parameter(name)]
        assert not torch.equal(lrm.multipliers(after)[name]["row"], mults[name]["row"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_full_training_resumes_from_multipliers_over_fixed_weights(cls, dtype):
    model, before, after = stages(cls, {"train": "multipliers"}, {}, dtype)
    saved, kept = copy.deepcopy(before.state_dict()), weights(model)
    with pytest.raises(ValueError, match=r'saved with train="multipliers" for .*from_plan=plan_of'):
        after.load_state_dict(saved)
    after.load_state_dict(saved, from_plan=before.plan)
    raws = {name: raw.clone() for name, raw in lrm.optim.raw_weights(before).items()}
    mults = lrm.multipliers(before)
    assert lrm.multipliers(after).keys() == mults.keys()
    for name, parts in lrm.multipliers(after).items():
        assert all(torch.equal(value, mults[name][part]) for part, value in parts.items())
    for name, raw in lrm.optim.raw_weights(after).items():
        assert torch.equal(raw, raws.get(name, kept[name].to(raw.dtype)))
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    # One base for all groups, those of the parameters that had no state too.
    assert [group["lr"] for group in after.param_groups] == [1e-2] * len(after.param_groups)
    assert not any("train" in group for group in after.param_groups)
    decays = {group["kind"]: group["weight_decay"] for group in after.param_groups}
    assert decays == {"matrix": 0.1, "vector": 0.0}
    train(model, after, 1)
    for name, raw in lrm.optim.raw_weights(after).items():
        before_step = raws.get(name, kept[name].to(raw.dtype))
        assert not torch.equal(raw, before_step), name
        assert (raw - before_step).abs().max() < 0.05


def test_moments_start_at_zero_where_the_raw_weight_was_fixed():
    """AdamW of a raw weight whose averages are 0 at the count of its multipliers, by hand."""
    model, before, after = stages(lrm.AdamW, {"train": "multipliers"}, {}, torch.float64)
    after.load_state_dict(copy.deepcopy(before.state_dict()), from_plan=before.plan)
    parts, raw = lrm.multipliers(after)["up.weight"], lrm.optim.raw_weights(after)["up.weight"]
    raw = raw.clone()
    train(model, after, 1)
    grad = parts["row"][:, None] * parts["col"] * model.up.weight.grad
    mean, square = 0.1 * grad / (1 - 0.9**4), 0.05 * grad**2 / (1 - 0.95**4)
    expected = raw * (1 - 1e-2 * 0.1) - 1e-2 * mean / (square.sqrt() + 1e-8)
    actual = lrm.optim.raw_weights(after)["up.weight"]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_a_stage_may_change_its_plan_as_its_weights_are_trained():
    first = {"placement": "scalar", "train": "multipliers"}
    model, before, after = stages(lrm.AdamW, first, {}, torch.float64)
    kept = weights(model)
    after.load_state_dict(copy.deepcopy(before.state_dict()), from_plan=before.plan)
    for name, raw in lrm.optim.raw_weights(after).items():
        matrix = after.plan[name].matrix
        made = raw if matrix is None else lrm.effective(matrix, raw, lrm.multipliers(after)[name])
        torch.testing.assert_close(made, kept[name], rtol=1e-14, atol=0)
    train(model, after, 1)


def test_training_resumes_from_a_state_saved_before_a_module_was_unfrozen():
    model = net()
    model.up.requires_grad_(False)
    before = lrm.AdamW.from_model(model, lr=1e-2)
    train(model, before, 3)
    model.up.requires_grad_(True)
    after = lrm.AdamW.from_model(model, lr=1e-2)
    with pytest.raises(ValueError, match=r"differ at up\.bias: .* frozen .* with from_plan="):
        after.load_state_dict(before.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()), from_plan=before.plan)
    row = lrm.multipliers(before)["down.weight"]["row"]
    assert torch.equal(lrm.multipliers(after)["down.weight"]["row"], row)
    assert (lrm.multipliers(after)["up.weight"]["row"] == 1).all()
    train(model, after, 1)
    assert (lrm.multipliers(after)["up.weight"]["row"] != 1).any()


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_a_state_of_another_grouping_raises_and_loads_as_the_error_says(cls):
    scaled = {"rules": [Rule("down.weight", lr_scale=0.1)]}
    model, before, after = stages(cls, {}, scaled)
    saved = copy.deepcopy(before.state_dict())
    with pytest.raises(ValueError, match=r"grouped otherwise .*from_plan=.*then set the groups"):
        after.load_state_dict(saved)
    assert not after.state
    # What the message names.
    after.load_state_dict(saved, from_plan=before.plan)
    (group,) = (g for g in after.param_groups if g["param_names"] == ["down.weight"])
    assert (group["lr"], group["raw_lr_scale"]) == (1e-2, 1.0)
    group["raw_lr_scale"] = 0.1
    # The same run, which was made with the rule.
    other = net()
    other.load_state_dict(model.state_dict())
    expected = cls.from_model(other, lr=1e-2)
    expected.load_state_dict(saved)
    before_step = lrm.optim.raw_weights(expected)["down.weight"].clone()
    train(model, after, 1)
    train(other, expected, 1)
    kept = weights(other)
    for name, p in model.named_parameters():
        assert name == "down.weight" or torch.equal(p, kept[name])
    # A tenth of the step.
    step, tenth = (lrm.optim.raw_weights(o)["down.weight"] - before_step for o in (expected, after))
    torch.testing.assert_close(tenth, 0.1 * step, rtol=1e-3, atol=1e-7)
    ours, theirs = (lrm.multipliers(o)["down.weight"] for o in (after, expected))
    assert all(torch.equal(value, theirs[part]) for part, value in ours.items())


def held_by(optimizer):
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("cls", [lrm.AdamW, lrm.Muon])
def test_a_module_unfrozen_later_joins_the_optimizer_with_its_multipliers(cls):
    """As if its weights had had no gradient until then."""
    model, other = net(), net()
    model.up.requires_grad_(False)
    optimizer, expected = (cls.from_model(each, lr=1e-2) for each in (model, other))
    for _ in range(3):
        train(model, optimizer, 1)
        expected.zero_grad()
        other(IDS).square().mean().backward()
        other.up.weight.grad = other.up.bias.grad = None
        expected.step()
    model.up.requires_grad_(True)
    held = held_by(optimizer)
    for group in lrm.param_groups(model, lrm.plan(model)):
        group["params"] = [(name, p) for name, p in group["params"] if id(p) not in held]
        if group["params"]:
            optimizer.add_param_group({**group, "lr": 1e-2})
    assert optimizer.plan == expected.plan
    train(model, optimizer, 3)
    train(other, expected, 3)
    kept, mults = weights(other), lrm.multipliers(expected)
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    for name, parts in lrm.multipliers(optimizer).items():
        assert all(torch.equal(value, mults[name][part]) for part, value in parts.items())
    assert optimizer.state[model.up.weight]["step"] == 3
    assert optimizer.state[model.down.weight]["step"] == 6


def test_a_plan_made_after_freezing_agrees_with_that_of_the_trained_module():
    model = net()
    optimizer = lrm.AdamW([lrm.param_groups(model, lrm.plan(model))[0]], lr=1e-2)
    trained = {name: optimizer.plan[name] for name in optimizer.param_groups[0]["param_names"]}
    for name in trained:
        model.get_parameter(name).requires_grad_(False)
    for group in lrm.param_groups(model, lrm.plan(model)):
        optimizer.add_param_group({**group, "lr": 1e-2})
    assert {name: optimizer.plan[name] for name in trained} == trained


@pytest.mark.parametrize("given", [list, iter, lambda params: next(iter(params))])
def test_a_group_without_names_raises_and_names_param_groups(given):
    """What Lightning's `BaseFinetuning.unfreeze_and_add_param_group` adds."""
    model = net()
    model.up.requires_grad_(False)
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    model.up.requires_grad_(True)
    with pytest.raises(ValueError, match=r"without names cannot be added.*lrm\.param_groups\(mod"):
        optimizer.add_param_group({"params": given(model.up.parameters()), "lr": 1e-3})
    assert id(model.up.weight) not in held_by(optimizer)
