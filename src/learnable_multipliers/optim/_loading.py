"""Load optimizer state, as saved or converted from another plan.

A state carries the fingerprint of its plan, not the plan: checkpointing tools repeat the entries of
a group for each of its parameters. All errors are raised before the optimizer changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._multiplier import MULTIPLIERS, Matrix, effective, initial_values
from learnable_multipliers._plan import Plan
from learnable_multipliers.optim._binding import MEAN_SQUARE
from learnable_multipliers.optim._packed_multipliers import MOMENTS
from learnable_multipliers.optim._sharding import is_sharded, local

FORMAT = 3
"""Format of the optimizer's state. Every parameter group carries it, so all checkpoints do."""
_MOMENTS_OF_RAW = {"exp_avg": 1, "momentum_buffer": 1, "exp_avg_sq": 2}
"""Averages beside a raw weight, and the power of the gradient in them."""
_OF_A_GROUP = ("kind", "weight_decay", "raw_lr_scale")
"""Settings in which the groups of one optimizer differ."""


def fingerprint(matrices: Mapping[str, Matrix]) -> str:
    """Return a short hash of the multipliers that matrices carry.

    Initial values, which matter once, are left out, and so are heads that do not affect the state.
    """
    placed = {name: dataclasses.asdict(matrix) for name, matrix in sorted(matrices.items())}
    for matrix in placed.values():
        for block in matrix["blocks"]:
            del block["init"]
            if not block["per_head"]:
                del block["per_head"], block["head_dim"]
    return hashlib.sha256(json.dumps(placed).encode()).hexdigest()[:16]


def is_ours(saved: dict[str, Any]) -> bool:
    """Return whether a state was written by an optimizer of this library."""
    return any("format" in group for group in saved["param_groups"]) or any(
        "raw" in kept for kept in saved["state"].values()
    )


def check_saved_format(saved: dict[str, Any]) -> None:
    """Raise if a state of this library has another format."""
    for group in saved["param_groups"]:
        number = group.get("format")
        if number != FORMAT:
            what = "has no format number" if number is None else f"is of format {number}"
            raise ValueError(
                f"this optimizer state {what}, and only format {FORMAT} is read here: load it with "
                "the release that wrote it, or start with fresh optimizer state"
            )


def check_saved_shapes(
    groups: Sequence[Mapping[str, Any]],
    saved: Mapping[str, Any],
    plan: Plan,
    entries_of: Callable[[Tensor], Collection[str]] = lambda _: ("raw", *_MOMENTS_OF_RAW),
) -> None:
    """Raise if saved entries are those of a parameter of another shape.

    `entries_of` returns the names of the entries that have a parameter's shape.
    """
    planned = {entry.name: entry.shape for entry in plan.entries}
    names = [group.get("param_names", ()) for group in groups]
    parameters = {
        name: parameter
        for group, own in zip(groups, names, strict=True)
        for name, parameter in zip(own, group["params"], strict=False)
    }
    for index, group in enumerate(saved["param_groups"]):
        saved_names = group.get("param_names")
        if not isinstance(saved_names, list):
            saved_names = names[index] if index < len(names) else ()
        for name, key in zip(saved_names, group["params"], strict=False):
            parameter, kept = parameters.get(name), saved["state"].get(key, {})
            if parameter is None:
                continue
            shape = planned.get(name, tuple(parameter.shape))
            for value in (kept.get(entry) for entry in entries_of(parameter)):
                # Prodigy keeps a number in place of some tensors.
                whole = isinstance(value, Tensor) and value.ndim == len(shape)
                if whole and not _fits(value, parameter, shape):
                    raise ValueError(
                        f"{name}: saved {_as_text(value.shape)}, here {_as_text(shape)}: start "
                        "with fresh optimizer state"
                    )


