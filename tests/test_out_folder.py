"""A dataset's folder: what killed processes leave beside it goes, and nobody's work with it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from learnable_multipliers.pretrain.atomic_folder import (
    clear_leftovers,
    new_folder,
)
from processes import start

LRM = [sys.executable, "-c", "from learnable_multipliers.cli import main; main()"]


def make_dataset(folder, text):
    folder.mkdir()
    (folder / "manifest.json").write_text(text)


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    left = tmp_path / ".out.0123abcd.partial"
    left.mkdir()
    (left / "train-00000.bin").write_bytes(b"1")
    others = tmp_path / ".out2.0123abcd.partial"
    others.mkdir()
    with new_folder(tmp_path / "out") as living:
        clear_leftovers(tmp_path / "out")
        assert {path.name for path in tmp_path.iterdir()} == {living.name, others.name}
    assert {path.name for path in tmp_path.iterdir()} == {"out", others.name}


def test_a_dataset_that_was_moved_away_comes_back(tmp_path):
    make_dataset(tmp_path / ".out.0123abcd.old", "old")
    clear_leftovers(tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").read_text() == "old"
    make_dataset(tmp_path / ".out.0123abcd.old", "older")
    clear_leftovers(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "manifest.json").read_text() == "old"


def test_a_name_with_signs_of_glob_stands_for_itself(tmp_path):
    (tmp_path / ".ab.0123abcd.partial").mkdir()
    (tmp_path / ".a[b].0123abcd.partial").mkdir()
    clear_leftovers(tmp_path / "a[b]")
    assert [path.name for path in tmp_path.iterdir()] == [".ab.0123abcd.partial"]


def test_a_folder_that_cannot_be_made_is_reported_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(NotADirectoryError, match="file/x"),
        new_folder(tmp_path / "file" / "x" / "y"),
    ):
        pytest.fail("there is no folder to work in")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_preparation_that_is_ended_leaves_nothing_for_good(tmp_path, number):
    line = [*LRM, "data", "prepare", "--out", "out", "--max-bytes", "4000000", "--overwrite"]
    process = start(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*.partial/train-*")):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(number)
    process.communicate(timeout=60)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected
    if number == signal.SIGKILL:
        assert list(tmp_path.glob(".out.*.partial"))
        clear_leftovers(tmp_path / "out")
    assert os.listdir(tmp_path) == []
