"""Checkpoints: none is lost, and none is believed unchecked."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.store import Checkpoint, CheckpointError
from runs import damage, rewritten


def saved(folder: Path, *steps: int, keep: int = 9) -> Path:
    for step in steps:
        tensors = {"model": {"w": torch.full((3,), float(step))}}
        checkpoints.save(folder, Checkpoint(step, {"note": step}, tensors), keep)
    return folder / f"step-{steps[-1]:08d}"


def test_what_is_saved_is_loaded(tmp_path):
    path = saved(tmp_path, 5)
    found = checkpoints.load(path)
    assert (found.step, found.state) == (5, {"note": 5})
    assert torch.equal(found.tensors["model"]["w"], torch.full((3,), 5.0))


def test_the_newest_are_kept(tmp_path):
    saved(tmp_path, 5, 10, 15, 20, keep=2)
    assert checkpoints.steps(tmp_path) == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


def test_a_new_checkpoint_is_not_removed_in_favour_of_damaged_later_ones(tmp_path):
    for step in (10, 15):
        damage(saved(tmp_path, step) / "model.safetensors")
    saved(tmp_path, 5, 7, keep=2)
    found, wrong = checkpoints.load_newest(tmp_path)
    assert found.step == 7
    assert len(wrong) == 2


def test_one_that_is_set_aside_is_neither_used_nor_lost(tmp_path):
    saved(tmp_path, 5, 10, 15)
    (moved,) = checkpoints.set_aside_after(tmp_path, 10)
    assert checkpoints.steps(tmp_path) == [5, 10]
    assert checkpoints.load(moved).step == 15


def test_a_damaged_one_of_the_same_step_makes_way(tmp_path):
    damage(saved(tmp_path, 5) / "model.safetensors")
    assert checkpoints.load(saved(tmp_path, 5)).step == 5
    assert [path.name[:21] for path in tmp_path.glob("damaged-*")] == ["damaged-step-00000005"]


def test_what_a_killed_process_left_behind_is_removed(tmp_path):
    shutil.copytree(saved(tmp_path, 5), tmp_path / ".step-00000010.0123abcd")
    saved(tmp_path, 15)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000015"]


@pytest.mark.parametrize(
    "name", ["step-000000005", "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0665"]
)
def test_odd_names_are_no_checkpoints(tmp_path, name):
    saved(tmp_path, 5)
    (tmp_path / name).mkdir()
    saved(tmp_path, 10, 15, keep=2)
    assert checkpoints.steps(tmp_path) == [10, 15]
    assert (tmp_path / name).is_dir()


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    saved(tmp_path, 5)
    monkeypatch.setattr(checkpoints, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CheckpointError, match=r"step 5 could not be saved to .*taken"):
        saved(tmp_path / "taken", 5)
    assert (tmp_path / "taken").read_text() == "a file"


BOMB = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
HUGE_HEADER = (1 << 62).to_bytes(8, "little") + b"{}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b"[]"),
        ("state.json", b"{}"),
        ("state.json", b'{"format": 2, "step": "5"}'),
        ("state.json", b'{"format": 2, "step": true}'),
        ("state.json", b'{"format": 7, "step": 10}'),
        ("state.json", b'{"format": 2, "step": 4}'),
        ("state.json", BOMB),
        ("state.json", b"\xff\xfe"),
        ("model.safetensors", b""),
        ("model.safetensors", HUGE_HEADER),
        ("model.safetensors", (8).to_bytes(8, "little") + b'{"w":{}}'),
    ],
)
def test_contents_that_checksums_vouch_for_are_still_looked_at(tmp_path, name, content):
    saved(tmp_path, 5)
    rewritten(saved(tmp_path, 10), name, content)
    found, wrong = checkpoints.load_newest(tmp_path)
    assert found.step == 5
    assert "step-00000010 cannot be used" in wrong[0]


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b"{}",
        b'{"format": 2, "files": []}',
        b'{"format": 2, "files": {"state.json": 3}}',
        b'{"format": 2, "files": {"../../secret": {"bytes": 1, "sha256": ""}}}',
        BOMB,
    ],
)
def test_manifests_that_make_no_sense_are_rejected(tmp_path, manifest):
    (saved(tmp_path, 5) / checkpoints.manifest.MANIFEST).write_bytes(manifest)
    with pytest.raises(CheckpointError, match="step-00000005 cannot be used"):
        checkpoints.load_newest(tmp_path)


def test_a_link_is_not_followed(tmp_path):
    path = saved(tmp_path / "kept", 5)
    (path / "model.safetensors").rename(tmp_path / "elsewhere")
    (path / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="model.safetensors is not a plain file"):
        checkpoints.load(path)


def test_a_disk_that_cannot_be_read_is_damage_like_any_other(tmp_path, monkeypatch):
    saved(tmp_path, 5, 10)
    real = checkpoints.manifest.file_sha256

    def failing(path):
        if "step-00000010" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(checkpoints.manifest, "file_sha256", failing)
    found, (wrong,) = checkpoints.load_newest(tmp_path)
    assert found.step == 5
    assert os.strerror(errno.EIO) in wrong
