"""The coordinate check: its parts by hand, and table 1 against models that are trained."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers import mup
from learnable_multipliers.equilibrium import equilibrium_rms
from learnable_multipliers.mup._coordinates import QUANTITIES

# -- its parts -------------------------------------------------------------------------------


def test_exponent_of_a_power_law_and_its_error():
    widths = [32, 64, 128, 256]
    exact = mup.fit_exponent(widths, [3.0 * width**-0.7 for width in widths])
    assert exact.value == pytest.approx(-0.7)
    assert exact.error == pytest.approx(0, abs=1e-12)
    # Residuals +-e about a slope of 0 at x = 0, 1, 2, 3 times log 2: by hand.
    e = 0.1
    noisy = mup.fit_exponent(widths, [math.exp(r) for r in (e, -e, -e, e)])
    assert noisy.value == pytest.approx(0, abs=1e-12)
    assert noisy.error == pytest.approx(math.sqrt(4 * e**2 / 2 / 5) / math.log(2))


def one_look(weight, x):
    """Return what the check sees of y = W x, without training it anywhere."""
    model = nn.Sequential(nn.Linear(*weight.T.shape, bias=False)).to(weight.dtype)
    model[0].weight.data.copy_(weight)

    def prepare(model, width):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        probe = mup.Probe(weight="0.weight", label="layer", multiplier=0.25)
        return mup.Training(
            optimizer=optimizer,
            loss=lambda batch: model(batch).square().mean(),
            batches=iter([x] * 100),
            probes=[probe],
        )

    runs = mup.coordinate_check(lambda width: model, prepare, [1, 2], steps=1, measurements=1)
    return runs[0].coordinates[0]


def test_alignment_is_1_along_one_direction_and_falls_by_the_root_of_d_at_random():
    x = torch.randn(1, 400, dtype=torch.float64)
    aligned = one_look(torch.randn(300, 1, dtype=torch.float64) * x, x)
    assert aligned.alignment == pytest.approx(1.0, rel=1e-6)
    # A gradient step on one example is of rank one along it, too.
    assert aligned.update_alignment == pytest.approx(1.0, rel=1e-4)
    random = one_look(torch.randn(300, 400, dtype=torch.float64), torch.randn(50, 400).double())
    assert random.alignment == pytest.approx(400**-0.5, rel=0.02)


# -- training --------------------------------------------------------------------------------

WIDTHS = (32, 64, 128, 256, 512)
# The widest is the base: under the LR recipe narrower ones learn faster and none slower, so that
# all are in equilibrium after 2 wd lr steps = 5.8 relaxations. Rate over decay is such that |y| is
# about 1 there: an equilibrium far from what the loss wants is not kept, and table 1 not either.
BASE, LR, WEIGHT_DECAY, STEPS, BATCH = 512, 1.2e-3, 6.0, 400, 32


class Classifier(nn.Module):
    """features -> width -> width -> classes, with |x| = 1 in front of either scaled layer."""

    def __init__(self, width, num_features, multiplier):
        super().__init__()
        self.multiplier = multiplier
        self.embed = nn.Linear(num_features, width, bias=False)
        self.hidden = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, num_features, bias=False)

    def forward(self, features):
        x = F.rms_norm(self.embed(features), (self.hidden.in_features,))
        x = x + F.relu(self.multiplier * self.hidden(x))
        x = F.rms_norm(x, (self.hidden.in_features,))
        return self.multiplier * self.head(x)


def teacher(num_features):
    """Yield features and labels drawn from a fixed random network: noise that never ends."""
    first = torch.randn(num_features, 64) / num_features**0.5
    second = torch.randn(64, num_features) / 8
    while True:
        features = torch.randn(BATCH, num_features)
        logits = 2 * torch.tanh(features @ first) @ second
        yield features, logits.softmax(-1).multinomial(1)[:, 0]


def trained(recipe, num_features=32, seeds=(0,), widths=WIDTHS):
    """Train the classifier at every width under one recipe."""

    def build_at(width):
        scaling = mup.scale_layer(mup.RECIPES[recipe], width, BASE)
        return Classifier(width, num_features, scaling.multiplier)

    def prepare(model, width):
        scaling = mup.scale_layer(mup.RECIPES[recipe], width, BASE)
        lr, decay = LR * scaling.lr, WEIGHT_DECAY * scaling.weight_decay
        matrices = [model.hidden.weight, model.head.weight]
        nn.init.normal_(model.embed.weight, std=num_features**-0.5)
        for matrix in matrices:
            # Off the equilibrium, so that it has to be found.
            nn.init.normal_(matrix, std=equilibrium_rms(lr, decay) / 2)
        groups = [
            {"params": matrices, "lr": lr, "weight_decay": decay},
            {"params": [model.embed.weight], "lr": LR / 3, "weight_decay": WEIGHT_DECAY},
        ]
        return mup.Training(
            optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-15),
            loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
            batches=teacher(num_features),
            probes=[
                mup.Probe(weight=f"{name}.weight", multiplier=model.multiplier)
                for name in ("hidden", "head")
            ],
        )

    return mup.coordinate_check(build_at, prepare, widths, steps=STEPS, seeds=seeds)


@pytest.fixture(scope="module")
def runs():
    """Train under every recipe, once for all tests."""
    with torch.random.fork_rng():
        return {name: trained(name) for name in mup.RECIPES}


# Recipes differ by a half at least in what tells them apart. What remains is real: the narrowest
# model has lr * wd = 0.12 under the LR recipe, where sqrt(lr wd) is no longer small.
TOLERANCE = 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lr", "lr-wd", "multiplier"])
def test_exponents_of_table_1_come_out_of_training(runs, name):
    for comparison in mup.compare(runs[name], mup.RECIPES[name]):
        assert abs(comparison.deviation) < TOLERANCE, comparison
        assert comparison.measured.error < 0.05


@pytest.mark.slow
def test_a_wrong_recipe_is_seen_as_wrong(runs):
    def wrong(trained_by, expected_of):
        comparisons = mup.compare(runs[trained_by], mup.RECIPES[expected_of])
        return {(c.label, c.quantity) for c in comparisons if c.differs(TOLERANCE)}

    for layer in ("hidden", "head"):
        for unscaled in ("none", "lr"):
            assert (layer, "output") in wrong(unscaled, "multiplier")
            assert (layer, "relative_update") in wrong(unscaled, "multiplier")
        assert (layer, "weight") in wrong("multiplier", "lr-wd")
    for name in ("lr", "lr-wd", "multiplier"):
        assert wrong(name, name) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", mup.RECIPES)
def test_exponents_of_products_add_up(runs, name):
    for row in mup.exponents(runs[name]).values():
        fits = {quantity: fit.value for quantity, fit in row.items()}
        parts = ("multiplier", "fan_in", "alignment", "weight", "input")
        assert fits["output"] == pytest.approx(sum(fits[part] for part in parts), abs=1e-9)
        relative = fits["update"] + fits["update_alignment"] - fits["weight"] - fits["alignment"]
        assert fits["relative_update"] == pytest.approx(relative, abs=1e-9)


@pytest.mark.slow
def test_scaling_rate_and_decay_is_scaling_the_multiplier(runs):
    # W' = s W, lr' = s lr, wd' = wd / s: Adam takes the same path, seen through other numbers.
    for one, other in zip(runs["lr-wd"], runs["multiplier"], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        for a, b in zip(one.coordinates, other.coordinates, strict=True):
            assert a.weight == pytest.approx(b.multiplier * b.weight, rel=1e-2)
            assert a.relative_update == pytest.approx(b.relative_update, rel=2e-2)


@pytest.mark.slow
def test_alignment_falls_with_width_where_features_outnumber_it():
    widths = (32, 64, 128, 256, 384)
    for num_features, lowest, highest in ((8, -0.05, 0.05), (512, -0.5, -0.25)):
        row = mup.exponents(trained("multiplier", num_features, widths=widths))["hidden"]
        assert lowest < row["alignment"].value < highest, num_features
        assert lowest < row["update_alignment"].value < highest, num_features
        assert row["weight"].value == pytest.approx(0, abs=TOLERANCE)


@pytest.mark.slow
def test_results_are_plain_data_and_a_table(runs):
    plain = json.loads(json.dumps([asdict(run) for run in runs["lr"]]))
    assert plain[4]["coordinates"][1]["weight"] == runs["lr"][4].coordinates[1].weight
    text = mup.table(runs["none"], mup.RECIPES["multiplier"])
    heading, expected, hidden, head, losses = text.splitlines()
    assert expected.split()[1:] == ["-1.00", *["+0.00"] * 7]
    fits = mup.exponents(runs["none"])
    for line, label in ((hidden, "hidden"), (head, "head")):
        name, *cells = line.split()
        assert name == label
        assert len(cells) == len(QUANTITIES)
        fit = fits[label]["output"]
        assert cells[4] == f"{fit.value:+.2f}({100 * fit.error:.0f})*"
        assert cells[0] == "+0.00(0)*"
    assert "not yet in equilibrium" not in text
    early = [
        replace(run, coordinates=tuple(replace(c, relaxations=3.9) for c in run.coordinates))
        for run in runs["none"]
    ]
    assert "hidden at width 32 (3.9)" in mup.table(early, mup.RECIPES["none"])


def scalar_training(model, width):
    rules = [lrm.Rule("hidden|head", "scalar", init=0.5, init_keeps="raw"), lrm.Rule("", "none")]
    plan = lrm.initialize_(model, lrm.plan(model, rules=rules))
    optimizer = lrm.AdamW(lrm.param_groups(model, plan, weight_decay=0.5), lr=0.01)
    return mup.Training(
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=teacher(8),
        probes=[mup.Probe(weight="hidden.weight", multiplier=3.0)],
    )


def test_learned_multipliers_are_part_of_s_and_not_of_the_weight():
    kept = {}

    def prepare(model, width):
        training = scalar_training(model, width)
        kept[width] = model, training.optimizer
        return training

    runs = mup.coordinate_check(
        lambda d: Classifier(d, 8, 3.0), prepare, [8, 16], steps=8, measurements=1
    )
    for run in runs:
        model, optimizer = kept[run.width]
        (row,) = run.coordinates
        learned = lrm.multipliers(optimizer)["hidden.weight"]["scalar"].item()
        # The look comes before the last step, which moves s by at most lr * 1 or so.
        assert row.multiplier == pytest.approx(3 * learned, abs=0.1)
        assert learned != pytest.approx(0.5, abs=1e-3)
        effective = model.hidden.weight.square().mean().sqrt().item()
        assert row.weight == pytest.approx(effective / learned, rel=0.1)
        assert row.relaxations == pytest.approx(2 * 0.01 * 0.5 * 8)


def test_probes_that_see_nothing_raise():
    def check(probe):
        def prepare(model, width):
            model.unused = nn.Linear(width, width)
            optimizer = torch.optim.AdamW(model.parameters())
            return mup.Training(
                optimizer=optimizer,
                loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
                batches=teacher(8),
                probes=[probe],
            )

        mup.coordinate_check(
            lambda d: Classifier(d, 8, 1.0), prepare, [8, 16], steps=4, measurements=1
        )

    with pytest.raises(ValueError, match=r"'middle.weight', which is no matrix.*hidden.weight"):
        check(mup.Probe(weight="middle.weight"))
    with pytest.raises(ValueError, match=r"hidden.weight reads 16 features.*\(32, 8\)"):
        check(mup.Probe(weight="hidden.weight", reads="head"))
    with pytest.raises(AttributeError, match="has no attribute `norm`"):
        check(mup.Probe(weight="hidden.weight", reads="norm"))
    with pytest.raises(ValueError, match=r"unused.weight was not called.*Probe\(reads="):
        check(mup.Probe(weight="unused.weight"))
    with pytest.raises(ValueError, match="at least two widths"):
        mup.coordinate_check(lambda d: None, lambda model, d: None, [8], steps=4)
    with pytest.raises(
        ValueError, match="16 measurements do not fit into the last quarter of 40 steps"
    ):
        mup.coordinate_check(lambda d: None, lambda model, d: None, [8, 16], steps=40)
