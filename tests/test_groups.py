"""Every trainable parameter in exactly one group, with the right decay and learning rate."""

import pytest
import torch

import learnable_multipliers as lrm
from families import FAMILIES, HandWritten, build, logits, token_ids
from learnable_multipliers import Rule


def grouped(groups):
    by_name = {}
    for group in groups:
        for name, parameter in group["params"]:
            assert name not in by_name
            by_name[name] = (group, parameter)
    return by_name


@pytest.mark.parametrize("explicit", [False, True], ids=["optimizer", "explicit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_trainable_parameter_is_in_exactly_one_group(family, explicit):
    model = build(family)
    model.get_output_embeddings().requires_grad_(False)
    plan = lrm.plan(model, "symmetry-aware")
    if explicit:
        lrm.reparametrize(model, plan)
    by_name = grouped(lrm.param_groups(model, plan, weight_decay=0.1))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert by_name.keys() == trainable.keys()
    assert all(parameter is trainable[name] for name, (_, parameter) in by_name.items())
    for name, (group, _) in by_name.items():
        expected = {"matrix": 0.1, "multiplier": 2e-3, "vector": 0.0}[group["kind"]]
        assert group["weight_decay"] == expected, name


def test_mamba_vectors_and_norms_are_not_decayed():
    """Hugging Face's own grouping decays A_log, D and conv1d."""
    model = build("falcon-h1-inner-norm")
    by_name = grouped(lrm.param_groups(model, lrm.plan(model, "full"), weight_decay=0.1))
    for leaf in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight"):
        assert by_name[f"model.layers.0.mamba.{leaf}"][0]["weight_decay"] == 0.0
    assert by_name["model.layers.0.input_layernorm.weight"][0]["weight_decay"] == 0.0
    assert by_name["model.layers.0.mamba.in_proj.weight"][0]["weight_decay"] == 0.1
    assert by_name["model.embed_tokens.weight"][0]["weight_decay"] == 0.1


def test_explicit_groups_carry_their_learning_rates():
    model = HandWritten()
    rules = [Rule(r"w2", lr_scale=0.5, weight_decay=0.3), Rule("norm", lr_scale=2)]
    plan = lrm.plan(model, "full", rules)
    lrm.reparametrize(model, plan)
    groups = lrm.param_groups(model, plan, lr=1e-2, multiplier_lr_scale=4, weight_decay=0.1)
    by_name = grouped(groups)
    wq = by_name["layers.0.attention.wq.parametrizations.weight.original"][0]
    w2 = by_name["layers.0.feed_forward.w2.parametrizations.weight.original"][0]
    row = by_name["layers.0.feed_forward.w2.parametrizations.weight.0.row"][0]
    assert (wq["lr"], wq["weight_decay"]) == (1e-2, 0.1)
    assert (w2["lr"], w2["weight_decay"]) == (5e-3, 0.3)
    assert (row["lr"], row["weight_decay"]) == (4e-2, 2e-3)
    assert by_name["layers.0.ffn_norm.weight"][0]["lr"] == 2e-2
    with pytest.raises(ValueError, match="give param_groups the learning rate"):
        lrm.param_groups(model, plan, multiplier_lr_scale=4)


def test_optimizer_groups_share_one_base_rate_and_their_state_is_plain_data():
    model = HandWritten()
    plan = lrm.plan(model, "symmetry-aware", [Rule("w2", lr_scale=0.5)])
    groups = lrm.param_groups(model, plan, lr=1e-2)
    assert {group["lr"] for group in groups} == {1e-2}
    assert {group["raw_lr_scale"] for group in groups} == {1.0, 0.5}
    optimizer = lrm.AdamW(groups)
    assert optimizer.plan == plan
    for group in optimizer.state_dict()["param_groups"]:
        assert all(isinstance(v, str | int | float | list | tuple) for v in group.values())


def test_stock_adamw_trains_the_explicit_model_and_merging_keeps_what_it_learned():
    model = HandWritten()
    plan = lrm.plan(model, "full")
    lrm.reparametrize(model, plan)
    groups = lrm.param_groups(model, plan, lr=1e-2, multiplier_lr_scale=2)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    ids = token_ids()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    row = lrm.multipliers(model)["layers.0.feed_forward.w2.weight"]["row"]
    assert (row - 1).abs().max() > 0.01
    before = logits(model)
    torch.testing.assert_close(logits(lrm.merge(model)), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.SGD])
def test_another_optimizer_that_would_ignore_the_plan_raises_at_its_first_step(other):
    model = HandWritten()
    optimizer = other(lrm.param_groups(model, lrm.plan(model), weight_decay=0.1), lr=1e-2)
    model(token_ids()).square().mean().backward()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=f"{other.__name__} ignores the plan"):
        optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old, rtol=0, atol=0)


def test_another_optimizer_takes_the_groups_of_a_plan_without_multipliers():
    ours, theirs = HandWritten(), HandWritten()
    theirs.load_state_dict(ours.state_dict())
    grouped = lrm.param_groups(theirs, lrm.plan(theirs, "none"), weight_decay=0.1)
    optimizers = [
        lrm.AdamW.from_model(ours, "none", lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW(grouped, lr=1e-2, betas=(0.9, 0.95)),
    ]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        model(token_ids()).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(logits(ours), logits(theirs))


def test_groups_of_another_models_plan_raise():
    plan = lrm.plan(build("llama"), "full")
    with pytest.raises(ValueError, match="does not fit"):
        lrm.param_groups(HandWritten(), plan)
    model = HandWritten()
    lrm.reparametrize(model, lrm.plan(model, "full"))
    with pytest.raises(ValueError, match="does not fit the model, which misses"):
        lrm.param_groups(model, plan)


def test_parameter_added_after_planning_raises():
    model = HandWritten()
    plan = lrm.plan(model, "full")
    lrm.reparametrize(model, plan)
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"beyond the plan, extra\.weight, extra\.bias"):
        lrm.param_groups(model, plan)


def test_loops_that_read_lr_scale_from_groups_scale_a_raw_weight_once():
    """The schedule of MAE, BEiT and timm: `group["lr"] = lr * group["lr_scale"]`."""
    model = HandWritten()
    optimizer = lrm.AdamW.from_model(model, rules=[Rule("w2", lr_scale=0.1)], lr=1.0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group["lr_scale"] if "lr_scale" in group else 1e-2
    for state in optimizer.parameter_states():
        scale = 0.1 if "w2" in state.name else 1.0
        assert optimizer.raw_lr(state.group, state.matrix) == pytest.approx(1e-2 * scale)
        assert state.group["lr"] * state.group["multiplier_lr_scale"] == 1e-2
