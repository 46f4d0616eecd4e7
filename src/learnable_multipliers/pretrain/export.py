"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._checksum import file_sha256
from learnable_multipliers._multiplier import multiplier
from learnable_multipliers.optim._packed_multipliers import NAMES
from learnable_multipliers.pretrain.atomic_folder import new_folder
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.tensor_files import save
from learnable_multipliers.pretrain.data.tokenizer import load_tokenizer
from learnable_multipliers.pretrain.gguf import file as gguf_file
from learnable_multipliers.pretrain.model import hugging_face
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, empty_model
from learnable_multipliers.pretrain.optimizer_config import OptimizerConfig
from learnable_multipliers.pretrain.serialization import to_dict
from learnable_multipliers.pretrain.trainer.optimizer import make_plan
from learnable_multipliers.pretrain.trainer.run_folder import load_checkpoint
from learnable_multipliers.pretrain.trainer.run_state import (
    check_model,
    model_config,
    parse_state,
)

GGUF_FILE = "model.gguf"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    step: int
    architecture: str
    num_parameters: int
    notes: tuple[str, ...] = ()
    """What a reader should know: a damaged checkpoint passed over, no tokenizer found."""


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
    stored = {key: t for key, t in state.items() if key.rpartition("/")[2] in NAMES}
    if not stored:
        return {}

    def section(name: str, kind: Any) -> Any:
        config = parse_state(checkpoint, dict[str, Any], checkpoint.state.get("config"), "config")
        given = parse_state(checkpoint, dict[str, Any], config.get(name, {}), f"config.{name}")
        # What an earlier release did not have was as it is by default.
        return parse_state(checkpoint, kind, to_dict(kind()) | given, f"config.{name}")

    shape = section("model", ModelConfig)
    check_model(shape, checkpoint)
    with torch.device("meta"):
        planned = make_plan(HybridLM(shape), section("optimizer", OptimizerConfig))
    matrices = {entry.name: entry.matrix for entry in planned.entries}
    found = {}
    for key, value in stored.items():
        matrix = matrices.get(key.rpartition("/")[0])
        if matrix is None:
            raise checkpoints.CheckpointError(
                f"the checkpoint of step {checkpoint.step} cannot be used: it holds {key}, and its "
                "model has no such matrix"
            )
        # Of one that is learned on a log scale the logarithm is stored.
        found[key] = multiplier(matrix, value)
    return found


def export(
    source: Path, out: Path, dtype: hugging_face.ExportDtype = "float32", *, with_gguf: bool = False
) -> Exported:
    """Write a folder that `from_pretrained` loads: config, weights, tokenizer.

    The weights are the effective ones, with multipliers merged. The multipliers are also written to
    multipliers.safetensors, for inspection, and the model to model.gguf if asked for.
    """
    if with_gguf:
        gguf_file.package()
    with new_folder(out) as folder:
        checkpoint, notes = load_checkpoint(source)
        model = load_model(checkpoint)
        tokenizer, eos_token, _ = tokenizer_of(source, checkpoint)
        loaded = eos = None
        if tokenizer is None and with_gguf:
            raise ValueError(
                f"no tokenizer.json was found beside {source}, and a GGUF file holds one: export "
                "the run's folder, or without --gguf"
            )
        if tokenizer is None:
            notes.append(f"no tokenizer.json was found beside {source}: the folder is without one")
        else:
            loaded = load_tokenizer(tokenizer, eos_token)
            eos = loaded.eos_id
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
            described = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": eos_token,
                "model_max_length": model.config.max_length,
            }
            _write(folder / "tokenizer_config.json", described)
        config = hugging_face.to_config(model.config, eos_token_id=eos) | {"dtype": dtype}
        _write(folder / "config.json", config)
        _write(folder / "generation_config.json", {"bos_token_id": eos, "eos_token_id": eos})
        if loaded is not None and with_gguf:
            gguf_file.write(folder / GGUF_FILE, model, loaded, dtype)
        weights = {
            name: hugging_face.cast(name, value, dtype).contiguous()
            for name, value in hugging_face.to_state_dict(model).items()
        }
        # Loaders look for this mark.
        save(weights, folder / "model.safetensors", {"format": "pt"})
        if multipliers := multipliers_of(checkpoint):
            save(multipliers, folder / "multipliers.safetensors")
    architecture = config["architectures"][0]
    return Exported(out, checkpoint.step, architecture, model.num_parameters, tuple(notes))


def tokenizer_of(source: Path, checkpoint: checkpoints.Checkpoint) -> tuple[Path | None, str, str]:
    """Find the tokenizer of a run, from the run's folder or from one of its checkpoints.

    Also return its end-of-document token and SHA-256, as the checkpoint says; a file with another
    SHA-256 is refused.
    """
    eos_token, expected = (
        parse_state(checkpoint, str, checkpoint.state.get(key), f"state.json.{key}")
        for key in ("eos_token", "tokenizer")
    )
    source = source.resolve()
    places = (folder / "tokenizer.json" for folder in (source, source.parent.parent))
    found = next((path for path in places if path.is_file()), None)
    if found is not None and file_sha256(found) != expected:
        raise ValueError(
            f"{found} is not the tokenizer that the model was trained with: its SHA-256 is "
            "another. Copy it from the data, or let lrm train RECIPE --resume do that"
        )
    return found, eos_token, expected


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf8")
