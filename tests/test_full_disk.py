"""A disk that is full, failing or read-only: told, with nothing lost, and gone on from."""

import errno
import io
import os
import resource
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.store import (
    Checkpoint,
    CheckpointError,
    tensor_files,
)
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


def test_a_log_that_cannot_grow_is_told_and_gone_on_with(data, tmp_path):
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


def test_a_resume_on_a_full_disk_is_told_and_can_be_tried_again(data, tmp_path):
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
