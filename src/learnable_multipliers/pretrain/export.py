"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from learnable_multipliers.pretrain import checkpoint as checkpoints
from learnable_multipliers.pretrain.config import from_dict
from learnable_multipliers.pretrain.data.tokenizer import EOS_TOKEN, load_tokenizer
from learnable_multipliers.pretrain.models import hugging_face
from learnable_multipliers.pretrain.models.config import ModelConfig
from learnable_multipliers.pretrain.models.hybrid import HybridLM

ExportDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    step: int
    architecture: str
    num_parameters: int


def load_model(source: Path) -> tuple[HybridLM, checkpoints.Checkpoint]:
    """Return the model of a run (its newest good checkpoint) or of one checkpoint."""
    if (source / checkpoints.MANIFEST).is_file():
        kept = checkpoints.load(source)
    elif (source / "checkpoints").is_dir():
        kept, _ = checkpoints.load_newest(source / "checkpoints")
    else:
        raise ValueError(
            f"{source} is neither a run nor a checkpoint: it holds no checkpoints folder and no "
            f"{checkpoints.MANIFEST}"
        )
    config: ModelConfig = from_dict(ModelConfig, kept.state["model"], "model")
    with torch.device("meta"):
        model = HybridLM(config)
    model.to_empty(device="cpu")
    model.tie_()
    weights = dict(kept.tensors["model"])
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model, kept


def export(source: Path, out: Path, dtype: ExportDtype = "float32") -> Exported:
    """Write a folder that `from_pretrained` loads: config, weights, tokenizer.

    The weights are the effective ones: nothing is left to merge. What the multipliers were lies
    beside them in multipliers.safetensors, for those who want to look.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another folder")
    model, kept = load_model(source)
    tokenizer = _tokenizer_of(source)
    eos = None
    if tokenizer is not None:
        eos = load_tokenizer(tokenizer, kept.state.get("eos_token")).eos_id
    config = hugging_face.to_config(model.config, eos_token_id=eos) | {"dtype": dtype}
    state = hugging_face.to_state_dict(model)
    aside = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}"
    aside.mkdir(parents=True)
    try:
        _write(aside / "config.json", config)
        weights = {
            name: value.to(getattr(torch, dtype)).contiguous() for name, value in state.items()
        }
        # Loaders look for this mark.
        save_file(weights, aside / "model.safetensors", {"format": "pt"})
        multipliers = _multipliers(kept.tensors["optimizer"])
        if multipliers:
            save_file(multipliers, aside / "multipliers.safetensors")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, aside / "tokenizer.json")
            _write(
                aside / "tokenizer_config.json",
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": kept.state.get("eos_token", EOS_TOKEN),
                    "model_max_length": model.config.max_length,
                },
            )
        _write(aside / "generation_config.json", {"bos_token_id": eos, "eos_token_id": eos})
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Exported(out, kept.step, config["architectures"][0], model.num_parameters)


def _multipliers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    kinds = ("row", "col", "scalar")
    return {key: value for key, value in state.items() if key.rpartition("/")[2] in kinds}


def _tokenizer_of(source: Path) -> Path | None:
    """Find the tokenizer of a run, from the run's folder or from one of its checkpoints."""
    for folder in (source, source.parent.parent):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf8")
