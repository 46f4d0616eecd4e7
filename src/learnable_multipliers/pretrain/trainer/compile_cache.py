"""A persistent cache folder for torch.compile and Triton.

torch's default is a temporary folder, removed by a reboot or the end of a job. Runs can share the
folder, since torch writes files atomically. torch executes files from it, so only the user may have
write access.
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
"""Free bytes needed: the compiled code of a small model."""


def set_compile_cache(base: Path) -> PerformanceWarning | None:
    """Set the cache folder of compiled code, unless the environment does.

    Call it before anything is compiled. Return a warning if a later start may compile again.
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
    """Return this machine's folder inside one that only the user can write to."""
    parent.parent.mkdir(parents=True, exist_ok=True)
    parent.mkdir(mode=0o700, exist_ok=True)
    status = parent.stat()
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        raise PermissionError("other users can write to it")
    folder = parent.absolute() / f"torch-{torch.__version__}-{_machine()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_ROOM))
    return folder


def _machine() -> str:
    """Return a hash of what compiled code depends on but torch's keys omit.

    C++ is compiled for this CPU's instructions, and machines may share a home folder.
    """
    flags = ""
    if _CPUINFO.is_file():
        lines = _CPUINFO.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    known = (flags, platform.machine(), platform.libc_ver(), platform.python_version())
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]
