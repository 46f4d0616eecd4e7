"""What a run was made with, written down beside its metrics."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("learnable-multipliers", "torch", "triton", "tokenizers", "transformers", "numpy")


def environment(device: str) -> dict[str, Any]:
    """Return command, commit, versions and device."""
    return {
        # The name alone of the program: where it lies is nobody's business.
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "device": device,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **_versions()},
    }


def commit() -> str | None:
    """Return the commit of the source tree this code runs from; None where it is in none."""
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
        # An installed copy may lie inside somebody else's repository: ours knows this file.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        # A new file changes what runs as much as an edited one, if it is part of the package.
        new = git("ls-files", "--others", "--exclude-standard", str(here.parent))
        return git("rev-parse", "HEAD") + ("-changed" if changed or new else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
