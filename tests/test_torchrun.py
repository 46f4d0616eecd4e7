"""`torchrun ... lrm train` on two ranks: signals save, and no rank waits forever for a dead one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import processes
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.preflight.resume_check import without_clock

BIN = Path(sys.executable).parent
SMALL = {
    "model": {"vocab-size": 0, "hidden-size": 32, "num-layers": 1, "num-heads": 2},
    "data": {"sequence-length": 32, "batch-sequences": 4},
    "schedule": {"tokens": 60 * 128, "warmup-tokens": 256, "decay-tokens": 1280},
    "log": {"every": 1, "weights-every": 0, "evaluate-every": 0, "evaluate-tokens": 640},
    "checkpoint": {"every": 0},
    "runtime": {"device": "cpu", "num-threads": 1},
    "parallel": {"shard": 2},
}
SHAPE = {"num-kv-heads": 2, "head-dim": 16, "intermediate-size": 48}
SWITCHES = ("--log.no-tensorboard", "--log.no-drift", "--log.sample-tokens", "0")
STEPS = 60
PATIENCE = 120


def start(data, out, *more):
    """Start two ranks; return torchrun."""
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        BIN / "lrm",
    ]
    settings = SMALL | {"model": SMALL["model"] | SHAPE}
    given = [
        word
        for section, named in settings.items()
        for key, value in named.items()
        for word in (f"--{section}.{key}", str(value))
    ]
    command += ["train", "tiny-llama", "--data.path", data, "--out", out, *given, *SWITCHES, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return processes.start(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def wait_for_steps(run, out, count):
    """Wait until a run has taken so many steps."""
    metrics, end = out / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.exists() or metrics.read_text().count('"train"') < count:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def ranks_of(run):
    """Return the processes of the ranks."""
    return [int(p) for p in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


def ended(run):
    """Return exit code and output; ranks that wait forever fail the test."""
    try:
        return run.wait(PATIENCE), run.communicate()[0]
    finally:
        run.kill()


@pytest.mark.slow
def test_a_run_is_stopped_and_goes_on_and_is_the_same(data, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    run = start(data, whole)
    code, text = ended(run)
    assert code == 0, text
    # All ranks have done it, one tells.
    assert text.count("Done in") == 1
    run = start(data, part)
    wait_for_steps(run, part, 5)
    run.send_signal(signal.SIGTERM)
    code, text = ended(run)
    assert code != 0
    assert "SIGTERM: saving step" in text
    (saved,) = checkpoints.steps(part / "checkpoints")
    assert 5 <= saved < STEPS
    code, text = ended(start(data, part, "--resume"))
    assert code == 0, text
    assert without_clock(part) == without_clock(whole)
    names = [f / "checkpoints" / f"step-{STEPS:08d}" for f in (whole, part)]
    for file in sorted(names[0].glob("*.safetensors")):
        assert file.read_bytes() == (names[1] / file.name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "Signal 9 (SIGKILL)"),
        (signal.SIGSTOP, "waited too long (5 s"),
    ],
    ids=["dead", "hung"],
)
def test_a_rank_that_is_gone_ends_the_run(data, tmp_path, number, told):
    run = start(data, tmp_path / "run", "--parallel.timeout", "5")
    wait_for_steps(run, tmp_path / "run", 5)
    first, last = ranks_of(run)
    os.kill(last, number)
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{first}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    # torchrun would wait another half minute for one that cannot hear it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(last, signal.SIGKILL)
    code, text = ended(run)
    assert code != 0
    assert told in text
