"""The symmetries of a run's model, searched for once and kept for the next run."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import learnable_multipliers
from learnable_multipliers._atomic import write_output
from learnable_multipliers._checksum import add_checksum, read_verified
from learnable_multipliers._plan import Plan
from learnable_multipliers._serialization import to_dict
from learnable_multipliers.pretrain.data.training_data import cache_folder
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.symmetry import Symmetries, find_symmetries
from learnable_multipliers.symmetry._serialization import from_json_data, to_json_data


def symmetries_of(config: ModelConfig, plan: Plan) -> Symmetries:
    """Return a model's symmetries under a plan, from the cache folder if they are known.

    A file there that is damaged, or not what its name says, is replaced; a folder that cannot be
    written to is not used.
    """
    key = _key(config, plan)
    path = cache_folder() / "symmetries" / f"{key}.json"
    with suppress(OSError, ValueError):
        kept = read_verified(path)
        if kept.get("key") == key:
            return from_json_data(kept["symmetries"])
    # On the CPU, in float64. Of the same weights for every seed: those of a run do not matter.
    symmetries = find_symmetries(build(config, seed=0), plan)
    text = json.dumps(add_checksum({"key": key, "symmetries": to_json_data(symmetries)}))
    with suppress(OSError):
        # Atomic, with a unique temporary name: several runs may write it at the same time.
        write_output(path, text.encode())
    return symmetries


def _key(config: ModelConfig, plan: Plan) -> str:
    """Return a hash of all that a search depends on: the model, what matrices carry, and our code.

    Learning rates and decays of the plan are not part of it.
    """
    matrices = {entry.name: asdict(entry.matrix) for entry in plan.entries if entry.matrix}
    what = json.dumps([to_dict(config), matrices, _source()], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()


def _source() -> str:
    """Return a hash of the package: another version may find, or write, something else."""
    folder = Path(learnable_multipliers.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
