"""`lrm doctor`: every check passes on a small run, and each fault is found."""

import errno
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnable_multipliers.optim import AdamW
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import RuntimeConfig
from learnable_multipliers.pretrain.preflight import checks, doctor
from learnable_multipliers.pretrain.preflight.checks import CheckResult, run_check, skipped
from learnable_multipliers.pretrain.preflight.doctor import run_checks, summary
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.device import choose_device
from runs import damage, small_run, trained
from test_cli import command_of

CPU = choose_device(RuntimeConfig(device="cpu"))
Usage = namedtuple("Usage", "total used free")


def checked(config):
    """Return the check results by name."""
    return {result.name: result for result in run_checks(config)}


def outcome(check, *arguments):
    return run_check("it", lambda: check(*arguments), "")


def bad(results):
    return {result.name: result.verdict for result in results.values() if result.verdict != "ok"}


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    monkeypatch.setattr(doctor, "_TIMED", 2)


@pytest.mark.parametrize(
    "changes", [{}, {"kind": "muon"}, {"placement": "none"}], ids=["adamw", "muon", "plain"]
)
def test_all_is_well_and_nothing_is_left_behind(data, tmp_path, changes):
    config = small_run(data, tmp_path / "runs" / "run")
    found = checked(replace(config, optimizer=replace(config.optimizer, **changes)))
    assert bad(found) == {}
    assert len(found) == 17
    assert all(not result.advice for result in found.values())
    assert "no bit changed" in found["step with lr 0"].text
    assert "every bit came back" in found["save and load"].text
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_there_is_looked_at_too(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=6)
    trained(config)
    before = {p: p.stat().st_mtime_ns for p in config.out.rglob("*") if p.is_file()}
    found = checked(config)
    assert found["checkpoints"].text == "the newest, of step 6, is good"
    assert {p: p.stat().st_mtime_ns for p in config.out.rglob("*") if p.is_file()} == before
    damage(config.out / "checkpoints" / "step-00000006" / "model.safetensors")
    result = checked(config)["checkpoints"]
    assert result.verdict == "warning"
    assert "model.safetensors is damaged" in result.text
    assert "from step 5" in result.advice
    shutil.rmtree(config.out / "checkpoints" / "step-00000005")
    assert checked(config)["checkpoints"].verdict == "failed"


# -- the machine ------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_to_is_found(data, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Asked of the system itself, a test run by root would be allowed everything.
    monkeypatch.setattr(checks.tempfile, "TemporaryDirectory", refused)
    found = checked(small_run(data, tmp_path / "run"))
    assert bad(found) == {"folder": "failed", "save and load": "failed"}
    assert found["folder"].text == "[Errno 13] Permission denied"
    assert "--out" in found["folder"].advice


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_found(tmp_path):
    tmp_path.chmod(0o500)
    assert outcome(checks.check_folder, tmp_path / "run").verdict == "failed"


def test_a_folder_with_a_run_is_reported_unless_it_is_resumed(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=3)
    trained(config)
    found = checked(config)
    assert (found["folder"].verdict, found["folder"].text) == (
        "warning",
        f"{tmp_path / 'run'} holds a run already",
    )
    assert found["folder"].advice.startswith("resume it (--resume)")
    assert checked(replace(config, resume=True))["folder"].verdict == "ok"


def test_a_file_in_place_of_the_folder_is_found(tmp_path):
    (tmp_path / "run").write_text("")
    result = outcome(checks.check_folder, tmp_path / "run")
    assert (result.verdict, result.text) == ("failed", f"{tmp_path / 'run'} is a file")


def test_a_disk_too_small_for_the_checkpoints_is_found(data, tmp_path, monkeypatch):
    config = small_run(data, tmp_path / "run")
    # Shared memory has its own limit, which this is above.
    for free, verdict in ((70_000_000, "ok"), (300_000, "failed")):
        usage = Usage(10**9, 0, free)
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda path, u=usage: u)
        assert checked(config)["disk"].verdict == verdict
    # The estimate is the size of what is written.
    trained(config)
    kept = config.out / "checkpoints" / "step-00000012"
    written = sum(file.stat().st_size for file in kept.glob("*.safetensors"))
    told = []
    monkeypatch.setattr(checks, "check_disk", lambda out, size, keep: told.append(size) or "")
    list(run_checks(config))
    assert told[0] == pytest.approx(written, rel=0.15)


