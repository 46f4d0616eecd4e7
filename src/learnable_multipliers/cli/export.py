"""`lrm export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from learnable_multipliers.cli.arguments import read
from learnable_multipliers.pretrain.export import ExportDtype, export


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and where to."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run (its newest good checkpoint is read) or of one checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to create."""
    dtype: ExportDtype = "float32"
    """Dtype of the exported weights."""


def run(arguments: Sequence[str]) -> None:
    """Export a model."""
    config = read(
        ExportConfig,
        "export",
        arguments,
        description="Export a trained model to a Hugging Face folder (config, safetensors, "
        "tokenizer) that from_pretrained loads. The weights include the multipliers, which are "
        "also written to a file of their own for analysis.",
    )
    done = export(config.run, config.out, config.dtype)
    for note in done.notes:
        print(f"lrm export: {note}", file=sys.stderr)
    print(
        f"{done.folder}: {done.architecture} of {done.num_parameters:,} parameters, step "
        f"{done.step:,}\n"
        f"Load it: AutoModelForCausalLM.from_pretrained({str(done.folder)!r})"
    )
