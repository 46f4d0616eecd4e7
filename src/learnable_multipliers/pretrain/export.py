"""Export a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learnable_multipliers.pretrain.atomic_folder import new_folder
from learnable_multipliers.pretrain.checkpoint.tensor_files import save
from learnable_multipliers.pretrain.data.tokenizer import load_tokenizer
from learnable_multipliers.pretrain.gguf import file as gguf_file
from learnable_multipliers.pretrain.model import hugging_face
from learnable_multipliers.pretrain.trainer.load import (
    load_checkpoint,
    load_model,
    multipliers_of,
    tokenizer_of,
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


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf8")
