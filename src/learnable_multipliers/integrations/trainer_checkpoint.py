"""Read checkpoints of the Hugging Face Trainer without running the training script.

`optimizer.pt` has parameters by their position: Trainer puts those with decay first, in the model's
order, then those without. The installed Trainer decides which have decay.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from learnable_multipliers._formats import one_line
from learnable_multipliers._hugging_face import hugging_face_errors
from learnable_multipliers.integrations.saved_run import SavedRun, rebuild_optimizer

OPTIMIZER, SCHEDULER, STATE = "optimizer.pt", "scheduler.pt", "trainer_state.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder, or the newest `checkpoint-N` in it; None if Trainer wrote neither."""
    if (folder / STATE).is_file() or (folder / OPTIMIZER).is_file():
        return folder
    checkpoints = [
        (int(match[1]), path)
        for path in folder.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / STATE).is_file()
    ]
    return max(checkpoints)[1] if checkpoints else None


def read_trainer_checkpoint(folder: Path) -> SavedRun:
    """Return the run in a checkpoint folder; its weights are safetensors, nothing is unpickled."""
    for name, why in (
        (OPTIMIZER, "Trainer writes it unless save_only_model=True"),
        (STATE, "it has the number of steps and the learning rates"),
        ("config.json", "the model is made from it"),
    ):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: {why}")
    saved = _tensors(folder / OPTIMIZER)
    trainer_state = json.loads((folder / STATE).read_text())
    model = _model(folder)
    groups = [{**group, "params": params} for group, params in _grouped(folder, saved, model)]
    states = {
        parameter: saved["state"][index]
        for group, old in zip(groups, saved["param_groups"], strict=True)
        for parameter, index in zip(group["params"], old["params"], strict=True)
        if index in saved["state"]
    }
    for parameter, state in states.items():
        if "exp_avg" in state and state["exp_avg"].shape != parameter.shape:
            raise ValueError(_other_order(folder))
    optimizer, notes = rebuild_optimizer(folder, groups, states)
    step = int(trainer_state["global_step"])
    logged = {
        int(entry["step"]): float(entry["learning_rate"])
        for entry in trainer_state.get("log_history", [])
        if "learning_rate" in entry and "step" in entry
    }
    lrs = None
    if logged:
        lrs = step_rates(logged, step, _base_lr(folder), float(groups[0]["lr"]))
        if set(range(1, step + 1)) - logged.keys():
            notes.append(
                f"learning rates between the {len(logged)} logged ones of {step:,} steps lie on "
                "straight lines"
            )
    name = f"{type(model).__name__} in {folder.name}"
    return SavedRun(
        name=name, optimizer=optimizer, model=model, step=step, lrs=lrs, notes=tuple(notes)
    )


def step_rates(
    logged: Mapping[int, float], step: int, base_lr: float, next_lr: float
) -> list[float]:
    """Return the rate of every step up to `step`, interpolated between the logged ones.

    Args:
        base_lr: The peak of the schedule, from which a run without warmup starts.
        next_lr: Rate of the step after the last.
    """
    points = {at: lr for at, lr in sorted(logged.items()) if 1 <= at <= step}
    if not points:
        points = {1: next_lr}
    first, *later = points.values()
    # A rate that rises at first started at zero, any other at the base rate.
    rises = bool(later) and later[0] > first
    start = {0: 0.0 if rises else max(base_lr, first)}
    ends = [*(start | points | {step + 1: next_lr}).items()]
    rates: dict[int, float] = {}
    for (left, low), (right, high) in pairwise(ends):
        for at in range(left + 1, right + 1):
            rates[at] = low + (high - low) * (at - left) / (right - left)
    return [rates[at] for at in range(1, step + 1)]


def _tensors(path: Path) -> dict[str, Any]:
    """Load a file of tensors and plain values."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read as tensors and plain values, and code in it is never run: "
            f"{one_line(error)}"
        ) from error


def _base_lr(folder: Path) -> float:
    """Return the peak of the schedule; 0 where no scheduler was saved."""
    path = folder / SCHEDULER
    bases = _tensors(path).get("base_lrs", [0.0]) if path.is_file() else [0.0]
    return float(bases[0])


def _model(folder: Path) -> nn.Module:
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no weights that can be read: needed are safetensors, which Trainer "
            "writes"
        )
    with hugging_face_errors(folder, "learnable_multipliers.diagnose, with its optimizer"):
        import transformers
        from transformers.utils import logging

        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # The head that was trained, where this version of transformers has it.
        names = getattr(config, "architectures", None) or [""]
        kind = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            return cast(Any, kind).from_pretrained(
                folder, dtype="auto", use_safetensors=True, local_files_only=True
            )
        finally:
            if shown:
                logging.enable_progress_bar()


def _grouped(
    folder: Path, saved: Mapping[str, Any], model: nn.Module
) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
    """Return the saved groups with the parameters that they train."""
    from transformers import Trainer

    named = dict(model.named_parameters())
    groups: Sequence[dict[str, Any]] = saved["param_groups"]
    if all("param_names" in group for group in groups):
        order = [group["param_names"] for group in groups]
    elif len(groups) == 1:
        order = [list(named)]
    else:
        # The rule does not look at the trainer.
        decaying = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
        order = [[n for n in named if n in decaying], [n for n in named if n not in decaying]]
    sizes = [len(group["params"]) for group in groups]
    if [len(names) for names in order] != sizes or not {n for g in order for n in g} <= set(named):
        raise ValueError(_other_order(folder))
    return [
        (group, [named[name] for name in names]) for group, names in zip(groups, order, strict=True)
    ]


def _other_order(folder: Path) -> str:
    return (
        f"{folder / OPTIMIZER} has other parameters than the model in the groups that Trainer "
        "makes (with decay, without): some were frozen, the groups were made by hand, or another "
        "version of transformers made them. In the training script, "
        "lrm.diagnose(trainer.optimizer, model) needs no such guess"
    )
