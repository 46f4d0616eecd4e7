"""A dry run describes what the run does: counts, bytes, learning rates and the first batch."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnable_multipliers.pretrain.config import RuntimeConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.preflight.dry_run import describe
from learnable_multipliers.pretrain.trainer import memory
from learnable_multipliers.pretrain.trainer.build import make_optimizer
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.memory import (
    activation_bytes,
    estimate,
    state_bytes,
)
from learnable_multipliers.pretrain.trainer.schedule import repeated_data_warning
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, LLAMA, small_run

SIZED = replace(HYBRID, vocab_size=257)
MODELS = {
    "hybrid": SIZED,
    "llama": replace(LLAMA, vocab_size=257),
    "tied": replace(SIZED, tie_embeddings=True),
    "frozen norms": replace(SIZED, freeze_norms=True, ssm_norm=True),
    "state space alone": replace(SIZED, num_heads=0, intermediate_size=0),
}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("placement", ["none", "full", "symmetry-aware", "scalar"])
@pytest.mark.parametrize("name", MODELS)
def test_lasting_bytes_are_those_of_a_step_taken(data, tmp_path, name, placement, kind):
    config = small_run(data, tmp_path / "run", model=MODELS[name])
    settings = replace(config.optimizer, kind=kind, placement=placement)
    config = replace(config, optimizer=settings)
    model = build(config.model)
    optimizer, plan = make_optimizer(model, settings)
    told = state_bytes(config, model, plan)
    model.loss(torch.zeros(1, 9, dtype=torch.long)).total.backward()
    optimizer.step()
    found = dict.fromkeys(told, 0)
    found["weights"] = sum(p.nbytes for p in model.parameters())
    found["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    for state in optimizer.state.values():
        for key, value in state.items():
            if key == "raw":
                found["raw weights"] += value.nbytes
            elif key.partition("_")[0] in ("row", "col", "scalar"):
                found["multipliers and their moments"] += value.nbytes
            else:
                found["moments"] += value.nbytes
    assert told == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_near_the_bytes_autograd_keeps(data, tmp_path, name, dtype):
    config = small_run(data, tmp_path / "run", model=MODELS[name])
    device = choose_device(RuntimeConfig(device="cpu", dtype=dtype))
    model = build(config.model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.randint(257, (3, config.data.sequence_length + 1))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), device.autocast():
        model.loss(tokens, config.z_loss)
    expected = sum(storage.nbytes() for at, storage in kept.items() if at not in weights)
    found = activation_bytes(config.model, 3 * config.data.sequence_length, device)
    assert found == pytest.approx(expected, rel=0.1)


def test_counts_steps_and_rates_are_those_of_the_run(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=12)
    ramp = replace(
        config.schedule,
        rampup_tokens=512,
        rampup_start_sequences=2,
        rampup_increment_sequences=1,
    )
    config = replace(config, schedule=ramp)
    text = describe(config)
    trainer = Trainer(config)
    trainer.train()
    assert f"{trainer.plan.num_multipliers:,} numbers beside" in text
    assert f"{trainer.model.num_parameters:,} parameters" in text
    run = re.search(r"Run: (\d+) steps, ([\d.]+)k tokens, ([\d.]+) epochs of ([\d.]+)k", text)
    assert int(run[1]) == trainer.step
    assert float(run[2]) == pytest.approx(trainer.tokens / 1e3, abs=0.005)
    assert float(run[3]) == pytest.approx(trainer.tokens / trainer.data.num_tokens, abs=0.005)
    assert float(run[4]) == pytest.approx(trainer.data.num_tokens / 1e3, rel=0.005)
    rates = [
        float(rate)
        for rate in re.search(r"rate: first (\S+), peak (\S+), final (\S+)", text).groups()
    ]
    used = [4e-3 * step.lr_factor for step in trainer.schedule]
    assert rates == pytest.approx([used[0], max(used), used[-1]], rel=5e-3)
    assert "batch 2 -> 4 sequences of 32" in text


def test_a_run_is_warned_of_and_rejected_as_when_it_starts(data, tmp_path, monkeypatch):
    config = small_run(data, tmp_path / "run")
    assert not re.search("Warning|Does not fit", describe(config))
    num_tokens = TrainingData.open(config.data, config.model.vocab_size, config.seed).num_tokens
    config = replace(config, schedule=replace(config.schedule, tokens=10 * num_tokens))
    warning = repeated_data_warning(config.schedule, num_tokens)
    assert f"\n  Warning: {warning}\n" in describe(config)
    monkeypatch.setattr(memory, "total_memory", lambda _: 2**20)
    with pytest.raises(ValueError, match="--dry-run shows what takes how much$") as refused:
        Trainer(config)
    why, _, _ = str(refused.value).partition("; --dry-run")
    assert f"\n  Does not fit: {why}\n" in describe(config)


@pytest.mark.parametrize("micro", [0, 2])
def test_the_table_of_memory_shows_the_estimate(data, tmp_path, micro):
    config = small_run(data, tmp_path / "run", model=SIZED)
    config = replace(config, data=replace(config.data, micro_batch_sequences=micro))
    text = describe(config)
    table = text.partition("Memory on cpu (float32), estimated from shapes:\n")[2]
    shown = {
        name.strip(): float(size)
        for name, size in re.findall(r"^  (\w.+?)  +([\d.]+) MiB$", table, re.M)
    }
    estimated = estimate(config, choose_device(config.runtime))
    rows = estimated.rows | {"peak": estimated.peak}
    assert shown == {name: round(size / 2**20, 1) for name, size in rows.items()}
    # One micro-batch frees its activations while gradients are written; several add them up.
    overlap = 0 if micro else estimated.rows["gradients"]
    assert estimated.peak == sum(estimated.rows.values()) - overlap
    assert ("the larger one counts" in text) == (micro == 0)


def test_the_first_batch_is_the_text_the_run_begins_with(data, tmp_path):
    text = describe(small_run(data, tmp_path / "run"))
    head, _, shown = text.partition("First batch: ")[2].partition("\n")
    assert head == "4 sequences of 32 tokens; it begins"
    trainer = Trainer(small_run(data, tmp_path / "run"))
    batch = trainer.data.batch(0, 4, torch.device("cpu"))
    trainer.close()
    lines = [line.removeprefix("  | ") for line in shown.splitlines()]
    assert "\n".join(lines) == trainer.data.decode(batch[0].tolist())
    assert any("\n".join(lines) in path.read_text() for path in (data.parent / "text").iterdir())


def test_nothing_is_written(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    describe(small_run(data, Path("run")))
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_settings_that_cannot_work_are_rejected_as_in_a_run(data, tmp_path):
    config = small_run(data, tmp_path / "run", model=replace(HYBRID, vocab_size=100))
    with pytest.raises(ValueError, match=r"vocabulary of 257, the model one of 100"):
        describe(config)
    config = small_run(data, tmp_path / "run", model=replace(HYBRID, num_kv_heads=3))
    with pytest.raises(ValueError, match="num_kv_heads must divide"):
        describe(config)
