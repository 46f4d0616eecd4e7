"""The folder of a run: it tells what made it, and takes in nothing else."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers._checksum import read_sealed
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.serialization import from_dict
from learnable_multipliers.pretrain.trainer import run_folder
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import assert_same, killed_after, small_run, trained


def test_the_folder_tells_what_made_it(data, tmp_path):
    trainer = trained(small_run(data, tmp_path / "run", steps=3))
    written = read_sealed(tmp_path / "run" / "config.json")
    assert from_dict(TrainConfig, written) == trainer.config
    assert written["model"]["vocab_size"] == 257
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.")
    assert environment["parameters"] == trainer.model.num_parameters
    plan = lrm.Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan == trainer.plan


def test_a_run_that_goes_on_tells_what_it_goes_on_with(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    killed_after(config, 6)
    before = (tmp_path / "run" / "config.json").read_bytes()
    trained(replace(config, resume=True, runtime=replace(config.runtime, dtype="bfloat16")))
    found = json.loads((tmp_path / "run" / "resumed-00000005.json").read_text())
    assert found["runtime"]["dtype"] == "bfloat16"
    assert found["versions"]["torch"] == torch.__version__
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_the_command_is_the_one_that_was_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/compare.py", "--out", "a folder"])
    assert run_folder.environment("cpu")["command"] == "compare.py --out 'a folder'"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_copy_in_a_strange_repository_has_no_commit(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    def commit_of_copy():
        spec = importlib.util.spec_from_file_location("copied", path)
        copied = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copied)
        return copied.commit()

    git("init", "--quiet")
    (tmp_path / "theirs.txt").write_text("theirs")
    git("add", "theirs.txt")
    git("commit", "--quiet", "--message", "theirs")
    path = tmp_path / "site-packages" / "package" / "pretrain" / "run_folder.py"
    path.parent.mkdir(parents=True)
    shutil.copyfile(run_folder.__file__, path)
    assert commit_of_copy() is None
    git("add", "site-packages")
    git("commit", "--quiet", "--message", "ours")
    assert len(commit_of_copy()) == 40
    git("init", "--quiet", "elsewhere")
    # As in a hook of another repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere" / ".git"))
    assert len(commit_of_copy()) == 40
    (path.parent / "new.py").write_text("")
    assert commit_of_copy().endswith("-changed")


def test_a_folder_with_a_run_is_not_overwritten(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    killed_after(config, 3)
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_bytes()
    with pytest.raises(ValueError, match="ended before its first checkpoint"):
        Trainer(config)
    assert metrics.read_bytes() == before
    shutil.rmtree(tmp_path / "run")
    trained(config)
    # Without its metrics it is a run all the same: its checkpoints would pass for the new run's.
    metrics.unlink()
    with pytest.raises(ValueError, match="holds a run already: resume it"):
        Trainer(replace(config, seed=5))


def test_a_run_that_failed_before_its_first_step_can_begin_again(data, tmp_path):
    Trainer(small_run(data, tmp_path / "run", steps=3)).close()
    assert trained(small_run(data, tmp_path / "run", steps=3, seed=1)).step == 3
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["seed"] == 1


def test_files_of_somebody_else_are_not_overwritten(data, tmp_path):
    (tmp_path / "tokenizer.json").write_text("mine")
    with pytest.raises(ValueError, match="holds tokenizer.json, which a run would overwrite"):
        Trainer(small_run(data, tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file: choose another folder"):
        Trainer(small_run(data, tmp_path / "tokenizer.json"))


def test_two_processes_do_not_share_a_folder(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    first = Trainer(config)
    for step in first.steps():
        if step == 6:
            # A second one would cut the log under the first one's hands.
            for resume in (False, True):
                with pytest.raises(ValueError, match="another process is training in"):
                    Trainer(replace(config, resume=resume))
    assert [r["step"] for r in read_metrics(config.out) if r["kind"] == "train"][-1] == 12
    assert_same(first, trained(replace(config, resume=True)))
