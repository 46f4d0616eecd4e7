"""Check results, and the checks of a machine: packages, compiler, disk and memory."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from learnable_multipliers._formats import size
from learnable_multipliers.pretrain.trainer import memory
from learnable_multipliers.pretrain.trainer.device import Device

Verdict = Literal["ok", "warning", "failed"]
MEMORY_ADVICE = f"{memory.MEMORY_ADVICE}; lrm train RECIPE --dry-run shows what needs how much"
# Training needs the first; reports and logs need the second.
_NEEDED = ("numpy", "safetensors", "tiktoken", "tokenizers")
_SHOWING = ("jinja2", "matplotlib", "tensorboard")
_SHARED = Path("/dev/shm")
_LEAST_SHARED = 64 * 2**20
_ERROR = 0.15
"""Relative error allowed between the estimate of memory and the peak."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty if the check passed."""


class CheckError(Exception):
    """Raised by a check that does not pass; a check that passes returns a text.

    Args:
        advice: What to do; empty for the usual advice of the check.
    """

    def __init__(self, text: str, advice: str = "", verdict: Verdict = "failed"):
        super().__init__(text)
        self.advice = advice
        self.verdict: Verdict = verdict


def skipped(reason: str) -> CheckError:
    """Return the error of a check that needs the result of a failed one."""
    return CheckError(f"skipped: {reason}", "fix the failed check first", "warning")


def run_check(name: str, check: Callable[[], str], advice: str) -> CheckResult:
    """Return the result of a check.

    Args:
        advice: What to do if it fails.
    """
    try:
        return CheckResult(name, "ok", check())
    except CheckError as error:
        return CheckResult(name, error.verdict, str(error), error.advice or advice)
    # Any error here would have occurred in the run.
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        if not isinstance(error, ValueError | OSError):
            text = f"{type(error).__name__}: {text}"
        return CheckResult(name, "failed", text, advice)


def check_versions(device: Device) -> str:
    """Check the versions of Python, torch and, on a GPU, Triton."""
    text = f"Python {platform.python_version()}, torch {torch.__version__}, "
    try:
        return f"{text}triton {version('triton')}"
    except PackageNotFoundError:
        text += "no triton"
    if device.device.type == "cuda":
        advice = "pip install triton: the optimizer and the scan run several times slower without"
        raise CheckError(text, advice, "warning")
    return text


def check_packages() -> str:
    """Check that the packages are installed."""
    missing = [name for name in (*_NEEDED, *_SHOWING) if importlib.util.find_spec(name) is None]
    if missing:
        worst: Verdict = "failed" if set(missing) & set(_NEEDED) else "warning"
        raise CheckError(f"not installed: {', '.join(missing)}", verdict=worst)
    return ", ".join((*_NEEDED, *_SHOWING))


def check_compiler(device: Device) -> str:
    """Check that torch.compile finds the compiler it calls."""
    # For CPUs it writes C++; Triton builds the launcher of a kernel in C.
    wanted = os.environ.get("CXX", "g++") if device.device.type == "cpu" else "cc"
    others = ("clang++",) if device.device.type == "cpu" else ("gcc", "clang")
    compiler = next((name for name in (wanted, *others) if shutil.which(name)), None)
    if not device.compiled:
        return f"{compiler or f'no {wanted}'}, not used: layers are not compiled on this device"
    if compiler is None:
        raise CheckError(
            f"torch.compile needs {wanted}, which is not installed",
            f"install {wanted}, or do not compile: --runtime.compile off",
        )
    return compiler


def check_folder(out: Path) -> str:
    """Check that a run can write to its folder; removes what it writes."""
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise CheckError(f"{nearest} is a file")
    with tempfile.TemporaryDirectory(prefix=".lrm-doctor-", dir=nearest_folder(out)) as folder:
        written = Path(folder) / "file"
        written.write_bytes(b"content")
        written.rename(written.with_name("renamed"))
    return f"{out} can be written to"


def check_disk(out: Path, checkpoint_bytes: int, keep: int) -> str:
    """Check that the disk has room for the checkpoints: those kept and the one being written."""
    needed = (keep + 1) * checkpoint_bytes
    free = shutil.disk_usage(nearest_folder(out)).free
    text = f"{size(free)} free, {size(needed)} needed for {keep + 1} checkpoints"
    if free < needed:
        raise CheckError(text)
    return text


def check_shared_memory() -> str:
    """Check the shared memory between processes; containers often have 64 MB of it."""
    if not _SHARED.is_dir():
        return f"no {_SHARED} here"
    free = shutil.disk_usage(_SHARED).free
    if free < _LEAST_SHARED:
        raise CheckError(f"{size(free)} free at {_SHARED}", verdict="warning")
    return f"{size(free)} free"


def check_memory(device: Device, needed: int, source: str, ranks: int = 1) -> str:
    """Compare the memory that a run needs with what is free.

    On a CUDA device running out of memory is an error that can be reported, so a close call is a
    warning and the short run decides. A system that is out of memory ends the process.

    Args:
        source: Where `needed` comes from, for the reader.
    """
    free, each = free_memory(device), f" on each of {ranks} ranks" if ranks > 1 else ""
    text = f"about {size(needed)} needed{each} ({source})"
    if free is None:
        return f"{text}; how much is free is not known"
    text += f", {size(free)} free"
    if needed > free * (1 + _ERROR if device.device.type == "cuda" else 1):
        raise CheckError(text, MEMORY_ADVICE)
    if needed * (1 + _ERROR) > free:
        text += f"; the estimate may be off by {_ERROR:.0%}"
        raise CheckError(text, f"if memory runs out, {MEMORY_ADVICE}", "warning")
    return text


def free_memory(device: Device) -> int | None:
    """Return the free bytes of a device, or None if unknown."""
    if device.device.type == "cuda":
        return torch.cuda.mem_get_info(device.device)[0]
    return memory.system_memory("MemAvailable") if device.device.type == "cpu" else None


def nearest_folder(path: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