def test_little_shared_memory_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "_SHARED", tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(0, 0, 1000))
    assert outcome(checks.check_shared_memory).verdict == "warning"
    monkeypatch.setattr(checks, "_SHARED", tmp_path / "none")
    assert outcome(checks.check_shared_memory).verdict == "ok"


@pytest.mark.parametrize(
    ("missing", "verdict"), [("tokenizers", "failed"), ("matplotlib", "warning")]
)
def test_a_missing_package_is_named(monkeypatch, missing, verdict):
    spec = checks.importlib.util.find_spec
    monkeypatch.setattr(
        checks.importlib.util, "find_spec", lambda n: None if n == missing else spec(n)
    )
    result = outcome(checks.check_packages)
    assert result.verdict == verdict
    assert result.text == f"not installed: {missing}"


def test_a_missing_compiler_matters_where_something_is_compiled(monkeypatch):
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert outcome(checks.check_compiler, CPU).verdict == "ok"
    result = outcome(checks.check_compiler, replace(CPU, compiled=True))
    assert result.verdict == "failed"
    assert "--runtime.compile off" in result.advice


def test_without_triton_a_gpu_is_slow(monkeypatch):
    def missing(name):
        raise checks.PackageNotFoundError(name)

    monkeypatch.setattr(checks, "version", missing)
    assert outcome(checks.check_versions, CPU).verdict == "ok"
    result = outcome(checks.check_versions, replace(CPU, device=torch.device("cuda")))
    assert (result.verdict, "triton" in result.advice) == ("warning", True)


def test_too_little_memory_is_found_before_it_is_tried(data, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda device: 1000)
    monkeypatch.setattr(doctor, "build_model", lambda *_: pytest.fail("nothing is built"))
    found = checked(small_run(data, tmp_path / "run"))
    assert bad(found) == {
        "memory": "failed",
        "step with lr 0": "warning",
        "speed": "warning",
        "save and load": "warning",
    }
    assert "--data.micro-batch-sequences" in found["memory"].advice
    assert found["speed"].text.startswith("skipped: ")


def test_free_memory_is_that_of_the_machine():
    free = checks.free_memory(CPU)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free is None or 0 < free < total


# -- the run ----------------------------------------------------------------------------------


def test_an_optimizer_that_moves_without_a_rate_is_found(data, tmp_path, monkeypatch):
    step = AdamW.step

    def moving(self, closure=None):
        step(self, closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] += 1e-3
        self.sync_from_model_()

    monkeypatch.setattr(AdamW, "step", moving)
    found = checked(small_run(data, tmp_path / "run"))
    assert found["step with lr 0"].verdict == "failed"
    assert "tensors changed" in found["step with lr 0"].text
    assert found["speed"].verdict == "ok"


def test_a_checkpoint_that_comes_back_otherwise_is_found(data, tmp_path, monkeypatch):
    load = checkpoints.load

    def broken(path):
        kept = load(path)
        # One bit: the sign of a zero, as the moments of unseen tokens are; -0.0 equals 0.0.
        moment = kept.tensors["optimizer"]["model.embed_tokens.weight/exp_avg"].view(-1)
        zero = moment.eq(0).nonzero()[0]
        moment.view(torch.int32)[zero] ^= -(2**31)
        return kept

    monkeypatch.setattr(doctor.checkpoints, "load", broken)
    result = checked(small_run(data, tmp_path / "run"))["save and load"]
    assert result.verdict == "failed"
    assert "came back: 1 differ" in result.text
    assert "/exp_avg" in result.text


def test_a_loss_that_is_none_or_far_from_guessing_is_found(data, tmp_path, monkeypatch):
    config = small_run(data, tmp_path / "run")
    gradients = doctor.ShortRun.gradients
    for change, verdict in ((float("nan"), "failed"), (1.5, "warning"), (0.5, "ok")):
        monkeypatch.setattr(
            doctor.ShortRun, "gradients", lambda self, c=change: gradients(self) + c
        )
        assert checked(config)["step with lr 0"].verdict == verdict


