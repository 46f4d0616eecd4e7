"""Check results, and the checks of a machine: packages, compiler, disk and memory."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from learnable_multipliers._formats import size
from learnable_multipliers.pretrain.trainer.device import Device

Verdict = Literal["ok", "warning", "failed"]
INSTALL = "pip install 'learnable-multipliers[pretrain]'"
LESS_MEMORY = "give --data.micro-batch-sequences a smaller number"
# Training needs the first; reports and logs need the second.
_NEEDED = ("numpy", "safetensors", "tiktoken", "tokenizers")
_SHOWING = ("jinja2", "matplotlib", "tensorboard")
_OLDEST = (3, 11)
_SHARED = Path("/dev/shm")
_LEAST_SHARED = 64 * 2**20
_ERROR = 0.15
"""How far the estimate of memory may be from the peak, as a share of it."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty if the check passed."""


class SkippedError(Exception):
    """A check needs the result of another one that failed."""


def run_check(name: str, check: Callable[[], CheckResult], advice: str) -> CheckResult:
    """Return the result of a check; one that raises has failed.

    Args:
        advice: What to do if it raises.
    """
    try:
        return check()
    except SkippedError as missing:
        return CheckResult(name, "warning", f"skipped: {missing}", "fix the failed check first")
    # Whatever goes wrong here would have gone wrong in the run.
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        if not isinstance(error, ValueError | OSError):
            text = f"{type(error).__name__}: {text}"
        return CheckResult(name, "failed", text, advice)


def check_versions(device: Device) -> CheckResult:
    """Check the versions of Python, torch and, on a GPU, Triton."""
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    try:
        found.append(f"triton {version('triton')}")
        without = False
    except PackageNotFoundError:
        found.append("no triton")
        without = device.device.type == "cuda"
    text = ", ".join(found)
    if sys.version_info < _OLDEST:
        return CheckResult("versions", "failed", text, "use Python 3.11 or newer")
    if without:
        advice = "pip install triton: the optimizer and the scan run several times slower without"
        return CheckResult("versions", "warning", text, advice)
    return CheckResult("versions", "ok", text)


def check_packages() -> CheckResult:
    """Check that the packages are installed."""
    missing = [name for name in (*_NEEDED, *_SHOWING) if importlib.util.find_spec(name) is None]
    if not missing:
        return CheckResult("packages", "ok", ", ".join((*_NEEDED, *_SHOWING)))
    worst = "failed" if set(missing) & set(_NEEDED) else "warning"
    return CheckResult("packages", worst, f"not installed: {', '.join(missing)}", INSTALL)


def check_compiler(device: Device) -> CheckResult:
    """Check that torch.compile finds the compiler it calls."""
    # For CPUs it writes C++; Triton builds the launcher of a kernel in C.
    wanted = os.environ.get("CXX", "g++") if device.device.type == "cpu" else "cc"
    others = ("clang++",) if device.device.type == "cpu" else ("gcc", "clang")
    found = next((name for name in (wanted, *others) if shutil.which(name)), None)
    if found is not None:
        used = "" if device.compiled else ", not used: layers are not compiled on this device"
        return CheckResult("compiler", "ok", f"{found}{used}")
    if not device.compiled:
        return CheckResult("compiler", "ok", f"no {wanted}; not needed: nothing is compiled")
    return CheckResult(
        "compiler",
        "failed",
        f"torch.compile needs {wanted}, which is not installed",
        f"install {wanted}, or do not compile: --runtime.compile off",
    )


def check_folder(out: Path) -> CheckResult:
    """Check that a run can write to its folder; leaves nothing behind."""
    if out.exists() and not out.is_dir():
        return CheckResult("folder", "failed", f"{out} is a file", "choose another folder: --out")
    place = nearest_folder(out)
    try:
        with tempfile.TemporaryDirectory(prefix=".lrm-doctor-", dir=place) as folder:
            written = Path(folder) / "file"
            written.write_bytes(b"here")
            written.rename(written.with_name("renamed"))
    except OSError as error:
        return CheckResult(
            "folder",
            "failed",
            f"{place} cannot be written to: {error.strerror or error}",
            "make it writable, or choose another folder: --out",
        )
    return CheckResult("folder", "ok", f"{out} can be written to")


def check_disk(out: Path, checkpoint_bytes: int, keep: int) -> CheckResult:
    """Check that the disk has room for the checkpoints: those kept and the one being written."""
    needed = (keep + 1) * checkpoint_bytes
    free = shutil.disk_usage(nearest_folder(out)).free
    text = f"{size(free)} free, {size(needed)} needed for {keep + 1} checkpoints"
    if free < needed:
        advice = "free some space, or choose a folder on another disk: --out"
        return CheckResult("disk", "failed", text, advice)
    return CheckResult("disk", "ok", text)


def check_shared_memory() -> CheckResult:
    """Check the shared memory between processes; containers often have 64 MB of it."""
    if not _SHARED.is_dir():
        return CheckResult("shared memory", "ok", f"no {_SHARED} here")
    free = shutil.disk_usage(_SHARED).free
    if free < _LEAST_SHARED:
        return CheckResult(
            "shared memory",
            "warning",
            f"{size(free)} free at {_SHARED}",
            "raise it in a container (--shm-size 1g): runs of several processes need it",
        )
    return CheckResult("shared memory", "ok", f"{size(free)} free")


def check_memory(device: Device, needed: int, source: str, ranks: int = 1) -> CheckResult:
    """Compare the memory that a run needs with what is free.

    On a CUDA device running out of memory is an error that can be reported, so a close call is a
    warning and the short run decides. A system that is out of memory ends the process.

    Args:
        source: Where `needed` comes from, for the reader.
    """
    free, each = free_memory(device), f" on each of {ranks} ranks" if ranks > 1 else ""
    text = f"about {size(needed)} needed{each} ({source})"
    if free is None:
        return CheckResult("memory", "ok", f"{text}; how much is free is not known")
    text += f", {size(free)} free"
    advice = f"{LESS_MEMORY}; lrm train RECIPE --dry-run shows what needs how much"
    if needed > free * (1 + _ERROR if device.device.type == "cuda" else 1):
        return CheckResult("memory", "failed", text, advice)
    if needed * (1 + _ERROR) > free:
        text += f"; the estimate may be off by {_ERROR:.0%}"
        return CheckResult("memory", "warning", text, f"if memory runs out, {advice}")
    return CheckResult("memory", "ok", text)


def free_memory(device: Device) -> int | None:
    """Return the free bytes of a device, or None where they are not known."""
    if device.device.type == "cuda":
        return torch.cuda.mem_get_info(device.device)[0]
    meminfo = Path("/proc/meminfo")
    if device.device.type != "cpu" or not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def nearest_folder(path: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
