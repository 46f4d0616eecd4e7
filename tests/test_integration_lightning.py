"""Lightning and Fabric train, clip, resume and log as a plain loop does, bit for bit."""

import csv
import warnings

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm

pytest.importorskip("lightning")
with warnings.catch_warnings():
    # Lightning imports parts of torch and of itself that announce their retirement.
    warnings.simplefilter("ignore")
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from learnable_multipliers.integrations.lightning import MultiplierCallback, MultiplierClipping

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS, BATCHES, CLIP = 4, 2, 0.05


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6, bias=False))


def loss_of(model, x):
    return (model(x) - x.roll(1, -1)).square().mean()


def make_optimizer(model, make=lrm.AdamW, **settings):
    return make.from_model(model, lr=0.02, weight_decay=0.1, **settings)


def batches():
    x = torch.randn(BATCHES, 5, 6, generator=torch.Generator().manual_seed(1))
    return list(x)


def plain_run(make=lrm.AdamW, epochs=EPOCHS, max_grad_norm=CLIP):
    """Return model, optimizer, norms and health of a plain loop."""
    model = make_model()
    optimizer = make_optimizer(model, make, max_grad_norm=max_grad_norm)
    monitor, norms, health = lrm.Monitor(optimizer), [], []
    for _ in range(epochs):
        for x in batches():
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(optimizer.grad_norm))
            health.append(monitor.health().metrics())
    return model, optimizer, norms, health


def assert_same(model, optimizer, other_model, other):
    """Effective weights, raw weights and multipliers are equal in every bit."""
    for ours, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    optimizer, other = lrm.unwrap(optimizer), lrm.unwrap(other)
    pairs = zip(optimizer.raw_weights().values(), other.raw_weights().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    ours, theirs = (list(lrm.multipliers(o).values()) for o in (optimizer, other))
    assert ours
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(a[part], b[part]) for part in a)
        assert any(bool((value != 1).any()) for value in a.values())


class Unmixed(L.LightningModule):
    """A module that takes its optimizer from us, and leaves clipping to Lightning."""

    def __init__(self, make=lrm.AdamW):
        super().__init__()
        self.net, self.make = make_model(), make

    def training_step(self, x, _):
        loss = loss_of(self.net, x)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return make_optimizer(self.net, self.make)


class Module(MultiplierClipping, Unmixed):
    """The same, clipping by the raw norm."""


def fit(folder, module, epochs=EPOCHS, resume=None, callbacks=(), **settings):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=CSVLogger(folder, name="", version=f"to_{epochs}"),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        **settings,
    )
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer


def logged(folder, epochs=EPOCHS):
    """Return what was logged by step; the file has a line for each source of metrics."""
    by_step = {}
    with (folder / f"to_{epochs}" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            by_step.setdefault(int(row["step"]), {}).update({k: v for k, v in row.items() if v})
    return by_step


@pytest.mark.parametrize("make", [lrm.AdamW, lrm.Muon])
def test_lightning_trains_as_a_plain_loop(make, tmp_path):
    module = Module(make)
    trainer = fit(tmp_path, module, gradient_clip_val=CLIP)
    model, optimizer, _, _ = plain_run(make)
    assert_same(module.net, trainer.optimizers[0], model, optimizer)
    # What the module itself sees is Lightning's wrapper, which passes for an optimizer of ours.
    assert lrm.unwrap(module.optimizers()) is trainer.optimizers[0]


def test_lightning_clips_the_raw_norm_and_logs_it(tmp_path):
    fit(tmp_path, Module(), gradient_clip_val=CLIP, callbacks=[MultiplierCallback()])
    _, _, norms, _ = plain_run()
    rows = logged(tmp_path)
    assert [float(rows[i]["raw_grad_norm"]) for i in range(len(norms))] == norms
    assert min(norms) > CLIP
    assert norms != plain_run(max_grad_norm=None)[2]


def test_lightning_resumes_bit_for_bit(tmp_path):
    save = ModelCheckpoint(tmp_path / "saved", filename="half")
    fit(tmp_path, Module(), 2, callbacks=[save, MultiplierCallback()], gradient_clip_val=CLIP)
    module, callback = Module(), MultiplierCallback()
    torch.nn.init.zeros_(module.net[0].weight)
    half = str(tmp_path / "saved" / "half.ckpt")
    trainer = fit(tmp_path, module, resume=half, callbacks=[callback], gradient_clip_val=CLIP)
    model, optimizer, _, health = plain_run()
    assert_same(module.net, trainer.optimizers[0], model, optimizer)
    assert callback.health.metrics() == health[-1]
    whole = MultiplierCallback()
    fit(tmp_path / "whole", Module(), callbacks=[whole], gradient_clip_val=CLIP)
    assert callback.state_dict() == whole.state_dict()


def test_lightning_logs_health_at_its_own_steps(tmp_path):
    trainer = fit(
        tmp_path,
        Module(),
        gradient_clip_val=CLIP,
        callbacks=[MultiplierCallback(every=2, matrices=True)],
    )
    _, optimizer, _, health = plain_run()
    rows = logged(tmp_path)
    for step, expected in enumerate(health):
        assert rows[step]["loss"]
        for name, value in expected.items():
            # Lightning counts from 0: the second step is its step 1.
            assert rows[step].get(name) == (str(value) if step % 2 else None)
    assert float(trainer.callback_metrics["noise/matrices"]) == pytest.approx(
        health[-1]["noise/matrices"]
    )
    row = lrm.multipliers(optimizer)["0.weight"]["row"]
    last = rows[len(health) - 1]
    assert float(last["multipliers/0.weight.row/largest"]) == float(row.abs().max())


def test_lightning_reports_what_it_cannot_clip(tmp_path):
    with pytest.warns(UserWarning, match="derive the module from MultiplierClipping"):
        fit(tmp_path, Unmixed(), 1, gradient_clip_val=CLIP, callbacks=[MultiplierCallback()])
    with pytest.raises(ValueError, match="raw ones are clipped by their norm"):
        fit(tmp_path, Module(), 1, gradient_clip_val=CLIP, gradient_clip_algorithm="value")


# -- Fabric -----------------------------------------------------------------------------------


def fabric_run(folder, epochs, resume=None, clip="inside", make=lrm.AdamW):
    fabric = L.Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(folder, name="", version="f"))
    bare = make_model()
    inside = CLIP if clip == "inside" else None
    model, optimizer = fabric.setup(bare, make_optimizer(bare, make, max_grad_norm=inside))
    monitor, start = lrm.Monitor(optimizer), 0
    if resume is not None:
        left = fabric.load(resume, {"model": model, "optimizer": optimizer})
        monitor.load_state_dict(left["monitor"])
        start = left["epoch"]
    norms = []
    for _ in range(start, epochs):
        for x in batches():
            fabric.backward(loss_of(model, x))
            if clip == "by hand":
                norms.append(float(lrm.clip_grad_norm_(optimizer, CLIP)))
            elif clip == "fabric":
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=CLIP)))
            optimizer.step()
            if clip == "inside":
                norms.append(float(optimizer.grad_norm))
            optimizer.zero_grad()
            fabric.log_dict(monitor.health().metrics(), step=len(norms) - 1)
    fabric.logger.save()
    saved = {"model": model, "optimizer": optimizer, "epoch": epochs}
    fabric.save(folder / "fabric.ckpt", {**saved, "monitor": monitor.state_dict()})
    return bare, optimizer, norms, monitor