@pytest.mark.parametrize("file", ["tokenizer.json", "train-00000.bin", "valid-00000.bin"])
def test_damaged_data_are_found(data, tmp_path, file):
    shutil.copytree(data, tmp_path / "data")
    config = small_run(tmp_path / "data", tmp_path / "run")
    assert checked(config)["checksums"].verdict == "ok"
    (path,) = (tmp_path / "data").glob(file)
    content = bytearray(path.read_bytes())
    # JSON stays JSON: a space more, a token changed.
    path.write_bytes(
        content + b" " if file.endswith("json") else bytes([content[0] ^ 1]) + content[1:]
    )
    results = checked(config)
    assert f"{path} is damaged" in results["checksums"].text + results["data"].text


def test_what_cannot_be_opened_or_does_not_work_is_reported_and_the_rest_continues(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    found = checked(replace(config, data=replace(config.data, path=tmp_path / "nowhere")))
    assert found["data"].verdict == "failed"
    assert "no token dataset" in found["data"].text
    assert "lrm data prepare" in found["data"].advice
    assert found["plan"].text == "skipped: the settings are not valid"
    assert len(found) == 17
    found = checked(replace(config, checkpoint=replace(config.checkpoint, keep=1)))
    assert found["settings"].text.startswith("checkpoint.keep must be at least 2")
    found = checked(replace(config, runtime=RuntimeConfig(device="warp")))
    assert found["device"].verdict == "failed"
    assert found["versions"].text == "skipped: there is no device to compute on"
    assert found["disk"].verdict == "ok"


def test_a_check_that_raises_has_failed():
    def raising():
        raise RuntimeError("no\nmore")

    expected = CheckResult("it", "failed", "RuntimeError: no", "do that")
    assert run_check("it", raising, "do that") == expected

    def missing():
        raise skipped("no reason")

    assert run_check("it", missing, "").verdict == "warning"


def test_a_model_that_cannot_be_made_is_reported_once(data, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("cannot be made")

    monkeypatch.setattr(doctor, "build_model", broken)
    assert bad(checked(small_run(data, tmp_path / "run"))) == {
        "step with lr 0": "failed",
        "speed": "warning",
        "save and load": "warning",
    }


def test_the_summary_counts_verdicts():
    results = [CheckResult("", verdict, "") for verdict in ("ok", "ok", "failed", "warning")]
    assert summary(results[:2]) == "2 checks: 2 ok"
    assert summary(results) == "4 checks: 2 ok, 1 to look at, 1 failed"


# -- the command ------------------------------------------------------------------------------


def test_the_command_prints_a_checklist(ask, data):
    config = small_run(data, Path("run"))
    _, *settings = command_of(config)
    code, out, complaints = ask("doctor", *settings)
    assert (code, complaints) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 18
    assert all(line.startswith("ok      ") for line in lines[:-1])
    assert lines[-1].startswith("17 checks: 17 ok, in ")
    trained(config)
    code, out, _ = ask("doctor", "run", "--checkpoint.keep", "1")
    assert code == 1
    assert "failed  settings" in out
    assert f"{'':8}-> change the setting it names" in out
    assert "the newest, of step 12, is good" in out
    assert "1 failed" in out.splitlines()[-1]


def test_what_it_cannot_look_at_is_said(ask):
    code, out, complaints = ask("doctor", "tinny")
    assert (code, out) == (1, "")
    assert "'tinny' is neither a recipe (tiny, " in complaints
    assert complaints.endswith("did you mean tiny?")
    Path("run").mkdir()
    Path("run/config.json").write_text("{")
    assert "run/config.json is not JSON" in ask("doctor", "run")[2]
    assert ask("doctor", "tiny", "--lr", "3")[0] == 2


def test_without_a_name_it_looks_at_the_smallest_recipe(ask, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "learnable_multipliers.cli.preflight.run_checks", lambda config: seen.append(config) or []
    )
    assert ask("doctor")[:2] == (0, "0 checks: 0 ok, in 0s\n")
    assert ask("doctor", "--optimizer.lr", "0.5")[0] == 0
    assert seen[0] == RECIPES["tiny"][1]
    assert seen[1].optimizer.lr == 0.5
