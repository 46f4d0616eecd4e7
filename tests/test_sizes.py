"""Sizes that no machine can hold, and inputs without an end, are refused in one line."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnable_multipliers.cli import main
from learnable_multipliers.pretrain.config import (
    LogConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.data import encoding, readers
from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.readers import DocumentError
from learnable_multipliers.pretrain.data.tokenizer import train_tokenizer
from learnable_multipliers.pretrain.model.config import MAX_LAYERS
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.preflight.dry_run import describe
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer import memory
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, small_run

NESTED = "[" * 100_000 + "]" * 100_000


def one_line(ask, arguments):
    """Return what is said of a wrong command, which leaves nothing behind."""
    code, out, complaints = ask(*arguments)
    assert (code, out) == (1, "")
    assert complaints.count("\n") <= 1
    assert list(Path().iterdir()) == []
    return complaints


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("--model.num-layers 1e6", f"model.num_layers must be at most {MAX_LAYERS:,}"),
        ("--model.num-layers 1e6 --dry-run", "model.num_layers must be at most"),
        ("--model.hidden-size 1e9", "GiB of memory (estimated from shapes), and cpu has"),
        ("--model.hidden-size 1e18 --dry-run", "parameters, and 1e+15 are the most"),
        ("--model.vocab-size 1e18", "parameters, and 1e+15 are the most"),
        ("--model.intermediate-size 1e9", "of memory (estimated from shapes)"),
        ("--data.batch-sequences 1e9", "of memory (estimated from shapes)"),
        ("--model.rope-theta nan", "model.rope_theta must be a positive number, got nan"),
        ("--model.rope-theta 0", "model.rope_theta must be a positive number, got 0"),
        ("--model.init-std -1", "model.init_std must be a positive number, got -1"),
        ("--data.sequence-length 1e9", "longer than the data"),
        ("--data.sequence-length 0", "a sequence has at least 1 token, got 0"),
        ("--data.sequence-length -3", "a sequence has at least 1 token, got -3"),
        ("--runtime.num-threads 1e6", "runtime.num_threads must be at most"),
        ("--log.sample-tokens 1e9", "log.sample_tokens must be at most 10,000"),
        ("--schedule.rampup-tokens 1e6 --schedule.rampup-increment-sequences 1"
         " --schedule.rampup-start-sequences 1 --data.batch-sequences 1e6 "
         "--data.micro-batch-sequences 1", "ramps up in 999,999 stages"),
    ],
)  # fmt: skip
def test_a_run_that_no_machine_can_hold_is_rejected_before_there_is_a_folder(
    ask, data, setting, says
):
    words = ["train", "tiny", "--data.path", str(data), *setting.split()]
    assert says in one_line(ask, words)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("simulate --shape 1000000 1000000", "--shape must have at most 16,777,216 numbers"),
        ("simulate --steps 1e12", "--steps must be at most 10,000,000"),
        ("simulate --start-rms 1e300", "--start-rms must lie between 0 and 1e+15, got 1e+300"),
        ("simulate --start-rms nan", "--start-rms must lie between 0 and 1e+15, got nan"),
        ("simulate --optimizer muon --momentum 0.9999999999999 --steps 9", "averages over"),
        ("data prepare --out x --vocab-size -1 --sources x.txt", "no file or folder"),
        ("data prepare /dev/zero --out x", "/dev/zero is not a regular file"),
        ("train tiny --runtime.num-threads 1e6 --dry-run", "num_threads must be at most"),
    ],
)
def test_sizes_of_other_commands_are_rejected_in_one_line(ask, line, says):
    assert says in one_line(ask, line.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train tiny --schedule.tokens 1e30", "'1e30' does not fit into 64 bits"),
        ("train tiny --schedule.tokens 1e999999999", "does not fit into 64 bits"),
        ("train tiny --schedule.tokens -1e999999999", "does not fit into 64 bits"),
        ("train tiny --schedule.tokens 1e-999999999", "is not a whole number"),
        ("train tiny --schedule.tokens nan", "'nan' is not a whole number"),
        ("train tiny --seed 1e30", "does not fit into 64 bits"),
        ("simulate --rows 1e30", "does not fit into 64 bits"),
        ("data prepare --out x --vocab-size 1e9", "vocab_size is 1,000,000,000; 1,048,576 is"),
        ("data prepare --out x --num-threads 1e6", "num_threads must be at most"),
        ("train tiny --spikes.window 1e9", "spikes.window must be at most 10,000"),
    ],
)
def test_numbers_out_of_range_are_rejected_by_the_command_line(ask, line, says):
    code, out, complaints = ask(*line.split())
    assert (code, out) == (2, "")
    assert says in " ".join(complaints.replace("\u2502", " ").split())
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "tiny", "--out", ""],
        ["demo", "--out", ""],
        ["data", "prepare", "--out", ""],
        ["verify-resume", "tiny", "--out", ""],
        ["doctor", "tiny", "--out", ""],
        ["report", "run", "--out", ""],
        ["export", "run", ""],
        ["diagnose", ""],
        ["simulate", "--plot", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(ask, words):
    code, out, complaints = ask(*words)
    assert (code, out) == (2, "")
    assert "'' is not a path; the current folder is written ." in " ".join(
        complaints.replace("\u2502", " ").split()
    )
    assert list(Path().iterdir()) == []


def test_more_rows_than_steps_are_the_steps(ask):
    code, out, _ = ask("simulate", "--steps", "12", "--rows", "1e18", "--shape", "4", "4")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:13]] == [str(n) for n in range(1, 13)]


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_memory_that_runs_out_is_one_line_in_every_command(ask, monkeypatch, kind):
    def full(*_, **__):
        raise kind("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes\nmore")

    monkeypatch.setattr("learnable_multipliers.cli.simulate.simulate_brownian", full)
    said = one_line(ask, ["simulate"])
    assert said.startswith("lrm simulate: out of memory (DefaultCPUAllocator")


def test_other_errors_keep_their_traceback(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("learnable_multipliers.cli.simulate.simulate_brownian", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["simulate"])


# -- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", PRESETS)
def test_parameters_are_counted_before_a_model_is_built(shape):
    for changes in ({}, {"tie_embeddings": True}, {"ssm_norm": True}, {"intermediate_size": 0}):
        config = replace(PRESETS[shape], num_layers=3, **changes)
        with torch.device("meta"):
            assert HybridLM(config).num_parameters == config.num_parameters


def test_a_dry_run_describes_a_model_for_another_machine(data):
    model = replace(PRESETS["llama-0.5b"], hidden_size=8192, intermediate_size=28672, num_layers=40)
    config = replace(RECIPES["llama-0.5b"][1], model=replace(model, num_heads=64, vocab_size=257))
    sized = replace(config.data, path=data, sequence_length=128, batch_sequences=10**9)
    sized = replace(sized, micro_batch_sequences=10**9)
    text = describe(replace(config, data=sized, schedule=ScheduleConfig()))
    assert "First batch: 1000000000 sequences of 128 tokens" in text
    weights = next(line for line in text.splitlines() if line.split()[:1] == ["weights"])
    with torch.device("meta"):
        parameters = HybridLM(replace(model, num_heads=64, vocab_size=257)).num_parameters
    assert parameters > 30e9
    assert f"{4 * parameters / 2**30:.2f} GiB" in weights


def test_a_run_of_half_a_billion_steps_starts_at_once(tmp_path, data):
    config = small_run(data, tmp_path / "run")
    schedule = replace(config.schedule, tokens=10**12, decay_tokens=0)
    trainer = Trainer(replace(config, schedule=schedule))
    try:
        assert len(trainer.schedule) == -(-(10**12) // (32 * 4))
        assert next(iter(trainer.steps())) == 1
        assert trainer.schedule.tokens_before(1) == 32 * 4
    finally:
        trainer.close()


def test_a_run_larger_than_the_machine_is_rejected(tmp_path, data, monkeypatch):
    config = small_run(data, tmp_path / "run")
    device = choose_device(RuntimeConfig(device="cpu"))
    needed = memory.estimate(replace(config, model=replace(HYBRID, vocab_size=257)), device).peak
    monkeypatch.setattr(memory, "total_memory", lambda _: needed // 2)
    with pytest.raises(ValueError, match=r"needs about .* of memory .*--dry-run shows what takes"):
        Trainer(config)
    assert not config.out.exists()
    monkeypatch.setattr(memory, "total_memory", lambda _: needed)
    Trainer(config).close()


@pytest.mark.parametrize("value", [1 << 63, 10**30])
def test_numbers_beyond_64_bits_are_rejected_in_configs(value):
    with pytest.raises(ValueError, match="64 bits|2\\^63"):
        replace(TrainConfig(), log=LogConfig(evaluate_every=value)).check()


# -- Hugging Face folders -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "symmetries"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, not a whole number of at"),
        ({"hidden_size": 10**12}, "cannot be loaded: Storage size"),
        ({"hidden_size": -64}, "negative dimension"),
        ({"hidden_size": "64"}, "cannot be loaded"),
    ],
)
def test_absurd_sizes_of_a_hugging_face_folder_are_rejected(ask, tmp_path, command, changes, says):
    pytest.importorskip("transformers")
    small = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    small |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **small, **changes}))
    code, out, complaints = ask(command, str(folder))
    assert (code, out) == (1, "")
    assert says in complaints
    assert complaints.startswith(f"lrm {command}: {folder / 'config.json'}")
    assert complaints.count("\n") <= 1


def test_weights_that_do_not_fit_are_rejected_before_they_are_made(ask, tmp_path):
    pytest.importorskip("transformers")
    small = dict.fromkeys(("intermediate_size", "num_hidden_layers", "num_attention_heads"), 2)
    folder = tmp_path / "hf"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "vocab_size": 10**12, **small}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, complaints = ask("symmetries", str(folder))
    assert code == 1
    assert "the weights of this model take 476837.16 GiB" in complaints


# -- sources of text ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["fifo.txt", "folder", "/dev/zero", "/dev/null"])
def test_what_is_no_regular_file_is_no_source(tmp_path, place):
    source = tmp_path / place
    if place == "folder":
        source.mkdir()
        os.mkfifo(source / "a.txt")
    elif not place.startswith("/"):
        os.mkfifo(source)
    with pytest.raises(DocumentError, match="is not a regular file, but a corpus is read twice"):
        Corpus([str(source)])


@pytest.mark.parametrize("line", [NESTED, '{"text": ' + NESTED + "}", '{"a":' * 9999 + "}" * 9999])
def test_deeply_nested_json_lines_are_named(tmp_path, line):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DocumentError, match=r"a\.jsonl, line 2: (nested too deeply|not JSON)"):
        list(Corpus([str(source)]))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet.gz", "a.txt.gz", "a.jsonl.gz"])
def test_a_document_too_long_for_memory_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "_LARGEST", 1000)
    source = tmp_path / name
    opened = gzip.open if name.endswith(".gz") else open
    with opened(source, "wb") as file:
        file.write(b" " * 1001)
    with pytest.raises(DocumentError, match=rf"{name}.*: longer than 1,000 bytes of text"):
        list(Corpus([str(source)]))
    if "parquet" not in name:
        with opened(source, "wb") as file:
            file.write(b'{"text": "b"}'.ljust(999) + b"\n")
        assert len(list(Corpus([str(source)]))) == 1


def test_a_text_that_cannot_be_cut_is_rejected_before_memory_runs_out(monkeypatch):
    monkeypatch.setattr(encoding, "_LONGEST_TEXT", 700_000)
    encoder = encoding.DocumentEncoder(train_tokenizer(["some text"], 257))
    assert len(encoder("a" * 600_000)) == 600_001
    with pytest.raises(DocumentError, match="700,001 characters has no place to be cut at"):
        encoder("a" * 700_001)
    assert len(encoder("a b " * 200_000)) == 800_001