def _fits(value: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a saved tensor has the whole shape of a parameter, or that of its shard."""
    if tuple(value.shape) == shape:
        return True
    return not is_sharded(value) and value.shape == local(parameter).shape


def _as_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def check_saved_plan(
    groups: Sequence[dict[str, Any]], saved: dict[str, Any], matrices: Mapping[str, Matrix]
) -> None:
    """Raise if the saved groups hold other parameters, or were saved under another plan."""
    _check_saved_parameters(groups, saved["param_groups"])
    for group, other in zip(groups, saved["param_groups"], strict=False):
        names = group.get("param_names", [])
        if group["plan"] != other.get("plan", ""):
            where = _first_difference(zip(names, other["params"], strict=False), saved, matrices)
            raise ValueError(
                f"this optimizer state was saved under another plan, which differs {where}: make "
                "the optimizer with the plan of the saved run, convert the state with "
                "optimizer.load_state_dict(state, from_plan=plan_of_the_saved_run), or start with "
                "fresh optimizer state"
            )


def _check_saved_parameters(
    groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise where the saved groups hold other parameters, or train other parts of them."""
    if not all(isinstance(group.get("param_names"), list) for group in saved_groups):
        pairs = zip(groups, saved_groups, strict=False)
        named = [pair for pair in pairs if isinstance(pair[1].get("param_names"), list)]
        groups, saved_groups = [own for own, _ in named], [saved for _, saved in named]
    here, there = _trained_parts(groups), _trained_parts(saved_groups)
    for name in here:
        if there.get(name, here[name]) != here[name]:
            raise ValueError(
                f'this optimizer state was saved with train="{there[name]}" for {name}, which is '
                f'train="{here[name]}" here: make the optimizer with the plan of the saved run, or '
                "continue from it with optimizer.load_state_dict(state, "
                "from_plan=plan_of_the_saved_run)"
            )
    order = [list(group.get("param_names", ())) for group in groups]
    if [list(group["param_names"]) for group in saved_groups] == order:
        return
    differing = sorted(here.keys() ^ there.keys())
    if not differing:
        raise ValueError(
            "this optimizer state was saved for the same parameters, grouped otherwise (rules with "
            "lr_scale, weight_decay or train changed, or another order): make the groups of the "
            "saved run, or load it with optimizer.load_state_dict(state, "
            "from_plan=plan_of_the_saved_run), then set the groups, which take their settings from "
            "the state"
        )
    raise ValueError(
        "this optimizer state was saved for other parameters, which differ at "
        f"{differing[0]}: make the optimizer for the model of the saved run. If it was frozen or "
        "fixed there, load the state with from_plan=plan_of_the_saved_run"
    )


def _trained_parts(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return by parameter name what is trained of it: all, or its multipliers."""
    return {
        name: group.get("train", "all") for group in groups for name in group.get("param_names", ())
    }


def _first_difference(
    pairs: Iterator[tuple[str, Any]], saved: dict[str, Any], matrices: Mapping[str, Matrix]
) -> str:
    for name, key in pairs:
        kept = saved["state"].get(key)
        if kept is None:
            continue
        there = [part for part in MULTIPLIERS if part in kept]
        carried = matrices[name].value_shapes() if name in matrices else {}
        here = [part for part in MULTIPLIERS if part in carried]
        if there != here:
            return f"at {name} ({'+'.join(there) or 'none'} saved, {'+'.join(here) or 'none'} here)"
    return "in blocks or scales"


def check_saved_moments(
    names: Mapping[Any, tuple[str, Sequence[str]]], saved: dict[str, Any]
) -> None:
    """Raise if a state lacks moments that this optimizer keeps.

    `names` gives the name and the moments of each saved parameter.
    """
    for key, (name, moments) in names.items():
        missing = [m for m in moments if key in saved["state"] and m not in saved["state"][key]]
        if missing:
            raise ValueError(
                f"this optimizer state has no {missing[0]} for {name}: it was saved by another "
                "kind of optimizer. Load it into that kind, or start with fresh optimizer state. "
                'If its raw weight was fixed (train="multipliers"), load it with '
                "from_plan=plan_of_the_saved_run"
            )


def check_saved_names(groups: Sequence[dict[str, Any]], by_name: Mapping[str, Any]) -> None:
    """Raise if a state by parameter name lacks a parameter of these groups."""
    missing = [n for group in groups for n in group["param_names"] if n not in by_name]
    if missing:
        raise ValueError(
            f"this optimizer state has nothing for {missing[0]}: it was saved for another model"
        )


def to_state_dict(groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups, and a state by parameter name, in the form of `state_dict()`."""
    saved_groups, saved_state = [], {}
    for group in groups:
        keys = range(len(saved_state), len(saved_state) + len(group["params"]))
        saved_groups.append({**group, "params": list(keys)})
        saved_state |= {key: state[n] for key, n in zip(keys, group["param_names"], strict=True)}
    # A parameter without state never had a gradient.
    saved_state = {key: value for key, value in saved_state.items() if value}
    return {"state": saved_state, "param_groups": saved_groups}


def convert_plan(
    groups: Sequence[dict[str, Any]],
    saved: dict[str, Any],
    matrices: Mapping[str, Matrix],
    from_plan: Plan,
) -> dict[str, Any]:
    """Return a state of `from_plan` as a state of these groups' plan.

    Multipliers that both plans have are kept. Those of only the old plan become part of the raw
    weight, whose moments are scaled to fit; those of only the new plan start at 1. No effective
    weight changes. Raw weights that `from_plan` left fixed or frozen start without moments.
    """
    before = {entry.name: entry.matrix for entry in from_plan.entries if entry.matrix}
    by_name = {}
    for group in saved["param_groups"]:
        names = group["param_names"]
        if group["plan"] != fingerprint({n: before[n] for n in names if n in before}):
            raise ValueError("from_plan is not the plan that this optimizer state was saved under")
        for name, key in zip(names, group["params"], strict=True):
            old, new, kept = before.get(name), matrices.get(name), saved["state"].get(key, {})
            by_name[name] = _converted(old, new, kept) if old and new and kept else kept
    by_name |= {name: {} for name in untrained(from_plan) if name not in by_name}
    for group in groups:
        if group.get("train") == "multipliers":
            # Moments that stand still now would be taken up again when the weight is trained.
            fixed = [name for name in group["param_names"] if name in by_name]
            by_name |= {name: _without_moments(by_name[name]) for name in fixed}
    settings = {
        name: _settings(group) for group in saved["param_groups"] for name in group["param_names"]
    }
    check_saved_names(groups, by_name)
    return to_state_dict([_merge_settings(group, settings) for group in groups], by_name)


def untrained(plan: Plan) -> set[str]:
    """Return the parameters whose raw weight a run with this plan leaves unchanged."""
    return {e.name for e in plan.entries if e.train == "multipliers" or e.reason == "frozen"}


def _without_moments(kept: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kept.items() if k not in (*_MOMENTS_OF_RAW, MEAN_SQUARE)}


def _merge_settings(
    group: dict[str, Any], settings: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return a group with the saved settings that all its parameters share; others stay its own.

    A group of parameters that were not trained takes the settings that all others share.
    """
    saved = [settings[name] for name in group["param_names"] if name in settings]
    own = () if saved else _OF_A_GROUP
    first, *others = saved or settings.values()
    common = {
        key: value
        for key, value in first.items()
        if key not in own and all(key in other and other[key] == value for other in others)
    }
    return {**group, **common}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that a state restores; what is trained is the plan's."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names", "plan", "train")}


def _converted(old: Matrix, new: Matrix, kept: dict[str, Any]) -> dict[str, Any]:
    if fingerprint({"": old}) == fingerprint({"": new}):
        return kept
    if any(is_sharded(value) for value in kept.values() if isinstance(value, Tensor)):
        raise ValueError(
            "a sharded optimizer state cannot be converted to another plan: convert it in one "
            "process and save it again"
        )
    like = next(kept[name] for name in ("raw", *_MOMENTS_OF_RAW) if name in kept)
    dtype = like.dtype
    stays = [part for part in _parts(old) if _parts(old)[part] == _parts(new).get(part)]
    ones = initial_values(_without_init(old), dtype=dtype)
    rest = {part: ones[part] if part in stays else kept[part] for part in _parts(old)}
    # The average of mean(g^2) is estimated again: one number cannot be scaled like a matrix.
    dropped = (*MULTIPLIERS, MEAN_SQUARE)
    result = {key: value for key, value in kept.items() if not key.startswith(dropped)}
    if "raw" in kept:
        result["raw"] = effective(old, kept["raw"], rest)
        factor = effective(old, torch.ones_like(kept["raw"]), rest)
        safe = factor.abs() > torch.finfo(factor.dtype).tiny ** 0.5
        inverse = torch.where(safe, 1 / factor, 0.0)
        for name, power in _MOMENTS_OF_RAW.items():
            if name in kept:
                result[name] = kept[name] * inverse**power
    for part, value in initial_values(_without_init(new), dtype=dtype).items():
        for suffix in MOMENTS:
            start = value if not suffix else torch.zeros_like(value)
            result[part + suffix] = kept[part + suffix] if part in stays else start
    return result


def _parts(matrix: Matrix) -> dict[str, tuple[Any, ...]]:
    """Return the meaning of each multiplier of a matrix, to compare two plans."""
    rows = tuple((block.role, block.size, block.row) for block in matrix.blocks)
    scalars = tuple((block.role, block.size, matrix.scalars_of(block)) for block in matrix.blocks)
    axes = (matrix.repeats, matrix.transposed, matrix.scale)
    meaning = {"row": (rows, axes), "col": axes, "scalar": (scalars, axes)}
    return {part: meaning[part] for part in matrix.value_shapes()}


def _without_init(matrix: Matrix) -> Matrix:
    blocks = tuple(dataclasses.replace(block, init=1.0) for block in matrix.blocks)
    return dataclasses.replace(matrix, blocks=blocks)
