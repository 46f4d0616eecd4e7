"""A disk that is full, failing or read-only: told, with nothing lost, and gone on from."""

import errno
import io
import os
import resource
import sys
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from learnable_multipliers._atomic import write_output
from learnable_multipliers.cli import main
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.store import (
    Checkpoint,
    CheckpointError,
    tensor_files,
)
from learnable_multipliers.pretrain.metrics.log import MetricLog
from learnable_multipliers.pretrain.preflight.resume_check import without_clock
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import assert_same, small_run, trained


@contextmanager
def failing(monkeypatch, number, code):
    """Let the given one of the next operations on files fail; yield a list of those made."""
    made = []

    def wrapped(real):
        def operation(*arguments, **settings):
            made.append(real.__name__)
            if len(made) == number:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **settings)

        return operation

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "open", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, wrapped(getattr(os, name)))
        patch.setattr(io, "open", wrapped(io.open))
        patch.setattr(tensor_files, "save_file", wrapped(tensor_files.save_file))
        yield made


def keep(folder, step):
    tensors = {"model": {"w": torch.full((3,), float(step))}}
    return checkpoints.save(folder, Checkpoint(step, {}, tensors), keep=2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_whichever_operation_of_a_save_fails_nothing_is_lost(tmp_path, monkeypatch, code):
    number, outcomes = 0, []
    while True:
        number += 1
        folder = tmp_path / str(number)
        for step in (5, 10):
            keep(folder, step)
        told = ""
        with failing(monkeypatch, number, code) as made:
            try:
                keep(folder, 15)
            except CheckpointError as error:
                told = str(error)
        assert os.strerror(code) in told or not told
        kept = checkpoints.steps(folder)
        assert kept[-1] == 15 or ("the newest one is that of step 10" in told and kept == [5, 10])
        assert len(kept) >= 2
        for step in kept:
            assert checkpoints.load(folder / f"step-{step:08d}").step == step
        keep(folder, 15)
        keep(folder, 20)
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["step-00000015", "step-00000020"]
        outcomes.append("but an older one" if "is saved, but an older one" in told else told[:14])
        if len(made) < number:
            break
    # What does not matter is not told: a folder that is there already, and what is out of sight.
    assert outcomes[0] == outcomes[-1] == ""
    assert outcomes.count("the checkpoint") > 10
    assert outcomes.count("but an older one") == 1


@contextmanager
def no_file_beyond(size):
    """Let the system refuse to let files grow; Python asks not to be ended for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_log_that_cannot_grow_is_reported_and_continued(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    trainer = Trainer(config)
    log = config.out / "metrics.jsonl"
    going = trainer.steps()
    for _ in range(6):
        next(going)
    # Part of a line is written, which is what a full disk does.
    with no_file_beyond(log.stat().st_size + 10):
        with pytest.raises(OSError, match=r"metrics\.jsonl could not be written: File too large"):
            list(going)
        with suppress(OSError):
            trainer.close()
    assert not log.read_bytes().endswith(b"\n")
    assert checkpoints.steps(config.out / "checkpoints") == [5]
    resumed = trained(replace(config, resume=True))
    whole = trained(replace(config, out=tmp_path / "whole", name="run"))
    assert_same(whole, resumed)
    assert without_clock(whole.config.out) == without_clock(config.out)


def test_a_resume_on_a_full_disk_is_reported_and_can_be_tried_again(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    trainer = Trainer(config)
    for step in trainer.steps():
        if step == 9:
            break
    trainer.close()
    log = (config.out / "metrics.jsonl").read_bytes()
    with (
        no_file_beyond(len(log) // 4),
        pytest.raises(OSError, match=r"metrics\.jsonl could not be written: File too large"),
    ):
        Trainer(replace(config, resume=True))
    assert (config.out / "metrics.jsonl").read_bytes() == log
    assert not list(config.out.glob("*.tmp"))
    trained(replace(config, resume=True))


def test_a_run_whose_folder_cannot_be_written_ends_before_it_begins(ask, data, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    code, _, complaints = ask("train", "tiny", "--data.path", data, "--model.vocab-size", "257")
    assert code == 1
    assert complaints == "lrm train: [Errno 30] Read-only file system: 'runs/tiny'"


# -- what commands write ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return trained(small_run(data, tmp_path_factory.mktemp("full") / "run", steps=4)).config.out


def entries(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


# Command -> the arguments before its output, and how much of it is written before the disk is full.
WRITING = {
    "report": (["report", "{run}", "--out", "{out}.html"], 1000),
    "simulate": (["simulate", "--steps", "20", "--plot", "{out}.svg"], 1000),
    "diagnose": (["diagnose", "{run}", "--plot", "{out}.png"], 1000),
    "export, the weights": (["export", "{run}", "{out}"], 20_000),
    "export, the tokenizer": (["export", "{run}", "{out}"], 1000),
    "export, its settings": (["export", "{run}", "{out}"], 10),
    "export, the GGUF file": (["export", "{run}", "{out}", "--gguf"], 20_000),
    "prepare, the tokenizer": (["data", "prepare", "{run}/plan.json", "--out", "{out}"], 1000),
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("what", WRITING)
def test_what_does_not_fit_on_the_disk_is_one_line_and_leaves_nothing(ask, run, what, older):
    words, size = WRITING[what]
    here = Path.cwd()
    (here / "text.txt").write_text("some text to train a tokenizer on " * 20)
    words = [word.format(run=run, out=here / "new" / "out") for word in words]
    words = [str(here / "text.txt") if word.endswith("plan.json") else word for word in words]
    if what.startswith("prepare"):
        words += ["--valid-fraction", "0"]
    target = next(word for word in words if word.startswith(str(here / "new")))
    if older and Path(target).suffix:
        (here / "new").mkdir()
        Path(target).write_bytes(b"older")
    before = entries(here)
    with no_file_beyond(size):
        code, _, complaints = ask(*words)
    assert code == 1
    (line,) = complaints.splitlines()
    assert "File too large" in line
    assert line.endswith(f": '{target}'")
    assert entries(here) == before
    # It was the disk, and nothing else.
    assert ask(*words)[0] == 0


def test_output_goes_through_links_keeps_permissions_and_spares_devices(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"older")
    file.chmod(0o640)
    link.symlink_to("file")
    write_output(link, b"newer")
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"newer", 0o640)
    write_output(Path(os.devnull), b"nothing")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, b"no")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_output_to_a_loop_of_links_is_rejected(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        write_output(tmp_path / "loop", b"content")


def test_output_to_a_pipe_that_nobody_reads_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        write_output(tmp_path / "pipe", b"content")


def test_a_read_only_disk_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=r"Read-only file system: '[^']*/page\.html'$"):
        write_output(tmp_path / "page.html", b"page")


@pytest.mark.parametrize("below", ["file/out", "file/new/out"])
@pytest.mark.parametrize(
    "words",
    [
        ["report", "{run}", "--out"],
        ["export", "{run}"],
        ["demo", "--out"],
        ["train", "tiny", "--data.path", "{data}", "--model.vocab-size", "257", "--out"],
    ],
)
def test_an_output_below_a_file_is_one_line(ask, run, data, words, below, monkeypatch):
    monkeypatch.setattr("learnable_multipliers.cli.demo.TrainingData.open", lambda *_: None)
    Path("file").write_bytes(b"mine")
    code, _, complaints = ask(*(word.format(run=run, data=data) for word in words), below)
    assert code == 1
    assert "Not a directory: 'file" in complaints
    assert len(complaints.splitlines()) == 1
    assert [path.name for path in Path.cwd().iterdir()] == ["file"]
    assert Path("file").read_bytes() == b"mine"


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["plan", "tiny"]])
def test_output_to_a_full_disk_is_one_line(monkeypatch, command):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as stop:
            main(command)
    assert stop.value.code == "lrm: the output could not be written: No space left on device"


def test_an_event_file_that_cannot_grow_is_reported_at_once(tmp_path, monkeypatch):
    with suppress(OSError), closing(MetricLog(tmp_path, tensorboard=True)) as log:
        log.log(1, {"loss": 1.0})
        (events,) = (tmp_path / "tensorboard").iterdir()
        with no_file_beyond(events.stat().st_size + 10):
            log.path.unlink()
            log._file.close()
            log._file = Path(os.devnull).open("ab")  # noqa: SIM115
            monkeypatch.setattr(log, "_check_present", lambda: None)
            with pytest.raises(OSError, match=r"tensorboard/events.* could not be written: File"):
                log.log(2, {"loss": 1.0})


@pytest.mark.parametrize(
    ("fails", "advice"),
    [
        (1, "there is no checkpoint yet: start again in an empty folder"),
        (4, "--resume continues from the checkpoint of step 2"),
    ],
)
def test_resume_is_advised_where_there_is_a_checkpoint(ask, data, monkeypatch, fails, advice):
    made = []

    def save_file(*arguments, real=tensor_files.save_file):
        made.append(arguments)
        if len(made) == fails:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(*arguments)

    monkeypatch.setattr(tensor_files, "save_file", save_file)
    code, _, complaints = ask(*SMALL, "--data.path", data)
    assert code == 1
    (line,) = complaints.splitlines()
    assert "[Errno 28] No space left on device" in line
    assert line.endswith(f". Then: {advice}")


SMALL = [
    "train",
    "tiny",
    "--out",
    "run",
    "--model.vocab-size",
    "257",
    "--model.hidden-size",
    "32",
    "--model.num-layers",
    "1",
    "--model.intermediate-size",
    "48",
    "--data.sequence-length",
    "32",
    "--data.batch-sequences",
    "4",
    "--schedule.tokens",
    "512",
    "--schedule.warmup-tokens",
    "128",
    "--schedule.decay-tokens",
    "128",
    "--checkpoint.every",
    "2",
    "--log.evaluate-tokens",
    "640",
    "--log.sample-tokens",
    "0",
]
