"""What multipliers would learn from, in runs of torch's own optimizers that have none."""

import math

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers._multiplier import Block, Matrix, initial_values, split_gradient
from learnable_multipliers.equilibrium._gains import BETAS, Gains, gain_gradients
from parallel_training import CLOSE, backward, batch, fresh, mesh_of, parallelize

FUSED = (Block(role="query", size=4, row=True), Block(role="key", size=3, row=True))
MATRICES = {
    "linear": Matrix(shape=(7, 5), blocks=(Block(role="up", size=7, row=True),), col=True),
    "transposed": Matrix(
        shape=(5, 7), blocks=(Block(role="up", size=7, row=True),), col=True, transposed=True
    ),
    "experts": Matrix(shape=(3, 7, 5), blocks=(Block(role="up", size=7, row=True),), col=True),
    "fused": Matrix(shape=(14, 5), blocks=FUSED, repeats=2, col=True),
    "columns": Matrix(shape=(7, 5), blocks=(Block(role="head", size=7),), col=True),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_gradients_are_those_of_multipliers_at_one(kind):
    matrix = MATRICES[kind]
    weight, grad = torch.randn(2, *matrix.shape, dtype=torch.float64)
    values = initial_values(matrix, dtype=torch.float64)
    _, expected = split_gradient(matrix, weight, values, grad)
    gradients = gain_gradients(matrix, weight, grad)
    assert gradients.keys() == expected.keys()
    for part in gradients:
        torch.testing.assert_close(gradients[part], expected[part], rtol=1e-12, atol=1e-12)


class Pair(nn.Module):
    """Two matrices; none of them a head, which would have no multipliers."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(48, 96, bias=False)
        self.down_proj = nn.Linear(96, 48, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


def made():
    torch.manual_seed(0)
    return Pair()


def adamw(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.1)


def train(model, optimizer, steps=60):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 48, generator=generator)
        (model(x) - x.roll(1, -1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_indicators_are_those_of_multipliers_that_stay_at_one():
    plain, own = made(), made()
    optimizer = adamw(plain)
    monitor = lrm.Monitor(optimizer, model=plain, gains=True)
    train(plain, optimizer)
    ours = lrm.AdamW.from_model(
        own, lr=1e-2, betas=BETAS, weight_decay=0.1, multiplier_lr_scale=0.0
    )
    train(own, ours)
    expected = {(r.name, r.part): r.indicator for r in lrm.diagnose(ours).readings}
    gains = monitor.health().gains
    assert {(g.name, g.part) for g in gains} == {key for key in expected if key[1] != "weight"}
    for gain in gains:
        assert gain.indicator == pytest.approx(expected[gain.name, gain.part], rel=1e-3)
        assert gain.steps == 60


def on_noise(shared):
    """Return the indicators of a matrix whose weight stays, and whose gradients are noise.

    Numbers of a row have a part of their gradients in common, another one in each step.
    """
    model = made()
    optimizer = adamw(model, lr=0.0)
    monitor = lrm.Monitor(optimizer, model=model, gains=True)
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            common = torch.randn(len(parameter), 1, generator=generator)
            parameter.grad = noise + shared * common * parameter.detach().sign()
        optimizer.step()
    return monitor.health().gains


@pytest.mark.parametrize("shared", [0.0, 3.0])
def test_noise_has_an_indicator_of_one_also_where_a_row_shares_it(shared):
    for gain in on_noise(shared):
        # What rows share, columns have in common: few independent numbers are left of theirs.
        if shared and gain.part == "col":
            continue
        assert gain.indicator == pytest.approx(1, abs=4 * math.sqrt(2 / gain.size))


def test_a_signal_in_some_rows_shows_in_the_rows():
    model = made()
    optimizer = adamw(model, lr=0.0)
    monitor = lrm.Monitor(optimizer, model=model, gains=True)
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        # The same in each step, and too small to be seen in any single number: 0.3 of its noise.
        model.up_proj.weight.grad[::2] += 0.3 * model.up_proj.weight[::2].sign()
        optimizer.step()
    health = monitor.health()
    indicators = {(gain.name, gain.part): gain.indicator for gain in health.gains}
    weight = next(r for r in health.readings if r.name == "up_proj.weight")
    assert weight.indicator < 2 < 8 < indicators["up_proj.weight", "row"]
    assert indicators["down_proj.weight", "row"] < 2
    assert health.metrics()["gains/rows"] == pytest.approx(
        (indicators["up_proj.weight", "row"] + indicators["down_proj.weight", "row"]) / 2
    )
    assert "the same of multipliers, if there were any: rows" in str(health)


def test_following_gains_changes_no_bit_of_a_run():
    alone, followed = made(), made()
    train(alone, adamw(alone))
    optimizer = adamw(followed)
    monitor = lrm.Monitor(optimizer, model=followed, gains=True)
    train(followed, optimizer)
    for one, other in zip(alone.parameters(), followed.parameters(), strict=True):
        assert torch.equal(one, other)
    before = monitor.health().gains
    monitor.close()
    train(followed, optimizer)
    assert monitor.health().gains == before


def test_multipliers_that_are_there_need_no_gains():
    model = made()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2)
    with pytest.raises(ValueError, match=r"those that AdamW trains are in health\(\)\.readings"):
        lrm.Monitor(optimizer, gains=True)


def on_shards(way):
    """Compare the gains of a sharded model with those of a whole one."""
    if mesh_of(way) is None:
        return
    whole, _ = fresh("row+col")
    sharded, part, parts = parallelize(fresh("row+col")[0], way)
    followed = [Gains(model, model.parameters()) for model in (whole, sharded)]
    for step in range(3):
        whole.zero_grad()
        sharded.zero_grad()
        backward(whole, batch(step))
        backward(sharded, batch(step, part, parts))
        for gains in followed:
            gains.follow()
    for one, other in zip(*(gains.read() for gains in followed), strict=True):
        assert (one.name, one.part, one.size) == (other.name, other.part, other.size)
        torch.testing.assert_close(other.indicator, one.indicator, **CLOSE)


@pytest.mark.parametrize("way", ["fsdp 2", "tp 2"])
def test_sharded_weights_have_the_gains_of_whole_ones(way, ranks):
    ranks.run(on_shards, way)
