"""Layers under torch's weight_norm: scaled already, so they train as they are."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

import learnable_multipliers as lrm
from families import build, token_ids
from learnable_multipliers import Rule

NORMS = pytest.mark.parametrize(
    ("weight_norm", "scales", "direction"),
    [
        (
            parametrizations.weight_norm,
            "parametrizations.weight.original0",
            "parametrizations.weight.original1",
        ),
        pytest.param(
            old_weight_norm,
            "weight_g",
            "weight_v",
            marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
        ),
    ],
)


def net(weight_norm, **settings):
    torch.manual_seed(0)
    first = weight_norm(nn.Linear(6, 8), **settings)
    return nn.Sequential(first, nn.ReLU(), weight_norm(nn.Linear(8, 5), **settings)).double()


def train(model, optimizer, steps=4):
    inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@NORMS
@pytest.mark.parametrize("placement", ["full", "scalar", "symmetry-aware"])
def test_a_plan_says_that_weight_norm_scales_the_weight(placement, weight_norm, scales, direction):
    model = net(weight_norm)
    entries = {entry.name: entry for entry in lrm.plan(model, placement).entries}
    assert entries[f"0.{scales}"].vector
    assert entries[f"0.{scales}"].reason == "weight_norm's scales: multipliers already"
    assert entries[f"0.{direction}"].matrix is None
    assert entries[f"0.{direction}"].reason == "weight_norm scales it already"


@NORMS
@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm_trains_as_with_torch(dim, weight_norm, scales, direction):
    ours, theirs = net(weight_norm, dim=dim), net(weight_norm, dim=dim)
    optimizer = lrm.AdamW.from_model(ours, lr=1e-2, weight_decay=0.0)
    assert not lrm.multipliers(optimizer)
    train(ours, optimizer)
    betas = optimizer.param_groups[0]["betas"]
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=betas, weight_decay=0.0))
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)


@NORMS
@pytest.mark.parametrize("placement", ["full", "symmetry-aware"])
def test_a_transformer_with_some_layers_under_weight_norm(
    placement, weight_norm, scales, direction
):
    """The layers around them keep their roles and multipliers."""
    plain = {entry.name: entry for entry in lrm.plan(build("llama"), placement).entries}
    model = build("llama")
    layer = model.model.layers[0]
    for linear in (layer.self_attn.q_proj, layer.mlp.up_proj, layer.mlp.down_proj):
        weight_norm(linear)
    plan = lrm.plan(model, placement)
    for entry in plan.entries:
        assert entry.name in plain or entry.name.endswith((scales, direction))
        if entry.name in plain:
            assert entry.matrix == plain[entry.name].matrix
    optimizer = lrm.AdamW.from_model(model, plan, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(token_ids(), labels=token_ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_derived_placement_puts_nothing_on_a_direction_unless_a_rule_does():
    torch.manual_seed(0)
    normed = parametrizations.weight_norm(nn.Linear(6, 8))
    model = nn.Sequential(nn.Embedding(9, 6), normed, nn.ReLU(), nn.Linear(8, 5))
    name = "1.parametrizations.weight.original1"
    derived = lrm.plan(model, "symmetry-aware", derive=True)
    assert {e.name: e.matrix for e in derived.entries}[name] is None
    ruled = lrm.plan(model, "symmetry-aware", [Rule("original1", "col")], derive=True)
    matrix = {e.name: e.matrix for e in ruled.entries}[name]
    assert matrix is not None
    assert set(matrix.value_shapes()) == {"col"}


def test_a_plan_does_not_evaluate_other_parametrizations():
    """Reading a weight under spectral_norm would advance its power iteration."""
    model = build("llama").train()
    normed = parametrizations.spectral_norm(model.model.layers[0].self_attn.q_proj)
    before = {name: buffer.clone() for name, buffer in normed.named_buffers()}
    lrm.plan(model)
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in normed.named_buffers())
