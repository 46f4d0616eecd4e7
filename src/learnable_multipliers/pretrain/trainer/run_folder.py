"""The folder of a run: its lock, description files, metrics and checkpoints."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from learnable_multipliers._atomic import replace_file
from learnable_multipliers._checksum import add_checksum, read_verified
from learnable_multipliers._plan import Plan
from learnable_multipliers._serialization import to_dict
from learnable_multipliers.pretrain.atomic_folder import lock, make_folder
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.shards import TOKENIZER_FILE
from learnable_multipliers.pretrain.distributed import World
from learnable_multipliers.pretrain.metrics.log import FILE_NAME as METRICS
from learnable_multipliers.pretrain.metrics.log import MetricLog, Observer
from learnable_multipliers.pretrain.model.hybrid import HybridLM

DESCRIPTIONS = ("config.json", "environment.json", "plan.json", TOKENIZER_FILE)
"""Files that describe a run, written when it begins."""
_LOCK = ".lock"
FILES = (*DESCRIPTIONS, METRICS, "checkpoints", "tensorboard", _LOCK)
"""All that a run writes to its folder, without a resume and W&B."""
_PACKAGES = ("learnable-multipliers", "torch", "triton", "tokenizers", "transformers", "numpy")


def checkpoint_folder(run: Path) -> Path:
    """Return where a run keeps its checkpoints."""
    return run / "checkpoints"


class RunFolder:
    """A folder locked by one run; only the first rank writes, other ranks do nothing."""

    def __init__(self, config: TrainConfig, world: World, observer: Observer | None):
        self.path, self.checkpoints = config.out, checkpoint_folder(config.out)
        self._config, self._world = config, world
        self._observer = observer or (lambda record: None)
        self._warned: set[str] = set()
        self._lock: int | None = None
        self.log: MetricLog | None = None
        """The metrics; None on other ranks than the first, and before `open_log`."""
        if world.is_first:
            self._claim()

    def _claim(self) -> None:
        path, resume = self.path, self._config.resume
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file: choose another folder (--out)")
        if resume and not checkpoints.steps(self.checkpoints):
            raise checkpoints.CheckpointError(
                f"{path} holds no checkpoint to resume from: start a new run, without "
                "--resume and in an empty folder"
            )
        make_folder(path)
        (path / _LOCK).touch()
        try:
            self._lock = lock(path / _LOCK)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {path}: wait for it or end it, or choose "
                "another folder (--out)"
            ) from error
        if self._lock is None:
            self.warn(0, f"{path} cannot be locked: make sure that no other process trains in it")
        if not resume:
            try:
                check_unused(path)
            except BaseException:
                self.close()
                raise

    def open_log(self, step: int, num_steps: int) -> dict[str, Any] | None:
        """Open the metrics, truncated to the current step; return the record of its end, if any."""
        ending = self._world.run_on_all(
            lambda: self._open_log(step, num_steps) if self._world.is_first else None
        )
        return self._world.broadcast(ending)

    def _open_log(self, step: int, num_steps: int) -> dict[str, Any] | None:
        settings = self._config.log
        self.log = MetricLog(
            self.path,
            tensorboard=settings.tensorboard,
            wandb=settings.wandb,
            trackio=settings.trackio,
            intervals={
                "train": settings.every,
                "eval": settings.evaluate_every,
                "sample": settings.sample_every,
                "weights": settings.weights_every,
                "health": settings.weights_every,
                "signals": settings.signals_every,
            },
            observer=self._observer,
        )
        last = None
        if self._config.resume:
            last = self.log.truncate_after(step, has_more=step < num_steps)
        if step and last is None:
            self.warn(
                step,
                f"{self.path / METRICS} has no records before step {step:,}: was it removed?",
            )
        return last if last is not None and last.get("kind") == "end" else None

    def warn(self, step: int, text: str, topic: str | None = None) -> None:
        """Send a warning to the observer, at most once per topic."""
        if not self._world.is_first or topic in self._warned:
            return
        if topic is not None:
            self._warned.add(topic)
        self._observer({"kind": "warning", "step": step, "text": text})

    def describe(
        self,
        step: int,
        device: str,
        model: HybridLM,
        plan: Plan,
        tokenizer: bytes,
        data: str,
        *,
        ended: bool = False,
    ) -> None:
        """Write the run's description; on a resume, damaged files and the current environment.

        Args:
            data: Fingerprint of the text, with its tokenizer.
            ended: Whether no steps are left.
        """
        if not self._world.is_first:
            return
        config, described_environment = to_dict(self._config), environment(device)
        sizes = {"parameters": model.num_parameters, "multipliers": plan.num_multipliers}
        before = self._kept(step, "config.json", config)
        if before.get("schedule") != config["schedule"]:
            self._write("config.json", before | {"schedule": config["schedule"]})
        self._kept(step, "environment.json", described_environment | sizes | {"data": data})
        described = {"plan.json": f"{plan.to_json()}\n".encode(), TOKENIZER_FILE: tokenizer}
        for path, content in ((self.path / name, described[name]) for name in described):
            if not path.is_file() or path.read_bytes() != content:
                self._warn_of_damage(step, f"{path} is not that of the run")
                replace_file(path, content)
        if self._config.resume and not ended:
            # Earlier steps may have run on another machine, with other settings.
            described_environment |= {key: config[key] for key in ("runtime", "schedule")}
            self._write(f"resumed-{step:08d}.json", described_environment)

    def _kept(self, step: int, name: str, otherwise: dict[str, Any]) -> dict[str, Any]:
        """Return the existing description of a resumed run, or write it."""
        if self._config.resume:
            try:
                return read_verified(self.path / name)
            except (ValueError, OSError) as error:
                self._warn_of_damage(step, str(error))
        self._write(name, otherwise)
        return otherwise

    def _warn_of_damage(self, step: int, what: str) -> None:
        if self._config.resume:
            self.warn(step, f"{what}: written again from the resumed run")

    def _write(self, name: str, data: dict[str, Any]) -> None:
        replace_file(self.path / name, (json.dumps(add_checksum(data), indent=1) + "\n").encode())

    def flush(self) -> None:
        """Flush the metrics to disk."""
        if self.log is not None:
            self.log.flush()

    def go_back_to(self, step: int) -> None:
        """Set aside the checkpoints after a step, and drop later records."""
        if self._world.is_first:
            for path in checkpoints.set_aside_after(self.checkpoints, step):
                self.warn(step, f"checkpoint set aside for inspection: {path}")
        if self.log is not None:
            self.log.truncate_after(step)

    def close(self) -> None:
        """Close the metrics and release the lock."""
        try:
            if self.log is not None:
                self.log.close()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __del__(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


def check_unused(path: Path) -> None:
    """Raise a ValueError if a folder holds files that a new run would mix with."""
    metrics = path / METRICS
    if checkpoints.steps(checkpoint_folder(path)):
        raise ValueError(
            f"{path} holds a run already: resume it (--resume), or choose another folder (--out)"
        )
    if metrics.exists() and metrics.stat().st_size:
        raise ValueError(
            f"{path} holds a run already, one that ended before its first checkpoint: choose "
            "another folder (--out), or remove it"
        )
    foreign = [name for name in DESCRIPTIONS if (path / name).exists()]
    # Next to empty metrics they belong to a run that failed before its first step.
    if foreign and not metrics.exists():
        raise ValueError(
            f"{path} is not a run's folder, and holds {', '.join(foreign)}, which a run would "
            "overwrite: choose another folder (--out)"
        )


def environment(device: str) -> dict[str, Any]:
    """Return command, commit, versions and device."""
    versions = {name: package.version for name in _PACKAGES for package in distributions(name=name)}
    return {
        # The name of the program without its folder, which is private.
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "device": device,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **versions},
    }


def commit() -> str | None:
    """Return the commit of the source tree that contains this code; None without one."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=here,
            # Run by a git hook, GIT_DIR points at the repository of that hook.
            env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout.strip()

    try:
        # An installed copy may be inside another repository: only ours tracks this file.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        package = str(here.parents[1])
        # Records and docs may change: they are not what runs. A new file of the package is.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", package)
        new = git("ls-files", "--others", "--exclude-standard", package)
        return git("rev-parse", "HEAD") + ("-changed" if changed or new else "")
    except (OSError, subprocess.SubprocessError):
        return None
