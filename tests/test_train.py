"""The trainer: the same run twice is the same run, and its numbers are what they say."""

import math
import os
import signal
from contextlib import closing
from dataclasses import replace

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint import tensor_files
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.preflight.resume_check import without_clock
from learnable_multipliers.pretrain.trainer import schedule
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.interrupt import Interrupt
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, LENGTH, LLAMA, assert_same, bytes_per_token, small_run, trained

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


def test_another_seed_gives_other_weights_and_another_order(data, tmp_path):
    first, second = (Trainer(small_run(data, tmp_path / str(n), seed=n)) for n in (0, 1))
    for trainer in (first, second):
        trainer.close()
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    batches = [trainer.data.batch(0, 8, torch.device("cpu")) for trainer in (first, second)]
    assert not torch.equal(*batches)


def test_a_recorded_speed_is_that_of_the_steps_since_the_last_record(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=6)
    quiet = replace(config.log, every=1, weights_every=0, signals_every=0, evaluate_every=0)
    config = replace(config, checkpoint=replace(config.checkpoint, every=0))
    trained(replace(config, log=replace(quiet, sample_every=0)))
    records = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    # After the first step norms are measured, which is not counted.
    for record in records[2:]:
        before = records[record["step"] - 2]
        speed = (record["tokens"] - before["tokens"]) / (record["seconds"] - before["seconds"])
        assert record["tokens_per_second"] == pytest.approx(speed)


def test_looking_at_a_run_does_not_change_it(data, tmp_path):
    quiet = small_run(data, tmp_path / "quiet", steps=6)
    fields = ("every", "weights_every", "signals_every", "evaluate_every", "sample_every")
    seldom = dict.fromkeys(fields, 0)
    often = dict.fromkeys(seldom, 1)
    runs = [
        trained(replace(quiet, out=tmp_path / str(n), log=replace(quiet.log, **every)))
        for n, every in enumerate((seldom, often))
    ]
    assert_same(*runs)
    kinds = [[r["kind"] for r in read_metrics(tmp_path / str(n))] for n in range(2)]
    assert kinds[0] == ["train", "weights", "health", "weights", "health", "eval", "sample", "end"]
    assert kinds[1] == ["train", "weights", "health", "signals", "eval", "sample"] * 6 + ["end"]


