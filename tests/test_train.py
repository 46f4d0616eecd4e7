"""The trainer: the same run twice is the same run, and so is one that was interrupted."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain import checkpoint as checkpoints
from learnable_multipliers.pretrain.checkpoint import CheckpointError
from learnable_multipliers.pretrain.config import TrainConfig, from_dict, to_dict
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.interrupt import Interrupt
from learnable_multipliers.pretrain.metrics import read_metrics
from learnable_multipliers.pretrain.models.hybrid import build
from learnable_multipliers.pretrain.train import Trainer
from runs import HYBRID, LENGTH, LLAMA, prepared, small_run


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("corpus"))


def trained(config: TrainConfig) -> Trainer:
    trainer = Trainer(config)
    assert trainer.train() == "finished"
    return trainer


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weights, raw weights, multipliers and moments."""
    state = {
        f"{name}/{key}": value
        for group in trainer.optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for key, value in trainer.optimizer.state[parameter].items()
    }
    return dict(trainer.model.state_dict()) | state


def assert_same(first: Trainer, second: Trainer) -> None:
    mine, other = everything(first), everything(second)
    assert mine.keys() == other.keys()
    for name in mine:
        assert torch.equal(mine[name], other[name]), name


def without_clock(folder: Path) -> list[dict]:
    timed = ("seconds", "tokens_per_second", "mfu")
    return [
        {key: value for key, value in record.items() if key not in timed}
        for record in read_metrics(folder)
    ]


