"""What is written survives a power cut: synced before it is named, and named before all else."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from learnable_multipliers._atomic import fsync, replace_file
from learnable_multipliers.pretrain.atomic_folder import make_folder
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.store import Checkpoint
from learnable_multipliers.pretrain.metrics.log import MetricLog

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")


@pytest.fixture
def done(monkeypatch) -> list[tuple[str, str]]:
    """Return a list that every sync and rename goes into, with the name it concerns."""
    found = []

    def fsync(descriptor, real=os.fsync):
        found.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        real(descriptor)

    def renaming(real):
        def rename(source, target, **settings):
            real(source, target, **settings)
            found.append(("rename", Path(target).name))

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renaming(getattr(os, name)))
    return found


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_named_before_others_go(tmp_path, done):
    for step in (5, 10, 15):
        done.clear()
        tensors = {"model": {"w": torch.ones(3)}, "optimizer": {"w": torch.ones(3)}}
        checkpoints.save(tmp_path / "run" / "kept", Checkpoint(step, {}, tensors), keep=2)
    at = done.index(("rename", "step-00000015"))
    files = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    (aside,) = {name for _, name in done[:at]} - files
    assert aside.startswith(".step-00000015.")
    assert done[at - 1] == ("sync", aside)
    assert sorted(done[: at - 1]) == [("sync", name) for name in sorted(files)]
    assert done[at + 1] == ("sync", "kept")
    # Only then the oldest one goes, out of sight first.
    ((kind, name),) = done[at + 2 :]
    assert (kind, name[:14]) == ("rename", ".step-00000005")


def test_new_folders_are_known_to_those_above_them(tmp_path, done):
    make_folder(tmp_path / "a" / "b")
    assert done == [("sync", "a"), ("sync", tmp_path.name)]
    done.clear()
    make_folder(tmp_path / "a" / "b")
    assert done == []


def test_a_file_is_replaced_in_one_go(tmp_path, done):
    replace_file(tmp_path / "file", b"new")
    assert done == [("sync", "file.tmp"), ("rename", "file"), ("sync", tmp_path.name)]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_log_is_on_disk_with_its_name_and_after_it_is_cut_back(tmp_path, done):
    with closing(MetricLog(tmp_path / "run", tensorboard=False)) as log:
        assert ("sync", "run") in done
        for step in (1, 2):
            log.log(step, {"loss": 1.0})
        done.clear()
        log.flush()
        assert done == [("sync", "metrics.jsonl")]
        done.clear()
        log.truncate_after(1)
        assert done[-2:] == [("rename", "metrics.jsonl"), ("sync", "run")]


def test_a_folder_that_cannot_be_synced_is_no_error_and_a_file_is(tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def refuse(_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    fsync(tmp_path)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        fsync(tmp_path / "file")
