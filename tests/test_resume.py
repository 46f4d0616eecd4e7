"""A run that goes on from a checkpoint is the run it would have been."""

import errno
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from learnable_multipliers._checksum import add_checksum, read_verified
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.store import CheckpointError
from learnable_multipliers.pretrain.config import OptimizerConfig
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.metrics.log import NEWEST, read_metrics
from learnable_multipliers.pretrain.preflight.resume_check import without_clock
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import (
    HYBRID,
    LENGTH,
    assert_same,
    damage,
    killed_after,
    rewritten,
    small_run,
    trained,
)

FACTORS = {
    "mup_embedding": 5.0,
    "mup_head": 0.3,
    "mup_key": 0.4,
    "mup_ssm_in": 1.2,
    "mup_gate": 0.8,
}
RUNS = {
    "adamw": {},
    "muon": {"optimizer": OptimizerConfig(lr=4e-3, kind="muon", placement="scalar")},
    "plain": {"optimizer": OptimizerConfig(lr=4e-3, placement="none")},
    "tied, frozen norms": {"model": replace(HYBRID, tie_embeddings=True, freeze_norms=True)},
    "folded": {
        "model": replace(HYBRID, **FACTORS),
        "optimizer": OptimizerConfig(lr=4e-3, multiplier_init="fold"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(data, tmp_path, name):
    config = small_run(data, tmp_path / "whole", name="run", **RUNS[name])
    # Nothing divides anything: the batch ramps up from 2 to 6, cut into fours.
    config = replace(
        config,
        data=replace(config.data, batch_sequences=6, micro_batch_sequences=4),
        schedule=replace(
            config.schedule,
            rampup_tokens=10 * LENGTH,
            rampup_start_sequences=2,
            rampup_increment_sequences=2,
        ),
        log=replace(config.log, every=3, weights_every=4, evaluate_every=7, sample_every=5),
    )
    whole = trained(config)
    part = replace(config, out=tmp_path / "part")
    killed_after(part, 7)
    folder = tmp_path / "part" / "checkpoints"
    assert checkpoints.steps(folder) == [5]
    resumed = killed_after(replace(part, resume=True), 9)
    assert checkpoints.steps(folder) == [5]
    resumed = Trainer(replace(part, resume=True))
    assert resumed.step == 5
    resumed.train()
    assert_same(whole, resumed)
    assert whole.model.config == resumed.model.config
    assert without_clock(tmp_path / "whole") == without_clock(tmp_path / "part")


def test_a_resumed_run_has_the_thinned_log_of_an_uninterrupted_one(data, tmp_path, monkeypatch):
    for kind in ("train", "weights", "health", "signals", "eval"):
        monkeypatch.setitem(NEWEST, kind, 2)
    config = small_run(data, tmp_path / "whole", steps=24, name="run")
    log = replace(config.log, every=1, weights_every=2, evaluate_every=3, sample_tokens=0)
    config = replace(config, log=replace(log, signals_every=1))
    trained(config)
    for kind in ("train", "signals"):
        steps = [r["step"] for r in read_metrics(config.out) if r["kind"] == kind]
        assert steps == [1, 16, 23, 24]
    part = replace(config, out=tmp_path / "part")
    killed_after(part, 14)
    killed_after(replace(part, resume=True), 17)
    trained(replace(part, resume=True))
    assert without_clock(config.out) == without_clock(part.out)


def test_a_finished_run_stays_as_it_is(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3)
    trained(config)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    trained(replace(config, resume=True))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path: path.read_bytes() for path in files} == before


def test_what_a_kill_at_the_very_end_left_behind_is_removed(data, tmp_path):
    """Published, but older ones and what was being removed are still there."""
    config = small_run(data, tmp_path / "run")
    trained(config)
    folder = config.out / "checkpoints"
    for name in ("step-00000005", ".step-00000003.0123abcd"):
        shutil.copytree(folder / "step-00000010", folder / name)
    trained(replace(config, resume=True))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000012"]


def test_a_run_stopped_at_its_last_step_gets_its_end_once(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3)
    stopped = Trainer(config)
    for _ in stopped.steps():
        if stopped.step == 3:
            stopped.save()
            break
    stopped.close()
    for _ in range(2):
        trained(replace(config, resume=True))
    assert [r["kind"] for r in read_metrics(tmp_path / "run")].count("end") == 1


def test_skipped_steps_are_counted_across_a_resume(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    trainer = Trainer(config)
    gradients = trainer._train_step.gradients

    def spoiled(batches, sequences):
        loss = gradients(batches, sequences)
        if trainer.step == 2:
            trainer.model.lm_head.weight.grad[0, 0] = torch.nan
        return loss

    trainer._train_step.gradients = spoiled
    for step in trainer.steps():
        if step == 6:
            break
    trainer.close()
    trained(replace(config, resume=True))
    counts = {
        r["step"]: r["skipped_steps"] for r in read_metrics(config.out) if r["kind"] == "train"
    }
    assert counts == {1: 0, 2: 0, 4: 1, 6: 1, 8: 1, 10: 1, 12: 1}


def test_a_loss_that_was_left_out_is_reported_after_a_resume(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    trainer = Trainer(config)
    for step in trainer.steps():
        if step == 4:
            # Step 5 is saved before a loss is written down again.
            trainer._losses.meter.add(torch.tensor(torch.nan), None)
        if step == 5:
            break
    trainer.close()
    trained(replace(config, resume=True))
    records = {r["step"]: r for r in read_metrics(config.out) if r["kind"] == "train"}
    assert [records[step]["loss_left_out"] for step in (4, 6, 8)] == [0, 1, 0]
    assert math.isfinite(records[6]["loss"])


def test_a_log_that_was_removed_is_missed(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    killed_after(config, 6)
    (config.out / "metrics.jsonl").unlink()
    seen = []
    Trainer(replace(config, resume=True), seen.append).close()
    assert "metrics.jsonl has no records before step 5" in seen[0]["text"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(data, tmp_path, file):
    whole = trained(small_run(data, tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoints.steps(folder) == [10, 12]
    damage(folder / "step-00000012" / file)
    seen = []
    resumed = Trainer(small_run(data, tmp_path / "run", resume=True), seen.append)
    assert resumed.step == 10
    assert f"{file} is damaged" in seen[0]["text"]
    assert "set aside" in seen[1]["text"]
    resumed.train()
    assert_same(whole, resumed)
    assert checkpoints.steps(folder) == [10, 12]
    for step in (10, 12):
        (folder / f"step-{step:08d}" / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint is good"):
        Trainer(small_run(data, tmp_path / "run", resume=True))


def test_a_state_of_another_release_is_reported(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3)
    trained(config)
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    state = json.loads((path / "state.json").read_text())
    for changes, message in (
        ({"samples": "12"}, r"state.json.samples is '12', not a whole number"),
        ({"mood": 1}, "state.json has unknown keys: mood"),
    ):
        rewritten(path, "state.json", json.dumps(state | changes).encode())
        with pytest.raises((CheckpointError, ValueError), match=message):
            Trainer(replace(config, resume=True))
    for part, key, where in (
        (state["config"]["optimizer"], "split", "state.json.config.optimizer"),
        (state, "seconds", "state.json"),
    ):
        del part[key]
        rewritten(path, "state.json", json.dumps(state).encode())
        with pytest.raises(CheckpointError, match=f"{where} has no: {key}"):
            Trainer(replace(config, resume=True))


def test_weights_of_another_optimizer_state_are_rejected(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=8)
    killed_after(config, 6)
    path = tmp_path / "run" / "checkpoints" / "step-00000005"
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 2
    rewritten(path, "model.safetensors", save(weights))
    with (
        closing(Trainer(replace(config, resume=True))) as trainer,
        pytest.raises(CheckpointError, match="embed_tokens.weight is not what the optimizer's"),
    ):
        trainer.train()


def test_tensors_that_do_not_fit_are_rejected_before_any_is_loaded(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3)
    trained(config)
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    norm = "model.final_layernorm.weight"
    whole = load_file(path / "model.safetensors")
    for tensors, message in (
        # A single number would spread over the whole weight.
        (whole | {norm: torch.ones(1)}, f"other shapes or types for {norm}"),
        (whole | {norm: whole[norm].bfloat16()}, f"other shapes or types for {norm}"),
        (whole | {"extra": torch.ones(1)}, "beyond this run's, extra"),
        ({name: value for name, value in whole.items() if name != norm}, f"misses {norm}"),
    ):
        rewritten(path, "model.safetensors", save(tensors))
        with pytest.raises(CheckpointError, match=message):
            Trainer(replace(config, resume=True))


def test_nothing_is_lost_when_the_disk_is_full(data, tmp_path):
    """The system itself refuses the write: files may not grow beyond a limit."""
    script = f"""
import resource, signal, sys
from pathlib import Path
import torch
# As many threads as in this process: sums are added up in the same order.
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from runs import small_run
from learnable_multipliers.pretrain.trainer.trainer import Trainer
trainer = Trainer(small_run(Path({str(data)!r}), Path({str(tmp_path / "run")!r})))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for step in trainer.steps():
    if step == 6:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "the checkpoint of step 10 could not be saved" in done.stderr
    assert "the newest one is that of step 5" in done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr
    kept = tmp_path / "run" / "checkpoints"
    assert [path.name for path in kept.iterdir()] == ["step-00000005"]
    resumed = Trainer(small_run(data, tmp_path / "run", resume=True))
    assert resumed.step == 5
    resumed.train()
    whole = trained(small_run(data, tmp_path / "whole", name="run"))
    assert_same(whole, resumed)


# -- what a run does not go on from -----------------------------------------------------------


def test_other_settings_are_rejected(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3)
    trained(config)
    for changes, message in (
        ({"model": replace(HYBRID, vocab_size=300)}, "model.vocab_size: 320 -> 300"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"optimizer": replace(config.optimizer, lr=1e-3)}, "optimizer.lr: 0.004 -> 0.001"),
    ):
        with pytest.raises(ValueError, match=f"these differ: {message}"):
            Trainer(replace(config, resume=True, **changes))
    chatty = replace(config, resume=True, log=replace(config.log, every=1))
    assert trained(chatty).step == 3


def test_a_run_that_no_longer_fits_continues_in_smaller_passes(data, tmp_path):
    whole = trained(small_run(data, tmp_path / "whole", steps=6))
    config = small_run(data, tmp_path / "run", steps=6)
    config = replace(config, checkpoint=replace(config.checkpoint, every=3))
    killed_after(config, 3)
    one_by_one = replace(config.data, micro_batch_sequences=1)
    resumed = trained(replace(config, resume=True, data=one_by_one))
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], rtol=1e-3, atol=1e-5)


def going_on(config, schedule):
    """Return the config of a run that goes on, by another schedule."""
    return replace(config, resume=True, schedule=schedule)


def test_a_run_is_made_longer_before_its_decay_begins(data, tmp_path):
    whole = trained(small_run(data, tmp_path / "whole", steps=12, name="run"))
    config = small_run(data, tmp_path / "run", steps=8, name="run")
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    killed_after(config, 4)
    resumed = trained(going_on(config, whole.config.schedule))
    assert_same(whole, resumed)
    told = json.loads((tmp_path / "run" / "config.json").read_text())["schedule"]
    assert told == json.loads((tmp_path / "whole" / "config.json").read_text())["schedule"]


def test_a_run_that_ended_at_its_constant_rate_continues_as_if_it_had_not(data, tmp_path):
    def run(name, steps):
        config = small_run(data, tmp_path / name, steps=steps, name="run")
        return replace(config, schedule=replace(config.schedule, decay_tokens=0))

    whole = trained(run("whole", 9))
    config = run("run", 5)
    trained(config)
    resumed = trained(going_on(config, whole.config.schedule))
    assert_same(whole, resumed)
    kinds = [record["kind"] for record in read_metrics(tmp_path / "run")]
    assert kinds.count("end") == 1
    assert kinds[-1] == "end"


def test_a_decay_can_be_branched_off(data, tmp_path):
    long = small_run(data, tmp_path / "long", steps=14, name="run")
    long = replace(long, checkpoint=replace(long.checkpoint, every=2))
    killed_after(long, 4)
    shutil.copytree(tmp_path / "long", tmp_path / "branch")
    short = trained(small_run(data, tmp_path / "short", steps=8, name="run"))
    branch = replace(long, out=tmp_path / "branch")
    assert_same(short, trained(going_on(branch, short.config.schedule)))


def test_a_schedule_that_differs_in_steps_already_taken_is_rejected(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=8)
    trained(config)
    for changes in (
        {"tokens": 2 * config.schedule.tokens},
        {"warmup_tokens": 0},
        {"tokens": config.schedule.tokens // 2, "decay_tokens": 0},
    ):
        with pytest.raises(ValueError, match="these differ: schedule.*the 8 steps already taken"):
            Trainer(going_on(config, replace(config.schedule, **changes)))


def test_other_data_than_the_checkpoint_s_are_rejected(data, tmp_path):
    trained(small_run(data, tmp_path / "run", steps=3))
    text = tmp_path / "other.txt"
    text.write_text("something else\n" * 500)
    other = tmp_path / "other"
    held_out = (str(data.parent / "text"),)
    prepare(PrepareConfig(sources=(str(text),), out=other, vocab_size=257, valid_sources=held_out))
    with pytest.raises(ValueError, match="not those the run started with"):
        Trainer(small_run(other, tmp_path / "run", steps=3, resume=True))


def test_the_same_text_prepared_in_another_place_is_gone_on_with(data, tmp_path):
    killed_after(small_run(data, tmp_path / "run"), 7)
    moved = tmp_path / "elsewhere" / "text"
    shutil.copytree(data.parent / "text", moved)
    again = PrepareConfig(
        sources=(str(moved),), out=tmp_path / "data", vocab_size=257, valid_fraction=0.2
    )
    prepare(again)
    manifests = [(folder / "manifest.json").read_text() for folder in (data, tmp_path / "data")]
    assert manifests[0] != manifests[1]
    resumed = trained(small_run(tmp_path / "data", tmp_path / "run", resume=True))
    assert_same(resumed, trained(small_run(data, tmp_path / "whole", name="run")))


@pytest.mark.parametrize("change", ["shard", "tokenizer"])
def test_data_with_another_checksum_are_rejected(data, tmp_path, change):
    trained(small_run(data, tmp_path / "run", steps=3))
    other = tmp_path / "other"
    shutil.copytree(data, other)
    trained(small_run(other, tmp_path / "run", steps=3, resume=True))
    manifest = read_verified(other / "manifest.json")
    match change:
        case "shard":
            manifest["splits"]["train"][0]["sha256"] = "0" * 64
        case "tokenizer":
            same_otherwise = (other / "tokenizer.json").read_bytes() + b"\n"
            (other / "tokenizer.json").write_bytes(same_otherwise)
            manifest["tokenizer_sha256"] = hashlib.sha256(same_otherwise).hexdigest()
    (other / "manifest.json").write_text(json.dumps(add_checksum(manifest)))
    with pytest.raises(ValueError, match="not those the run started with"):
        Trainer(small_run(other, tmp_path / "run", steps=3, resume=True))


def test_resuming_without_a_checkpoint_says_so(data, tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Trainer(small_run(data, tmp_path / "run", resume=True))
    assert not (tmp_path / "run").exists()