@pytest.mark.parametrize("make", [lrm.AdamW, lrm.Muon])
def test_fabric_trains_as_a_plain_loop(make, tmp_path):
    model, optimizer, norms, _ = fabric_run(tmp_path, EPOCHS, make=make)
    plain, plain_optimizer, plain_norms, _ = plain_run(make)
    assert_same(model, optimizer, plain, plain_optimizer)
    assert norms == plain_norms


def test_fabric_clips_the_raw_norm_through_us_and_another_by_itself(tmp_path):
    model, optimizer, norms, _ = fabric_run(tmp_path, EPOCHS, clip="by hand")
    plain, plain_optimizer, plain_norms, _ = plain_run()
    assert norms[0] == plain_norms[0]
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    norms = fabric_run(tmp_path, EPOCHS, clip="fabric")[2]
    # Multipliers are 1 in the first step; from then on its norm is not the raw one.
    assert norms[0] == pytest.approx(plain_norms[0])
    assert norms[-1] != pytest.approx(plain_norms[-1], rel=1e-4)


def test_fabric_resumes_bit_for_bit_and_logs_health(tmp_path):
    fabric_run(tmp_path, 2)
    model, optimizer, _, monitor = fabric_run(tmp_path, EPOCHS, resume=tmp_path / "fabric.ckpt")
    plain, plain_optimizer, _, health = plain_run()
    assert_same(model, optimizer, plain, plain_optimizer)
    assert monitor.health().metrics() == health[-1]
    with (tmp_path / "f" / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    for name, value in health[-1].items():
        assert last[name] == str(value)


def test_methods_of_fabrics_optimizer_reach_ours(tmp_path):
    """Its class is made on the fly from ours, so that it has our methods and none of our state."""
    bare = make_model()
    fabric = L.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(bare, make_optimizer(bare))
    assert isinstance(optimizer, lrm.AdamW)
    inner = lrm.unwrap(optimizer)
    assert optimizer.plan is inner.plan
    for x in batches():
        fabric.backward(loss_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            bare[0].weight.mul_(2)
        optimizer.sync_from_model_()
    for name, parts in optimizer.multipliers().items():
        for part, value in parts.items():
            assert torch.equal(value, inner.multipliers()[name][part])


class WithHead(nn.Module):
    """Only the name of its head, at the top, shows that it is one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["eager", "compiled"])
def test_a_model_from_fabric_has_the_plan_and_the_state_of_the_bare_one(wrap):
    fabric = L.Fabric(accelerator="cpu", devices=1)
    bare = WithHead()
    model = fabric.setup(wrap(bare))
    assert lrm.plan(model).to_json() == lrm.plan(bare).to_json()
    rules = [lrm.Rule(r"^head\.weight", "col")]
    assert lrm.plan(model, rules=rules).to_json() == lrm.plan(bare, rules=rules).to_json()
    optimizers = [lrm.AdamW.from_model(each, lr=1e-2) for each in (bare, model)]
    bare(torch.ones(2, 8)).square().sum().backward()
    optimizers[0].step()
    state = optimizers[0].state_dict()
    optimizers[1].load_state_dict(state)
    torch.testing.assert_close(optimizers[1].state_dict()["state"], state["state"], rtol=0, atol=0)


def test_a_group_that_finetuning_adds_without_names_raises_and_names_param_groups():
    from lightning.pytorch.callbacks import BaseFinetuning

    model = make_model()
    BaseFinetuning.freeze(model[0])
    optimizer = make_optimizer(model)
    with pytest.raises(ValueError, match=r"without names cannot be added.*lrm\.param_groups"):
        BaseFinetuning.unfreeze_and_add_param_group(model[0], optimizer)
