"""The model that a command line names: a preset, or a local Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from learnable_multipliers.cli.arguments import closest
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.model.presets import PRESETS


def named_model(name: str, *, weights: bool) -> nn.Module:
    """Return a model with random weights, or on the meta device: with names and shapes alone."""
    if name in PRESETS:
        if weights:
            return build(PRESETS[name])
        with torch.device("meta"):
            return HybridLM(PRESETS[name])
    folder = Path(name)
    if not (folder / "config.json").is_file():
        near = closest(name, list(PRESETS))
        raise ValueError(
            f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a config.json"
            + (f"; did you mean {near}?" if near else "")
        )
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading a Hugging Face folder needs transformers: "
            "pip install 'learnable-multipliers[transformers]'"
        ) from error
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    with torch.device("cpu" if weights else "meta"):
        return kind.from_config(config)
