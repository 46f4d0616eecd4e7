"""`torchrun ... lrm train` on two ranks: signals save, and no rank waits forever for a dead one."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import processes
import ranks
from learnable_multipliers.cli import main as lrm
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
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return processes.start(
        [*command, *arguments(data, out, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def arguments(data, out, *more):
    """Return the command line of a rank."""
    settings = SMALL | {"model": SMALL["model"] | SHAPE}
    given = [
        word
        for section, named in settings.items()
        for key, value in named.items()
        for word in (f"--{section}.{key}", str(value))
    ]
    place = ["--data.path", str(data), "--out", str(out)]
    return ["train", "tiny-llama", *place, *given, *SWITCHES, *more]


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
def test_a_run_is_stopped_and_continues_and_is_the_same(data, tmp_path):
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
        (signal.SIGSTOP, "waited too long (15 s"),
    ],
    ids=["dead", "hung"],
)
def test_a_rank_that_is_gone_ends_the_run(data, tmp_path, number, told):
    run = start(data, tmp_path / "run", "--parallel.timeout", "15")
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


def train_here(rank, number, port, dying_in, arguments, pipe):
    """Be a rank that torchrun started; the last one is killed in a function."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if rank == number - 1:
        module, name = dying_in
        module = importlib.import_module(f"learnable_multipliers.pretrain.{module}")
        setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    try:
        lrm(arguments)
    except SystemExit as stop:
        pipe.send(stop.code)
    except BaseException:
        pipe.send(traceback.format_exc())


CONNECTING = "could not connect to the others within 3 s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "dying_in", "told"),
    [
        (2, ("trainer.trainer", "init_world"), CONNECTING),
        # The groups of four ranks on two axes connect one after the other.
        (4, ("distributed", "init_device_mesh"), CONNECTING),
        (2, ("trainer.trainer", "optimizer_for"), "lost a rank or waited too long (3 s"),
    ],
    ids=["joining", "meshing", "set-up"],
)
def test_a_rank_that_dies_before_the_first_step_is_one_line_on_all_others(
    data, tmp_path, number, dying_in, told
):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(ranks.PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = arguments(data, tmp_path / "run", "--parallel.timeout", "3")
    pipes, started = [], []
    for rank in range(number):
        pipe, far_end = context.Pipe()
        process = context.Process(
            target=train_here, args=(rank, number, port, dying_in, line, far_end)
        )
        process.start()
        pipes.append(pipe)
        started.append(process)
    try:
        for rank, pipe in enumerate(pipes[:-1]):
            assert pipe.poll(40), f"rank {rank} waits"
            text = pipe.recv()
            assert text.startswith(f"lrm train (rank {rank}): rank {rank} of {number} "), text
            assert told in text
            assert len(text.splitlines()) == 1
    finally:
        for process in started:
            process.kill()
            process.join()


def test_ranks_that_never_connect_end_at_the_deadline():
    program = """
import time
from learnable_multipliers.pretrain.distributed import _deadline
with _deadline(60.0, "in time"):
    pass
with _deadline(0.1, "rank 1 of 2 could not connect"):
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "rank 1 of 2 could not connect\n"
