"""`lrm plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import nn

from learnable_multipliers.cli.arguments import closest, read
from learnable_multipliers.placement import Placement
from learnable_multipliers.plan import plan
from learnable_multipliers.pretrain.models.hybrid import HybridLM
from learnable_multipliers.pretrain.models.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan for."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset (tiny, 20m, falcon-h1-0.5b, ...) or a local Hugging Face folder."""
    placement: Placement = "full"
    """Row and column everywhere (full), those free of symmetries, or one number each (scalar)."""
    json: Path | None = None
    """Write the plan to this file as well."""


def run(arguments: Sequence[str]) -> None:
    """Print the plan of a model."""
    config = read(
        PlanConfig,
        "plan",
        arguments,
        description="Show which multipliers each matrix of a model would carry, and why. Reads "
        "names and shapes alone: no weights are loaded.",
    )
    planned = plan(_without_weights(config.model), config.placement)
    print(planned)
    if config.json is not None:
        config.json.write_text(planned.to_json() + "\n", encoding="utf8")


def _without_weights(name: str) -> nn.Module:
    """Return the model on the meta device: a plan needs names and shapes alone."""
    if name in PRESETS:
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
    with torch.device("meta"):
        return kind.from_config(config)