def test_a_logged_loss_is_the_mean_since_the_one_before(data, tmp_path):
    config = small_run(data, tmp_path / "each", steps=8)
    trained(replace(config, log=replace(config.log, every=1)))
    trained(replace(config, out=tmp_path / "third", log=replace(config.log, every=3)))
    each, third = (
        {r["step"]: r["loss"] for r in read_metrics(tmp_path / name) if r["kind"] == "train"}
        for name in ("each", "third")
    )
    assert list(third) == [1, 3, 6, 8]
    assert third[1] == each[1]
    assert third[3] == pytest.approx((each[2] + each[3]) / 2, rel=1e-6)
    assert third[6] == pytest.approx((each[4] + each[5] + each[6]) / 3, rel=1e-6)
    assert third[8] == pytest.approx((each[7] + each[8]) / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("multipliers", "relative"),
    [("same", [1, 1, 1, 1]), ("no-warmup", [2, 1, 1, 1]), ("no-decay", [1, 1, None, 8])],
)
def test_the_trainer_takes_the_steps_of_a_hand_written_loop(data, tmp_path, multipliers, relative):
    config = small_run(data, tmp_path / "run", steps=4, model=LLAMA)
    config = replace(
        config,
        data=replace(config.data, micro_batch_sequences=3),
        schedule=replace(config.schedule, multipliers=multipliers),
    )
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
            group["multiplier_lr_scale"] = relative[step] or 1 / factor
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
    # Bytes of the text that was read, ends of documents left out; not of the split on average.
    text = trainer.data.decode(batch[:, 1:].flatten().tolist()).encode()
    assert len(text) > 640 * bytes_per_token(trainer.data)
    bits = 640 * expected.item() / math.log(2) / len(text)
    assert evaluated["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert evaluated["evaluated_tokens"] == 640


def test_further_text_is_evaluated_by_name_at_the_end_alone(data, tmp_path):
    sources = [tmp_path / name for name in ("train", "wiki")]
    for source, base in zip(sources, (7, 3), strict=True):
        source.mkdir()
        for index in range(12):
            lines = [f"{base} and {index} and {n}" for n in range(40)]
            (source / f"{index}.txt").write_text("\n".join(lines))
    config = PrepareConfig(
        sources=(str(sources[0]),),
        valid_fraction=0.2,
        test_sources=(f"wiki={sources[1]}",),
        vocab_size=257,
        out=tmp_path / "data",
    )
    prepare(config)
    prepare(replace(config, test_sources=(), out=tmp_path / "without"))
    trainer = trained(small_run(tmp_path / "data", tmp_path / "run"))
    evaluations = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "eval"]
    assert ["tests" in record for record in evaluations] == [False, True]
    tokens = torch.from_numpy(trainer.data.tokens("wiki").astype("int64"))
    count = (len(tokens) - 1) // LENGTH
    batch = torch.stack([tokens[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(count)])
    with torch.no_grad():
        logits = trainer.model(batch[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    found = evaluations[-1]["tests"]["wiki"]
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)
    text = trainer.data.decode(batch[:, 1:].flatten().tolist()).encode()
    bits = count * LENGTH * expected.item() / math.log(2) / len(text)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    # Nothing else of the run depends on it.
    assert_same(trainer, trained(small_run(tmp_path / "without", tmp_path / "other")))


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
        going = trainer.steps()
        next(going)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.received == signal.SIGINT
        assert trainer.train(interrupt) == "interrupted"
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [trainer.step]
    resumed = Trainer(small_run(data, tmp_path / "run", resume=True))
    assert resumed.step == trainer.step
    assert resumed.train() == "finished"


def test_a_signal_in_the_middle_of_a_save_lets_it_finish(data, tmp_path, monkeypatch):
    trainer = Trainer(small_run(data, tmp_path / "run"))

    def signalled(*arguments, real=tensor_files.save_file, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(tensor_files, "save_file", real)
        real(*arguments, **settings)

    monkeypatch.setattr(tensor_files, "save_file", signalled)
    with Interrupt() as interrupt:
        assert trainer.train(interrupt) == "interrupted"
    assert (interrupt.received, trainer.step) == (signal.SIGTERM, 5)
    assert checkpoints.load(tmp_path / "run" / "checkpoints" / "step-00000005").step == 5


def test_a_second_signal_ends_at_once():
    with Interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# -- bad input --------------------------------------------------------------------------------


def test_a_vocabulary_too_small_for_the_data_is_rejected(data, tmp_path):
    model = replace(HYBRID, vocab_size=100)
    with pytest.raises(ValueError, match=r"vocabulary of 257, the model one of 100"):
        Trainer(small_run(data, tmp_path / "run", model=model))


def test_a_sequence_longer_than_the_data_is_rejected(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    config = replace(config, data=replace(config.data, sequence_length=10_000_000))
    with pytest.raises(ValueError, match="10000000|10,000,000"):
        Trainer(config)


def test_impossible_devices_are_rejected(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    with pytest.raises(ValueError, match="runtime.device=warp cannot be used"):
        Trainer(replace(config, runtime=replace(config.runtime, device="warp")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "meta"}, "runtime.device=meta cannot be used: choose from cuda, mps, cpu"),
        ({"device": "cuda:99"}, "runtime.device=cuda:99 cannot be used here"),
        ({"cuda_graph": "on"}, "needs a CUDA device"),
        ({"dtype": "float16"}, "runtime.dtype is 'float16', not one of auto, float32, bfloat16"),
        ({"compile": True}, "runtime.compile is True, not one of auto, on, off"),
        ({"num_threads": -1}, "num_threads must not be negative"),
    ],
)
def test_impossible_ways_to_compute_are_rejected(changes, message):
    runtime = TrainConfig().runtime
    with pytest.raises(ValueError, match=message):
        choose_device(replace(runtime, **{"device": "cpu", **changes}))


def test_a_run_warns_once_that_it_repeats_its_data(data, tmp_path, monkeypatch):
    def told(**changes):
        records = []
        with closing(Trainer(replace(config, **changes), records.append)) as trainer:
            trainer.train()
        return [record["text"] for record in records if record["kind"] == "warning"]

    config = small_run(data, tmp_path / "run", steps=6)
    tokens = TrainingData.open(config.data, 0, config.seed).num_tokens
    assert 4 * tokens > config.schedule.tokens
    assert told(out=tmp_path / "other") == []
    monkeypatch.setattr(schedule, "MOST_EPOCHS", 0.01)
    assert told() == [schedule.repeated_data_warning(config.schedule, tokens)]
    # A run that has come to its end reads nothing.
    assert told(resume=True) == []


def test_a_vocabulary_of_the_data_is_rounded_up_to_what_gpus_multiply_fast(data, tmp_path):
    trainer = Trainer(small_run(data, tmp_path / "run"))
    assert trainer.data.manifest.vocab_size == 257
    assert trainer.config.model.vocab_size == trainer.model.lm_head.weight.shape[0] == 320
    trainer.close()
