"""Torch's own optimizers, read as they are: numbers like ours."""

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm

LR, DECAY, STEPS = 0.05, 0.5, 200
BETAS = (0.9, 0.95)


class Stack(nn.Module):
    """A block of matrices and a norm; large enough for an rms within a percent or so."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.norm = nn.RMSNorm(64)


def torch_groups(model):
    """Decay for matrices, none for vectors, as our groups have it."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]


def adamw(model, **settings):
    return torch.optim.AdamW(torch_groups(model), lr=LR, betas=BETAS, **settings)


def on_noise(model, optimizer, steps=STEPS, planted=None, seed=0):
    """Train on N(0,1) gradients; the planted tensor has a gradient that hardly changes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
            if name == planted:
                parameter.grad += 3.0
        optimizer.step()
    return optimizer


def made(seed=0):
    torch.manual_seed(seed)
    return Stack()


# -- the same numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("lrs", [None, LR, [LR] * STEPS], ids=["none", "one", "all"])
@pytest.mark.parametrize("variant", ["foreach", "fused", "tensor lr", "single"])
def test_torch_adamw_reads_like_ours_without_multipliers(variant, lrs):
    settings = {} if variant in ("single", "tensor lr") else {variant: True}
    plain, own = made(), made()
    theirs = adamw(plain, **settings)
    ours = lrm.AdamW(
        lrm.param_groups(own, lrm.plan(own, "none"), weight_decay=DECAY), lr=LR, betas=BETAS
    )
    on_noise(plain, theirs)
    on_noise(own, ours)
    if variant == "tensor lr":
        for group in theirs.param_groups:
            group["lr"] = torch.tensor(LR, dtype=torch.float64)
    diagnosis, expected = lrm.diagnose(theirs, plain, lrs=lrs), lrm.diagnose(ours, lrs=lrs)
    assert len(diagnosis.readings) == len(expected.readings) == 4
    for reading in diagnosis.readings:
        same = expected[reading.name]
        assert (reading.verdict, reading.steps, reading.role) == (
            same.verdict,
            same.steps,
            same.role,
        )
        for field in ("measured", "predicted", "settling", "indicator", "error"):
            ones = getattr(same, field)
            if ones is None:
                assert getattr(reading, field) is None
            else:
                assert getattr(reading, field) == pytest.approx(ones, rel=2e-5)
    assert [diagnosis[name].verdict for name in ("up_proj.weight", "norm.weight")] == [
        "trapped",
        "open",
    ]
    assert bool(diagnosis.assumptions) == (lrs is None)
    # What users of our own optimizers see has nothing new.
    assert set(expected.to_dict()) == {"readings", "rows"}


@pytest.mark.parametrize("rule", [None, "original", "match_rms_adamw"])
def test_torch_muon_is_predicted_like_ours(rule):
    torch.manual_seed(0)
    shapes = {"up_proj": (96, 32), "down_proj": (32, 96), "gate_proj": (48, 48)}
    model = nn.Module()
    for name, (out, into) in shapes.items():
        model.add_module(name, nn.Linear(into, out, bias=False))
    theirs = torch.optim.Muon(model.parameters(), lr=LR, weight_decay=DECAY, adjust_lr_fn=rule)
    on_noise(model, theirs, 150)
    diagnosis = lrm.diagnose(theirs, model, lrs=[LR] * 150)
    ours = lrm.Muon.from_model(
        model, "none", lr=LR, weight_decay=DECAY, adjust_lr=rule or "original"
    )
    on_noise(model, ours, 150)
    expected = lrm.diagnose(ours, lrs=[LR] * 150)
    for name in shapes:
        reading = diagnosis[f"{name}.weight"]
        assert reading.predicted == pytest.approx(expected[f"{name}.weight"].predicted, rel=1e-9)
        assert reading.measured == pytest.approx(reading.predicted, rel=0.06)
        assert (reading.indicator, reading.verdict) == (None, "trapped")


def test_adams_decay_is_divided_by_the_size_of_gradients():
    model = made().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=BETAS, weight_decay=0.5)
    on_noise(model, optimizer, 900)
    diagnosis = lrm.diagnose(optimizer, model)
    for name in ("up_proj.weight", "down_proj.weight"):
        assert diagnosis[name].log_ratio == pytest.approx(0, abs=0.05)
        assert diagnosis[name].verdict == "trapped"
        assert diagnosis[name].indicator == pytest.approx(1, abs=0.1)
    assert any("Adam divides its decay" in text for text in diagnosis.assumptions)


def test_a_planted_signal_is_free_and_a_young_run_is_never_trapped():
    model = made()
    optimizer = on_noise(model, adamw(model), planted="gate_proj.weight")
    diagnosis = lrm.diagnose(optimizer, model)
    assert diagnosis["gate_proj.weight"].verdict == "free"
    assert diagnosis["up_proj.weight"].verdict == "trapped"
    young = made()
    few = lrm.diagnose(on_noise(young, adamw(young), 60), young)
    reading = few["up_proj.weight"]
    assert reading.settling == pytest.approx(2 * DECAY * LR * 60, rel=0.02)
    assert (reading.verdict, reading.predicted) == ("open", None)
    assert reading.note.startswith("young: 2 wd sum(lr) is 3")
    assert "young" in str(few)


def test_what_is_assumed_of_the_past_is_said():
    model = made()
    diagnosis = lrm.diagnose(on_noise(model, adamw(model)), model)
    assert "assumed: the learning rate has always been 0.05" in str(diagnosis)


# -- a monitor --------------------------------------------------------------------------------


def test_a_monitor_follows_torch_adamw_as_it_follows_ours():
    plain, own = made(), made()
    theirs = adamw(plain)
    ours = lrm.AdamW(
        lrm.param_groups(own, lrm.plan(own, "none"), weight_decay=DECAY), lr=LR, betas=BETAS
    )
    monitors = lrm.Monitor(theirs, model=plain), lrm.Monitor(ours)
    on_noise(plain, theirs, 50)
    on_noise(own, ours, 50)
    health, expected = (monitor.health() for monitor in monitors)
    assert health.metrics() == pytest.approx(expected.metrics(), rel=1e-4)
    for one, other in zip(health.readings, expected.readings, strict=True):
        assert one.predicted == pytest.approx(other.predicted, rel=1e-6)
        assert one.note == other.note
    assert not health.ranges


def test_a_monitor_counts_the_steps_of_torch_muon():
    model = nn.Sequential(nn.Linear(48, 32, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=LR, weight_decay=DECAY)
    monitor = lrm.Monitor(optimizer, model=model)
    on_noise(model, optimizer, 120)
    (reading,) = monitor.health().readings
    assert (reading.steps, reading.verdict) == (120, "trapped")


# -- refused in words -------------------------------------------------------------------------


def test_what_cannot_be_read_raises_with_the_reason():
    model = made()
    with pytest.raises(TypeError, match=r"SGD keeps no second moment.*AdamW, Adam and Muon"):
        lrm.diagnose(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TypeError, match="RMSprop is not known here"):
        lrm.diagnose(torch.optim.RMSprop(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match="amsgrad=True"):
        lrm.diagnose(torch.optim.AdamW(model.parameters(), amsgrad=True), model)
    with pytest.raises(ValueError, match=r"AdamW has taken no step.*lrm\.Monitor"):
        lrm.diagnose(adamw(model), model)
    with pytest.raises(TypeError, match="give its model, too, to read one of torch"):
        lrm.diagnose(adamw(model))
    optimizer = on_noise(model, adamw(model), 3)
    with pytest.raises(ValueError, match=r"does not have 4 of the 4 parameters.*\(96, 64\)"):
        lrm.diagnose(optimizer, made())
    with pytest.raises(ValueError, match="lrs has 2 learning rates, but the optimizer has taken 3"):
        lrm.diagnose(optimizer, model, lrs=[LR] * 2)
    matrix = nn.Linear(4, 4, bias=False)
    muon = on_noise(matrix, torch.optim.Muon(matrix.parameters()), 2)
    with pytest.raises(ValueError, match="Muon does not count its steps: give lrs"):
        lrm.diagnose(muon, matrix)
    inputs = torch.randn(4, 16)
    chain = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    symmetries = lrm.find_symmetries(chain, lrm.plan(chain), inputs)
    with pytest.raises(ValueError, match="trains no multipliers"):
        lrm.Monitor(adamw(chain), symmetries, model=chain)
