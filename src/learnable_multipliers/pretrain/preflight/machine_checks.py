"""Whether a machine has what a run needs: packages, compilers, disk and memory."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from learnable_multipliers._formats import count
from learnable_multipliers.pretrain.preflight.check_result import Finding
from learnable_multipliers.pretrain.trainer.device import Device

INSTALL = "pip install 'learnable-multipliers[pretrain]'"
# Without these nothing is trained; without those less is shown.
_NEEDED = ("numpy", "safetensors", "tiktoken", "tokenizers")
_SHOWING = ("jinja2", "matplotlib", "tensorboard")
_OLDEST = (3, 11)
_SHARED = Path("/dev/shm")
_LEAST_SHARED = 64 * 2**20
_ESTIMATED = 0.1
"""How far memory has been from its estimate, at most: 8% below, for a compiled Llama on a GPU."""


def check_versions(device: Device) -> Finding:
    """Tell what computes: Python, torch and, on a GPU, Triton."""
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    try:
        found.append(f"triton {version('triton')}")
        without = False
    except PackageNotFoundError:
        found.append("no triton")
        without = device.device.type == "cuda"
    text = ", ".join(found)
    if sys.version_info < _OLDEST:
        return Finding("versions", "failed", text, "use Python 3.11 or newer")
    if without:
        advice = "pip install triton: the optimizer and the scan run several times slower without"
        return Finding("versions", "warning", text, advice)
    return Finding("versions", "ok", text)


def check_packages() -> Finding:
    """See that packages can be found."""
    missing = [name for name in (*_NEEDED, *_SHOWING) if importlib.util.find_spec(name) is None]
    if not missing:
        return Finding("packages", "ok", ", ".join((*_NEEDED, *_SHOWING)))
    worst = "failed" if set(missing) & set(_NEEDED) else "warning"
    return Finding("packages", worst, f"not installed: {', '.join(missing)}", INSTALL)


def check_device(device: Device) -> Finding:
    """Tell where a run computes."""
    precision = str(device.dtype).removeprefix("torch.")
    threads = f", {torch.get_num_threads()} threads" if device.device.type == "cpu" else ""
    return Finding("device", "ok", f"{device.name} in {precision}{threads}")


def check_compiler(device: Device) -> Finding:
    """See that torch.compile finds the compiler it calls."""
    # For CPUs it writes C++; Triton builds the launcher of a kernel in C.
    wanted = os.environ.get("CXX", "g++") if device.device.type == "cpu" else "cc"
    others = ("clang++",) if device.device.type == "cpu" else ("gcc", "clang")
    found = next((name for name in (wanted, *others) if shutil.which(name)), None)
    if found is not None:
        used = "" if device.compiled else ", not used: layers are not compiled here"
        return Finding("compiler", "ok", f"{found}{used}")
    if not device.compiled:
        return Finding("compiler", "ok", f"no {wanted}, and none is needed: nothing is compiled")
    return Finding(
        "compiler",
        "failed",
        f"torch.compile needs {wanted}, which is not there",
        f"install {wanted}, or do without: --runtime.compile off",
    )


def check_folder(out: Path) -> Finding:
    """See that a run can write where it shall; leaves nothing behind."""
    if out.exists() and not out.is_dir():
        return Finding("folder", "failed", f"{out} is a file", "choose another folder: --out")
    place = nearest_folder(out)
    try:
        with tempfile.TemporaryDirectory(prefix=".lrm-doctor-", dir=place) as folder:
            written = Path(folder) / "file"
            written.write_bytes(b"here")
            written.rename(written.with_name("renamed"))
    except OSError as error:
        return Finding(
            "folder",
            "failed",
            f"{place} cannot be written to: {error.strerror or error}",
            "make it writable, or choose another folder: --out",
        )
    return Finding("folder", "ok", f"{out} can be written to")


def check_space(out: Path, checkpoint_bytes: int, keep: int) -> Finding:
    """See that the checkpoints of a run have room: those kept, and the one being written."""
    needed = (keep + 1) * checkpoint_bytes
    free = shutil.disk_usage(nearest_folder(out)).free
    text = f"{size(free)} free, {size(needed)} for {keep + 1} checkpoints"
    if free < needed:
        advice = "make room, or choose a folder on another disk: --out"
        return Finding("disk", "failed", text, advice)
    return Finding("disk", "ok", text)


def check_shared_memory() -> Finding:
    """See that processes of a run could talk to each other; containers often allow 64 MB."""
    if not _SHARED.is_dir():
        return Finding("shared memory", "ok", f"no {_SHARED} here")
    free = shutil.disk_usage(_SHARED).free
    if free < _LEAST_SHARED:
        return Finding(
            "shared memory",
            "warning",
            f"{size(free)} free at {_SHARED}",
            "in a container raise it (--shm-size 1g): several processes need it, one does not",
        )
    return Finding("shared memory", "ok", f"{size(free)} free")


def check_memory(device: Device, needed: int, ranks: int = 1) -> Finding:
    """Compare what a run needs with what is free.

    What is near is left to a trial where lack of memory is an error that can be told: a system
    that is out of it ends the process.
    """
    free, each = free_memory(device), f" on each of {ranks} ranks" if ranks > 1 else ""
    if free is None:
        text = f"about {size(needed)} needed{each}; what is free is not known"
        return Finding("memory", "ok", text)
    text = f"about {size(needed)} needed{each}, {size(free)} free"
    advice = (
        "give --data.micro-batch-sequences a smaller number; lrm train RECIPE --dry-run shows "
        "what takes how much"
    )
    if needed > free * (1 + _ESTIMATED if device.device.type == "cuda" else 1):
        return Finding("memory", "failed", text, advice)
    if needed * (1 + _ESTIMATED) > free:
        text += f", and the estimate may be off by {_ESTIMATED:.0%}"
        return Finding("memory", "warning", text, f"if it does not suffice, {advice}")
    return Finding("memory", "ok", text)


def free_memory(device: Device) -> int | None:
    """Return the bytes that can still be had on a device; None where nobody tells."""
    if device.device.type == "cuda":
        return torch.cuda.mem_get_info(device.device)[0]
    told = Path("/proc/meminfo")
    if device.device.type != "cpu" or not told.is_file():
        return None
    fields = dict(line.split(":", 1) for line in told.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def nearest_folder(path: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def size(num_bytes: float) -> str:
    """Return a number of bytes in words."""
    return f"{count(num_bytes)}B"
