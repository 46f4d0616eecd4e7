"""A run in one go against the same run killed and resumed, each part in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import CheckpointConfig, TrainConfig
from learnable_multipliers.pretrain.plain_data import from_dict, to_dict
from learnable_multipliers.pretrain.preflight.run_comparison import (
    Comparison,
    compare_checkpoints,
    compare_metrics,
)
from learnable_multipliers.pretrain.trainer.schedule import steps
from learnable_multipliers.pretrain.trainer.trainer import Trainer


def check(config: TrainConfig, half: int) -> None:
    """Raise a ValueError if a config has no such trial."""
    config.check()
    planned = steps(config.schedule, config.data.batch_sequences, config.data.sequence_length)
    if not 1 <= half <= len(planned) // 2:
        raise ValueError(
            f"the run has {len(planned):,} steps: --steps, half of what is trained, must lie "
            f"between 1 and {len(planned) // 2:,}, got {half:,}"
        )


def try_resume(
    config: TrainConfig, half: int, tell: Callable[[str], None] = lambda part: None
) -> list[Comparison]:
    """Train the first steps of a run twice, once with a kill on the way; compare what is left.

    A checkpoint is saved after `half` steps. The process is killed some steps later, so that there
    are lines in the log which the continuation must take back. `tell` hears what is going on.
    """
    check(config, half)
    # Other places to log to would see a run that is none.
    log = replace(config.log, tensorboard=False, wandb="", trackio="", drift=False)
    config = replace(config, name=config.name or "run", log=log)
    whole = replace(
        config, out=config.out / "in-one-go", checkpoint=CheckpointConfig(every=0), resume=False
    )
    parted = replace(
        whole, out=config.out / "resumed", checkpoint=CheckpointConfig(every=half, keep=2)
    )
    tell(f"{2 * half} steps in one go")
    _train(whole, 2 * half)
    killed_at = half + half // 2
    tell(f"{killed_at} steps, then SIGKILL")
    _train(parted, killed_at, killed=True)
    tell(f"resuming from step {half}")
    _train(replace(parted, resume=True), 2 * half)
    kept = [checkpoints.load_newest(run.out / "checkpoints")[0] for run in (whole, parted)]
    return [*compare_checkpoints(*kept), compare_metrics(whole.out, parted.out)]


def _train(config: TrainConfig, until: int, *, killed: bool = False) -> None:
    """Train in a new process."""
    asked = {"config": to_dict(config), "until": until, "killed": killed}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != (-signal.SIGKILL if killed else 0):
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"a process of the trial failed: {said[-1]}")


def _main() -> None:
    asked = json.load(sys.stdin)
    trainer = Trainer(from_dict(TrainConfig, asked["config"]))
    for step in trainer.steps():
        if step == asked["until"]:
            if asked["killed"]:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.save()
            break
    trainer.close()


if __name__ == "__main__":
    try:
        _main()
    # What users can cause is said in one line.
    except (ValueError, OSError) as error:
        sys.exit(str(error))
