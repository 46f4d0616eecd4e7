"""Compiled code is kept in a folder that only the user can write to, and a second run finds it."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnable_multipliers.pretrain.config import RuntimeConfig
from learnable_multipliers.pretrain.preflight import doctor
from learnable_multipliers.pretrain.trainer import compile_cache
from learnable_multipliers.pretrain.trainer.compile_cache import set_compile_cache
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import small_run

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Start without torch's settings, and leave none behind."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def settings():
    return [os.environ.get(name) for name in NAMES]


def test_code_is_kept_where_only_the_user_can_write(tmp_path):
    assert set_compile_cache(tmp_path / "cache") is None
    (folder,) = (tmp_path / "cache" / "compiled").iterdir()
    assert folder.name.startswith(f"torch-{torch.__version__}-")
    assert settings() == [str(folder), str(folder / "triton")]
    for path in (folder, folder.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_settings_of_the_user_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert set_compile_cache(tmp_path) is None
    assert settings()[1] == "mine"
    assert Path(settings()[0]).parent == tmp_path / "compiled"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine too")
    assert set_compile_cache(tmp_path / "other") is None
    assert settings() == ["mine too", None]
    assert not (tmp_path / "other").exists()


def test_another_cpu_does_not_load_what_was_compiled_for_this_one(tmp_path, monkeypatch):
    folders = set()
    for flags in ("avx2 avx512_bf16", "avx2"):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
        monkeypatch.setattr(compile_cache, "_CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        assert set_compile_cache(tmp_path) is None
        folders.add(settings()[0])
    assert len(folders) == 2


def writable_for_others(base):
    (base / "compiled").mkdir()
    (base / "compiled").chmod(0o777)
    return "other users can write to it"


def a_file(base):
    (base / "compiled").write_text("")
    return os.strerror(errno.EEXIST)


@pytest.mark.parametrize("spoil", [writable_for_others, a_file])
def test_a_folder_that_cannot_be_used_is_reported_and_not_set(tmp_path, spoil):
    reason = spoil(tmp_path)
    found = set_compile_cache(tmp_path)
    assert f"{tmp_path / 'compiled'} cannot keep compiled code ({reason})" in found.text
    assert "TORCHINDUCTOR_CACHE_DIR" in found.advice
    assert settings() == [None, None]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_does_not_stop_a_run(data, tmp_path, monkeypatch, number):
    def full(**_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    warnings = []
    config = small_run(data, tmp_path / "run")
    config = replace(config, runtime=RuntimeConfig(device="cpu", compile="on"))
    trainer = Trainer(config, lambda record: warnings.append(record["text"]))
    trainer.close()
    assert [os.strerror(number) in text for text in warnings] == [True]
    # torch sets its own default when it is asked to compile.
    assert not str(settings()[0]).startswith(os.environ["LRM_CACHE"])
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    result = next(r for r in doctor.run_checks(config) if r.name == "device")
    assert result.verdict == "warning"
    assert os.strerror(number) in result.text


def test_a_run_that_compiles_nothing_makes_no_folder(data, tmp_path, monkeypatch):
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))
    Trainer(small_run(data, tmp_path / "run")).close()
    assert settings() == [None, None]
    assert not (tmp_path / "cache" / "compiled").exists()


PROGRAM = """
import json, os, sys, tempfile
from learnable_multipliers.cli.train import configure
from learnable_multipliers.pretrain.trainer.trainer import Trainer

trainer = Trainer(configure(sys.argv[1:]))
steps = trainer.steps()
next(steps)
trainer.close()
from torch._dynamo.utils import counters

keys = "fxgraph_cache_hit", "fxgraph_cache_miss"
found = {key: counters["inductor"][key] for key in keys}
found |= {"graphs": counters["stats"]["unique_graphs"], "loss": trainer._losses.meter.read().mean}
print(json.dumps(found | {"folder": os.environ["TORCHINDUCTOR_CACHE_DIR"]}))
"""


@pytest.mark.slow
def test_a_second_process_finds_what_two_at_once_have_compiled(data, tmp_path):
    for name in ("cache", "temporary"):
        (tmp_path / name).mkdir()
    own = {"LRM_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")}

    def start(out):
        command = [sys.executable, "-c", PROGRAM, "tiny-llama", "--out", str(tmp_path / out)]
        command += ["--data.path", str(data), "--data.sequence-length", "32"]
        command += ["--data.batch-sequences", "2", "--model.num-layers", "4"]
        command += ["--runtime.device", "cpu", "--runtime.compile", "on", "--log.no-drift"]
        command += ["--runtime.num-threads", "1"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | own)

    def results(*processes):
        lines = [process.communicate()[0].splitlines()[-1] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes)
        return [json.loads(line) for line in lines]

    first, _ = cold = results(start("one"), start("two"))
    (warm,) = results(start("three"))
    assert Path(warm["folder"]).parent == tmp_path / "cache" / "compiled"
    # Forward and backward of all layers, and of the loss.
    assert (first["graphs"], warm["graphs"]) == (2, 2)
    assert first["fxgraph_cache_miss"] + first["fxgraph_cache_hit"] == 4
    assert (warm["fxgraph_cache_hit"], warm["fxgraph_cache_miss"]) == (4, 0)
    assert {run["loss"] for run in cold} == {warm["loss"]}
