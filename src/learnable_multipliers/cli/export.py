"""`lrm export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from learnable_multipliers.pretrain.export import ExportDtype, export


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Turn a trained model into a Hugging Face folder: config, safetensors, tokenizer."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, whose newest good checkpoint is taken, or of one checkpoint."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to make."""
    dtype: ExportDtype = "float32"
    """Of the weights written."""


def run(arguments: Sequence[str]) -> None:
    """Export a model."""
    config = tyro.cli(ExportConfig, prog="lrm export", args=arguments)
    done = export(config.source, config.out, config.dtype)
    print(
        f"{done.folder}: {done.architecture} of {done.num_parameters:,} parameters, step "
        f"{done.step:,}. Load it with AutoModelForCausalLM.from_pretrained({str(done.folder)!r})."
    )
