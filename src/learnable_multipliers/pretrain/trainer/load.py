"""Load what a run wrote: checkpoint, model, multipliers and tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from learnable_multipliers._checksum import file_sha256
from learnable_multipliers._multiplier import MULTIPLIERS, multiplier
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.manifest import MANIFEST
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.shards import TOKENIZER_FILE
from learnable_multipliers.pretrain.metrics.log import FILE_NAME as METRICS
from learnable_multipliers.pretrain.model.hybrid import HybridLM, empty_model
from learnable_multipliers.pretrain.trainer.build import make_plan
from learnable_multipliers.pretrain.trainer.run_folder import checkpoint_folder
from learnable_multipliers.pretrain.trainer.run_state import (
    check_model,
    model_config,
    parse_state,
)


def is_run(source: Path) -> bool:
    """Return whether a folder is that of a run, or of one checkpoint."""
    written = any((source / name).is_file() for name in (MANIFEST, METRICS))
    return written or checkpoint_folder(source).is_dir()


def load_checkpoint(source: Path) -> tuple[checkpoints.Checkpoint, list[str]]:
    """Return one checkpoint, or the newest good one of a run and what is wrong with newer ones."""
    if (source / MANIFEST).is_file():
        return checkpoints.load(source), []
    if not is_run(source):
        raise ValueError(
            f"{source} is neither a run nor a checkpoint: give the folder that lrm train wrote "
            "(--out), or one of those in its checkpoints folder"
        )
    if not checkpoints.steps(checkpoint_folder(source)):
        raise ValueError(f"{source} holds no checkpoint yet: a run saves one when it ends or stops")
    return checkpoints.load_newest(checkpoint_folder(source))


def load_model(checkpoint: checkpoints.Checkpoint) -> HybridLM:
    """Return the model that a checkpoint holds, with its effective weights."""
    config = model_config(checkpoint)
    model = empty_model(config)
    weights = dict(checkpoint.tensors["model"])
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def multipliers_of(checkpoint: checkpoints.Checkpoint) -> dict[str, Tensor]:
    """Return the multipliers by matrix and kind: `model.layers.0.mlp.up_proj.weight/row`."""
    state = checkpoint.tensors.get("optimizer", {})
    stored = {key: t for key, t in state.items() if key.rpartition("/")[2] in MULTIPLIERS}
    if not stored:
        return {}

    stored_config = checkpoint.state.get("config")
    config: TrainConfig = parse_state(checkpoint, TrainConfig, stored_config, "state.json.config")
    check_model(config.model, checkpoint)
    with torch.device("meta"):
        planned = make_plan(HybridLM(config.model), config.optimizer)
    matrices = {entry.name: entry.matrix for entry in planned.entries}
    multipliers = {}
    for key, value in stored.items():
        matrix = matrices.get(key.rpartition("/")[0])
        if matrix is None:
            raise checkpoints.CheckpointError(
                f"the checkpoint of step {checkpoint.step} cannot be used: it holds {key}, and its "
                "model has no such matrix"
            )
        # On a log scale the logarithm is stored.
        multipliers[key] = multiplier(matrix, value)
    return multipliers


def tokenizer_of(source: Path, checkpoint: checkpoints.Checkpoint) -> tuple[Path | None, str, str]:
    """Find the tokenizer of a run, from the run's folder or from one of its checkpoints.

    Also return its end-of-document token and SHA-256, as the checkpoint says; raise a ValueError
    for a file with another SHA-256.
    """
    eos_token, expected = (
        parse_state(checkpoint, str, checkpoint.state.get(key), f"state.json.{key}")
        for key in ("eos_token", "tokenizer")
    )
    source = source.resolve()
    places = (folder / TOKENIZER_FILE for folder in (source, source.parent.parent))
    file = next((path for path in places if path.is_file()), None)
    if file is not None and file_sha256(file) != expected:
        raise ValueError(
            f"{file} is not the tokenizer that the model was trained with: its SHA-256 is "
            "another. Copy it from the data, or let lrm train RECIPE --resume do that"
        )
    return file, eos_token, expected