OPTIMIZERS = {
    "adamw": {"kind": "adamw", "placement": "full"},
    "muon": {"kind": "muon", "placement": "scalar"},
    "plain": {"kind": "adamw", "placement": "none"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_seed_gives_the_same_run_bit_for_bit(data, tmp_path, name):
    config = small_run(data, tmp_path / "first")
    config = replace(config, optimizer=replace(config.optimizer, **OPTIMIZERS[name]))
    first = trained(config)
    second = trained(replace(config, out=tmp_path / "second", name="first"))
    assert_same(first, second)
    assert without_clock(tmp_path / "first") == without_clock(tmp_path / "second")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(data, tmp_path, name):
    config = small_run(data, tmp_path / "whole", name="run")
    config = replace(config, optimizer=replace(config.optimizer, **OPTIMIZERS[name]))
    whole = trained(config)
    part = replace(config, out=tmp_path / "part")
    stopped = Trainer(part)
    for step in stopped.going():
        if step == 8:
            break
    # Killed here: step 8 was never saved, the checkpoint is that of step 5.
    stopped.close()
    assert checkpoints.steps(tmp_path / "part" / "checkpoints") == [5]
    resumed = Trainer(replace(part, resume=True))
    assert resumed.step == 5
    resumed.train()
    assert_same(whole, resumed)
    assert without_clock(tmp_path / "whole") == without_clock(tmp_path / "part")


def test_the_trainer_takes_the_steps_of_a_hand_written_loop(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=4, model=LLAMA)
    config = replace(config, data=replace(config.data, micro_batch_sequences=3))
    trainer = Trainer(config)
    model = build(trainer.config.model, config.seed)
    optimizer = lrm.AdamW(
        lrm.param_groups(model, lrm.plan(model), weight_decay=0.1), lr=4e-3, max_grad_norm=1.0
    )
    # Two steps of warmup, then decay by 8 over the last 170 of 512 tokens.
    factors = [0.5, 1.0, 8 ** -((3 * 128 - (512 - 170)) / 170), 1 / 8]
    for step, factor in enumerate(factors):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * factor
        tokens = trainer.data.batch(4 * step, 4, torch.device("cpu"))
        for part, share in ((tokens[:3], 0.75), (tokens[3:], 0.25)):
            logits = model(part[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            loss = loss + 1e-4 * logits.logsumexp(-1).square().mean()
            (share * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer.train()
    for name, value in model.state_dict().items():
        # Adam makes a full step of a gradient that is nearly zero: rounding shows, at 4e-3 a step.
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4, atol=2e-5)


def test_the_loss_falls_and_evaluation_agrees_with_the_model(data, tmp_path):
    trainer = trained(small_run(data, tmp_path / "run", steps=60))
    records = read_metrics(tmp_path / "run")
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert losses[0] > 5.0
    assert losses[-1] < 3.0
    evaluated = [r for r in records if r["kind"] == "eval"][-1]
    batch = torch.cat(list(trainer.data.held_out(8, 640, torch.device("cpu"))))
    assert batch.shape == (640 // LENGTH, LENGTH + 1)
    with torch.no_grad():
        logits = trainer.model(batch[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert evaluated["loss"] == pytest.approx(expected.item(), rel=1e-5)
    bits = expected.item() / 0.6931471805599453 / trainer.data.bytes_per_token
    assert evaluated["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_weights_are_described_as_they_are(data, tmp_path):
    trainer = trained(small_run(data, tmp_path / "run"))
    record = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "weights"][-1]
    name = "model.layers.0.feed_forward.up_proj.weight"
    raw = trainer.optimizer.state[trainer.model.get_parameter(name)]["raw"]
    assert record["raw_rms"][name] == pytest.approx(raw.square().mean().sqrt().item(), rel=1e-6)
    assert record["roles"][name] == "up"
    row = lrm.multipliers(trainer.optimizer)[name]["row"]
    at = record["multipliers"][name]["row"]
    assert [at[0], at[3], at[6]] == pytest.approx(
        [row.min().item(), row.quantile(0.5).item(), row.max().item()], rel=1e-6
    )
    # Twelve steps of noise at these rates add little to the start; the formula says how much.
    assert 0.02 < record["predicted_rms"][name] < 0.05
    assert "model.embed_tokens.weight" not in record["predicted_rms"]


def test_a_signal_saves_and_ends(data, tmp_path):
    trainer = Trainer(small_run(data, tmp_path / "run"))
    with Interrupt() as interrupt:
        going = trainer.going()
        next(going)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.received == "SIGINT"
        assert trainer.train(interrupt) == "interrupted"
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [trainer.step]
    resumed = Trainer(small_run(data, tmp_path / "run", resume=True))
    assert resumed.step == trainer.step
    assert resumed.train() == "finished"


def test_a_second_signal_ends_at_once():
    with Interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_folder_tells_what_made_it(data, tmp_path):
    trainer = trained(small_run(data, tmp_path / "run", steps=3))
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert from_dict(TrainConfig, written) == trainer.config
    assert written["model"]["vocab_size"] == 257
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.")
    assert environment["parameters"] == trainer.model.num_parameters
    plan = lrm.Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan == trainer.plan


# -- bad input --------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_not_overwritten(data, tmp_path):
    trained(small_run(data, tmp_path / "run", steps=3))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds a run already"):
        Trainer(small_run(data, tmp_path / "run", steps=3))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_vocabulary_too_small_for_the_data_is_refused(data, tmp_path):
    model = replace(HYBRID, vocab_size=100)
    with pytest.raises(ValueError, match=r"vocabulary of 257, the model one of 100"):
        Trainer(small_run(data, tmp_path / "run", model=model))


def test_another_vocabulary_than_the_checkpoint_s_is_refused(data, tmp_path):
    trained(small_run(data, tmp_path / "run", steps=3))
    other = small_run(
        data, tmp_path / "run", steps=3, resume=True, model=replace(HYBRID, vocab_size=300)
    )
    with pytest.raises(ValueError, match=r"these differ: model.vocab_size: 257 -> 300"):
        Trainer(other)


def test_other_data_than_the_checkpoint_s_are_refused(data, tmp_path):
    trained(small_run(data, tmp_path / "run", steps=3))
    text = tmp_path / "other.txt"
    text.write_text("something else\n" * 500)
    other = tmp_path / "other"
    held_out = (str(data.parent / "text"),)
    prepare(PrepareConfig(sources=(str(text),), out=other, vocab_size=257, valid_sources=held_out))
    with pytest.raises(ValueError, match="not those the run began with"):
        Trainer(small_run(other, tmp_path / "run", steps=3, resume=True))


def test_a_sequence_longer_than_the_data_is_refused(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    config = replace(config, data=replace(config.data, sequence_length=10_000_000))
    with pytest.raises(ValueError, match="10000000|10,000,000"):
        Trainer(config)


def test_unknown_keys_of_a_config_are_refused():
    values = to_dict(TrainConfig())
    values["optimizer"]["learning_rate"] = 1
    with pytest.raises(ValueError, match=r"config.optimizer has unknown keys: learning_rate"):
        from_dict(TrainConfig, values)


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
from learnable_multipliers.pretrain.train import Trainer
trainer = Trainer(small_run(Path({str(data)!r}), Path({str(tmp_path / "run")!r})))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for step in trainer.going():
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


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(data, tmp_path, file):
    trained(small_run(data, tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoints.steps(folder) == [10, 12]
    path = folder / "step-00000012" / file
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    seen = []
    resumed = Trainer(small_run(data, tmp_path / "run", resume=True), seen.append)
    resumed.close()
    assert resumed.step == 10
    assert f"{file} is damaged" in seen[0]["text"]
    (folder / "step-00000010" / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint is good"):
        Trainer(small_run(data, tmp_path / "run", resume=True))


def test_resuming_without_a_checkpoint_says_so(data, tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Trainer(small_run(data, tmp_path / "run", resume=True))


def test_impossible_devices_are_refused(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    with pytest.raises(ValueError, match="runtime.device=warp cannot be used"):
        Trainer(replace(config, runtime=replace(config.runtime, device="warp")))
