"""The folder where torch.compile and Triton keep compiled code for the next run.

torch's default is among temporary files, which a reboot or the end of a job removes. Runs can share
a folder: torch renames complete files into it. It executes what it reads there, so nobody but the
user may write to it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import torch

from learnable_multipliers.pretrain.trainer.device import PerformanceWarning

_CPUINFO = Path("/proc/cpuinfo")
_ROOM = 4 << 20
"""Bytes that must fit, as much as a small model compiles to."""


def set_compile_cache(base: Path) -> PerformanceWarning | None:
    """Compile into a folder of the user, unless the environment names another.

    Call it before anything is compiled. Returns why a later start may have to compile again.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return None
    try:
        folder = _prepared(base / "compiled")
    except OSError as error:
        return PerformanceWarning(
            f"{base / 'compiled'} cannot keep compiled code ({error.strerror or error}): torch "
            "keeps it among temporary files, and a later start may have to compile again",
            "set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write to",
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    return None


def _prepared(parent: Path) -> Path:
    """Return the folder for this machine in one that only the user can write to."""
    parent.parent.mkdir(parents=True, exist_ok=True)
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.stat()
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
        raise PermissionError("other users can write to it")
    folder = parent.absolute() / f"torch-{torch.__version__}-{_machine()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_ROOM))
    return folder


def _machine() -> str:
    """Return a name for what compiled code depends on and torch's keys leave out.

    C++ is compiled for all instructions of this CPU, and home folders are shared by machines.
    """
    flags = ""
    if _CPUINFO.is_file():
        lines = _CPUINFO.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    known = (flags, platform.machine(), platform.libc_ver(), platform.python_version())
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]
