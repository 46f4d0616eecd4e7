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
    """Folder of a run, whose newest good checkpoint is taken, or of one checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to make."""
    dtype: ExportDtype = "float32"
    """Of the weights written."""


def run(arguments: Sequence[str]) -> None:
    """Export a model."""
    config = read(
        ExportConfig,
        "export",
        arguments,
        description="Turn a trained model into a Hugging Face folder (config, safetensors, "
        "tokenizer) that from_pretrained loads. Multipliers are in the weights already; they are "
        "written beside them for those who want to look.",
    )
    done = export(config.run, config.out, config.dtype)
    for note in done.notes:
        print(f"lrm export: {note}", file=sys.stderr)
    print(
        f"{done.folder}: {done.architecture} of {done.num_parameters:,} parameters, step "
        f"{done.step:,}\n"
        f"Load it: AutoModelForCausalLM.from_pretrained({str(done.folder)!r})"
    )
