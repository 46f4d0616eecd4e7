"""Where a step is called changes nothing: inside autocast, or with another default device."""

import copy

import pytest
import torch

import learnable_multipliers as lrm
from test_contract import IDS, net

MADE = {
    "adamw": lambda model: lrm.AdamW.from_model(model, lr=1e-2, max_grad_norm=0.1),
    "muon": lambda model: lrm.Muon.from_model(model, lr=1e-2, max_grad_norm=0.1),
    "wrapped": lambda model: lrm.LearnableMultipliers.from_model(
        torch.optim.Adafactor, model, lr=1e-2
    ),
}
AROUND = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    # Numbers cannot be read back from it, so a tensor made there by mistake is an error.
    "default_device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("made", MADE)
def test_a_step_ignores_autocast_and_default_device(made, around):
    model = net()
    optimizer = MADE[made](model)
    other, expected = copy.deepcopy((model, optimizer))
    for _ in range(3):
        for each in (model, other):
            each.zero_grad()
            each(IDS).square().mean().backward()
        with AROUND[around]():
            optimizer.step()
        expected.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(optimizer.grad_norm, expected.grad_norm)


@pytest.mark.parametrize("around", AROUND)
def test_clipping_by_hand_ignores_autocast_and_default_device(around):
    norms = []
    for inside in (True, False):
        model = net()
        optimizer = lrm.AdamW.from_model(model, lr=1e-2)
        model(IDS).square().mean().backward()
        if inside:
            with AROUND[around]():
                norms.append(lrm.clip_grad_norm_(optimizer, 0.1))
        else:
            norms.append(lrm.clip_grad_norm_(optimizer, 0.1))
    assert torch.equal(*norms)
