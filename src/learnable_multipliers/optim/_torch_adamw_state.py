"""Import the state of torch.optim.AdamW as that of an optimizer of this library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from learnable_multipliers._names import canonical_name
from learnable_multipliers._plan import Plan, PlanEntry
from learnable_multipliers.optim._loading import check_saved_names, to_state_dict

_ADAMW = ("step", "exp_avg", "exp_avg_sq")
_PARALLEL = "module."
_NO_DECAY_IN_HF = ("bias", "layernorm", "rmsnorm", "norm")
"""Substrings of names that the Hugging Face Trainer puts into its group without decay."""


def import_torch_adamw(
    groups: Sequence[dict[str, Any]], saved: dict[str, Any], plan: Plan
) -> dict[str, Any]:
    """Return a state of torch's AdamW as one of ours: its moments, without raw weights yet.

    Parameters are matched by the names in its groups, or without names by the order in which common
    recipes put a model's parameters into groups, if all shapes fit.
    """
    for kept in saved["state"].values():
        missing = [name for name in _ADAMW if name not in kept]
        if missing:
            raise ValueError(
                f"this optimizer state was written neither by this library nor by torch's AdamW: "
                f"it has no {missing[0]}. Start with fresh optimizer state"
            )
    for group in saved["param_groups"]:
        coupled = group.get("weight_decay") and not group.get("decoupled_weight_decay", True)
        others = [name for name in ("amsgrad", "maximize") if group.get(name)]
        if coupled or others or "amsgrad" not in group or "momentum_decay" in group:
            what = ", ".join(others) or ("coupled decay" if coupled else "another class")
            raise ValueError(
                f"this optimizer state is not that of torch's AdamW as ours continues it ({what}): "
                "start with fresh optimizer state"
            )
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    names = _saved_names(saved, plan)
    by_name = {
        name: {field: saved["state"][key][field] for field in _ADAMW}
        for name, key in zip(names, keys, strict=True)
        if key in saved["state"]
    }
    by_name |= {name: {} for name in names if name not in by_name}
    check_saved_names(groups, by_name)
    return to_state_dict(groups, by_name)


def _saved_names(saved: dict[str, Any], plan: Plan) -> list[str]:
    groups = saved["param_groups"]
    if all("param_names" in group for group in groups):
        names = [canonical_name(name) for group in groups for name in group["param_names"]]
        # DistributedDataParallel calls its model `module`.
        if all(name.startswith(_PARALLEL) for name in names):
            names = [name.removeprefix(_PARALLEL) for name in names]
        return names
    sizes = [len(group["params"]) for group in groups]
    shapes = [
        tuple(saved["state"][key]["exp_avg"].shape) if key in saved["state"] else None
        for group in groups
        for key in group["params"]
    ]
    fitting = []
    for order in _common_orders(plan):
        entries = [entry for part in order for entry in part]
        if [len(part) for part in order] == sizes and all(
            shape in (None, entry.shape) for shape, entry in zip(shapes, entries, strict=True)
        ):
            fitting.append([entry.name for entry in entries])
    if not fitting or any(names != fitting[0] for names in fitting):
        raise ValueError(
            "this state of torch's AdamW has no parameter names, and its groups of "
            f"{', '.join(map(str, sizes))} parameters are in no common order of this model's: save "
            "it from an optimizer made with model.named_parameters()"
        )
    return fitting[0]


def _common_orders(plan: Plan) -> Iterator[list[list[PlanEntry]]]:
    """Yield the groups into which common training code puts the parameters of a model."""
    trained = [entry for entry in plan.entries if entry.reason != "frozen"]
    for entries in (list(plan.entries), trained):
        yield [entries]
        for has_decay in (_is_matrix, _decays_in_hf):
            yield [
                [entry for entry in entries if has_decay(entry)],
                [entry for entry in entries if not has_decay(entry)],
            ]


def _is_matrix(entry: PlanEntry) -> bool:
    return len(entry.shape) >= 2


def _decays_in_hf(entry: PlanEntry) -> bool:
    return not any(part in entry.name.lower() for part in _NO_DECAY_IN_HF)
