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
from learnable_multipliers._checksum import read_verified
from learnable_multipliers._serialization import from_dict
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.trainer import run_folder
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import LLAMA, assert_same, killed_after, small_run, trained


def test_the_folder_names_what_made_it(data, tmp_path):
    trainer = trained(small_run(data, tmp_path / "run", steps=3))
    written = read_verified(tmp_path / "run" / "config.json")
    assert from_dict(TrainConfig, written) == trainer.config
    # The 257 of the data, rounded up.
    assert written["model"]["vocab_size"] == 320
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.")
    assert environment["parameters"] == trainer.model.num_parameters
    assert environment["data"] == trainer.data.fingerprint
    plan = lrm.Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan == trainer.plan


def test_a_resumed_run_records_its_new_settings(data, tmp_path):
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
    # What lies beside the package does not run.
    (tmp_path / "theirs.txt").write_text("other")
    assert len(commit_of_copy()) == 40
    (path.parent / "new.py").write_text("")
    assert commit_of_copy().endswith("-changed")
    (path.parent / "new.py").unlink()
    path.write_text(path.read_text() + "# changed")
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


# -- damage and loss --------------------------------------------------------------------------


def edited(path):
    return json.dumps(json.loads(path.read_text()) | {"seed": 9}).encode()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: b"{", "is not JSON"),
        (lambda path: b"\xff\xfe\x00", "is not JSON"),
        (lambda path: b"null", "holds a NoneType, not a JSON object"),
        (lambda path: b"[" * 10**5, "is nested too deeply"),
        (edited, "was changed after it was written"),
        (None, "is missing"),
    ],
    ids=["cut", "no text", "null", "deep", "edited", "removed"],
)
@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_a_damaged_description_does_not_block_a_resume(data, tmp_path, name, damage, told):
    config = small_run(data, tmp_path / "run", steps=6, model=LLAMA)
    whole = trained(config)
    path = tmp_path / "run" / name
    good = path.read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    path.write_bytes(damage(path)) if damage else path.unlink()
    warnings = []
    resumed = Trainer(
        replace(config, resume=True),
        lambda record: record["kind"] == "warning" and warnings.append(record["text"]),
    )
    assert resumed.train() == "finished"
    assert_same(resumed, whole)
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert told in warnings[0]
    assert "\n" not in warnings[0]
    assert read_verified(path).keys() == {key for key in json.loads(good) if key != "sha256"}
    if name == "config.json":
        again = from_dict(TrainConfig, read_verified(path))
        assert replace(again, resume=False) == whole.config


def test_a_damaged_plan_is_written_again(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3, model=LLAMA)
    trained(config)
    path = tmp_path / "run" / "plan.json"
    good = path.read_bytes()
    path.write_bytes(good[:-5])
    told = []
    # The run has ended: its files are put in order all the same.
    Trainer(replace(config, resume=True), told.append).train()
    assert [f"{path} is not that of the run" in one["text"] for one in told] == [True]
    assert path.read_bytes() == good


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "emptied"])
@pytest.mark.parametrize("every", [1, 0], ids=["logged", "at the end"])
def test_a_folder_that_is_gone_is_not_done(data, tmp_path, how, every):
    config = small_run(data, tmp_path / "run", steps=6, model=LLAMA)
    log = replace(config.log, every=every, weights_every=0, evaluate_every=0)
    trainer = Trainer(replace(config, log=log))
    steps = trainer.steps()
    for _ in range(3):
        next(steps)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if how == "removed":
        shutil.rmtree(tmp_path / "elsewhere")
    elif how == "replaced":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").touch()
    elif how == "emptied":
        (tmp_path / "elsewhere").rename(tmp_path / "run")
        (tmp_path / "run" / "metrics.jsonl").unlink()
        (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(OSError, match=r"run/metrics\.jsonl is gone: its folder was removed"):
        list(steps)
    trainer.close()
    # Nothing that would pass for a run.
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not every or trainer.step == 4
