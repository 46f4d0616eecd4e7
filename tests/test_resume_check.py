"""`lrm verify-resume`: it says "the same" of what is the same, and of nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnable_multipliers.pretrain.checkpoint.store import Checkpoint
from learnable_multipliers.pretrain.preflight import resume_check
from learnable_multipliers.pretrain.preflight.resume_check import (
    compare_checkpoints,
    compare_metrics,
)
from runs import small_run, trained

SMALL = (
    *("--model.hidden-size", "32", "--model.num-layers", "1", "--model.vocab-size", "257"),
    *("--data.sequence-length", "32", "--data.batch-sequences", "4", "--runtime.device", "cpu"),
    *("--log.weights-every", "2", "--log.evaluate-every", "3", "--log.evaluate-tokens", "640"),
    *("--runtime.num-threads", "1"),
)


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_the_same(ask, data):
    code, out, complaints = ask("verify-resume", "--data.path", data, "--steps", "4", *SMALL)
    assert (code, complaints) == (0, "")
    rows = dict(re.findall(r"^(\w+) +([\d,]+) +0$", out, re.M))
    assert list(rows) == ["weights", "optimizer", "counters", "metrics"]
    assert all(int(compared.replace(",", "")) > 5 for compared in rows.values())
    assert "The same, bit for bit: 8 steps in one go" in out
    assert not Path("runs/verify-resume").exists()


def test_a_run_that_is_not_the_same_is_reported_and_kept(ask, data, monkeypatch):
    """The resumed run reads other samples than it should."""

    def trained_here(config, until, killed=False):
        if config.resume:
            config = replace(config, seed=1, resume=False, out=config.out.with_name("other"))
        trainer = resume_check.Trainer(config)
        for step in trainer.steps():
            if step == until:
                trainer.save()
                break
        trainer.close()
        if config.seed:
            (config.out.with_name("resumed")).rename(config.out.with_name("killed"))
            config.out.rename(config.out.with_name("resumed"))

    monkeypatch.setattr(resume_check, "_train", trained_here)
    code, out, complaints = ask("verify-resume", "--data.path", data, "--steps", "2", *SMALL)
    assert code == 1
    assert "both are in runs/verify-resume" in complaints
    assert re.search(r"^weights +(\d+) +[1-9]", out, re.M)
    assert re.search(r"^  model\.\S+weight: up to .* apart$", out, re.M)
    assert re.search(r"^metrics +\d+ +[1-9]", out, re.M)
    assert (Path("runs/verify-resume/in-one-go/checkpoints/step-00000004")).is_dir()
    code, _, complaints = ask("verify-resume", "--data.path", data, *SMALL)
    assert code == 1
    assert "runs/verify-resume exists: remove it" in complaints


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (torch.tensor([0.0, -0.0]), "up to 0.0e+00 apart"),
        (torch.tensor([0.0, 1e-3]), "up to 1.0e-03 apart"),
        (torch.tensor([0.0, torch.nan]), "up to nan apart"),
        (torch.zeros(3), "torch.float32 (2,) and torch.float32 (3,)"),
        (torch.zeros(2).double(), "torch.float32 (2,) and torch.float64 (2,)"),
    ],
)
def test_every_bit_of_a_tensor_counts(other, told):
    kept = [Checkpoint(1, {}, {"model": {"w": value}}) for value in (torch.zeros(2), other)]
    weights, counters = compare_checkpoints(*kept)
    assert weights.differences == (f"w: {told}",)
    assert counters.differences == ()


def test_nan_is_the_same_as_nan():
    value = torch.tensor([torch.nan, 1.0])
    kept = [Checkpoint(1, {"loss": float("nan")}, {"m": {"w": v}}) for v in (value, value.clone())]
    assert all(one.differences == () for one in compare_checkpoints(*kept))


def test_clocks_and_folders_are_left_out_and_counters_are_not():
    kept = [
        Checkpoint(1, {"seconds": n, "config": {"out": n}, "samples": 4 + n}, {}) for n in (0, 1)
    ]
    (counters,) = compare_checkpoints(*kept)
    assert (counters.compared, counters.differences) == (2, ("samples: 4 and 5",))


def test_a_record_more_or_less_is_reported(data, tmp_path):
    folder = trained(small_run(data, tmp_path / "one", steps=3)).config.out
    (tmp_path / "other").mkdir()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other" / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert compare_metrics(folder, folder).differences == ()
    found = compare_metrics(folder, tmp_path / "other")
    assert found.differences == (f"{len(lines)} is only in the first",)
