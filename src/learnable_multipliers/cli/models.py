"""Commands about a model, a preset or a Hugging Face folder: `lrm plan` and `lrm symmetries`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from torch import nn

from learnable_multipliers import _planner
from learnable_multipliers._formats import size
from learnable_multipliers._hugging_face import hugging_face_errors
from learnable_multipliers._placement import Placement
from learnable_multipliers._plan import render
from learnable_multipliers.cli.arguments import closest, command, terminal_columns
from learnable_multipliers.pretrain.model.config import MAX_LAYERS
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.rules import parse_rules
from learnable_multipliers.pretrain.trainer.memory import total_memory
from learnable_multipliers.report import figures
from learnable_multipliers.symmetry import find_symmetries

_Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan for."""

    model: _Model
    """A preset (tiny, 20m, falcon-h1-0.5b, ...) or a local Hugging Face folder."""
    placement: Placement = "full"
    """Rows and columns (full), without redundant ones (symmetry-aware), or one each (scalar)."""
    rules: tuple[str, ...] = ()
    """Exceptions, each in quotes, as for lrm train: '. only=head kind=scalar', or @FILE."""
    json: bool = False
    """Print JSON, which Plan.from_json reads, instead of a table."""


@command(PlanConfig)
def plan(config: PlanConfig) -> None:
    """Show which multipliers each matrix of a model would carry, and why.

    Reads only names and shapes: no weights are loaded.
    """
    rules = parse_rules(config.rules)
    planned = _planner.plan(named_model(config.model, weights=False), config.placement, rules)
    print(planned.to_json() if config.json else render(planned, terminal_columns()))


@dataclass(frozen=True, kw_only=True)
class SymmetriesConfig:
    """What to analyse."""

    model: _Model
    """A preset (tiny, 20m, falcon-h1-0.5b, ...) or a local Hugging Face folder."""
    placement: Literal["all", "full", "symmetry-aware", "scalar"] = "all"
    """Scales to analyse: all rows and columns, or the multipliers of a placement."""
    json: bool = False
    """Print JSON, with every layer separately, instead of text."""
    plot: Path | None = None
    """File to plot to (.svg, .png, .pdf): which axes take part in which symmetry."""


@command(SymmetriesConfig)
def symmetries(config: SymmetriesConfig) -> None:
    """Find the rescalings of a model's matrices and norms that do not change its outputs.

    They are computed from the forward pass at random weights, in seconds to minutes; for a large
    model, from a small one of the same architecture. The numbers in front count independent
    rescalings.
    """
    figures.check_format(config.plot)
    start = time.perf_counter()
    # Not on stdout, which may be a file.
    with Console(stderr=True).status(f"analysing {config.model}"):
        model = named_model(config.model, weights=True)
        planned = None if config.placement == "all" else _planner.plan(model, config.placement)
        symmetries_found = find_symmetries(model, planned)
    seconds = time.perf_counter() - start
    if config.plot is not None:
        figures.save(figures.symmetry_map(config.model, symmetries_found.powers()), config.plot)
    if config.json:
        asked = {"model": config.model, "placement": config.placement, "seconds": seconds}
        print(json.dumps(asked | symmetries_found.to_dict(), indent=1))
        return
    scales = "all rows and columns" if planned is None else f"the {config.placement} placement"
    print(
        f"{config.model}, {scales}: {len(symmetries_found)} symmetries, found in {seconds:.1f} s\n"
    )
    print(symmetries_found.summary())


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
    with _errors_of(folder / "config.json"):
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    _check_layers(folder, getattr(config, "num_hidden_layers", 0))
    with torch.device("meta"), _errors_of(folder / "config.json"):
        model = kind.from_config(config, trust_remote_code=False)
    if not weights:
        return model
    _check_fits(folder, sum(parameter.nbytes for parameter in model.parameters()))
    return kind.from_config(config, trust_remote_code=False)


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Turn errors of transformers about a config into one line, without its warnings."""
    with hugging_face_errors(file, "learnable_multipliers.plan or find_symmetries"):
        from transformers.utils import logging

        before = logging.get_verbosity()
        # The error says what its warnings say.
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(before)


def _check_layers(folder: Path, count: object) -> None:
    """Raise a ValueError for a model whose layers are too many to be built one by one."""
    if not isinstance(count, int) or count > MAX_LAYERS:
        raise ValueError(
            f"{folder / 'config.json'}: num_hidden_layers is {count}, not a whole number of at "
            f"most {MAX_LAYERS:,}"
        )


def _check_fits(folder: Path, num_bytes: int) -> None:
    """Raise a ValueError for a model that memory cannot hold."""
    total = total_memory(torch.device("cpu"))
    if total is not None and num_bytes > total:
        raise ValueError(
            f"{folder / 'config.json'}: the weights of this model take {size(num_bytes)}, and "
            f"there are {size(total)} of memory here: lower num_hidden_layers in a copy of the "
            "file, which has the same symmetries"
        )
