"""The state of a wrapped optimizer: created, mirrored in ours, saved, checked and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers._plan import Plan
from learnable_multipliers.optim._loading import check_saved_shapes
from learnable_multipliers.optim._wrapped_settings import WRAPPED, GroupPair, MirroredSettings
from learnable_multipliers.optim._wrapped_step import step_inner

_INNER = "inner."
"""Prefix of the wrapped optimizer's entries in a saved state."""
_FRESH = "load it into the kind that saved it, or start with fresh optimizer state"
_NOT_WRAPPED = f"this optimizer state was not saved by a wrapped optimizer: {_FRESH}"


class InnerState:
    """The state of the wrapped optimizer, and whether it is only a placeholder.

    Our state mirrors it under `inner.` names: tools that load flattened checkpoints look there for
    the entries to load.
    """

    def __init__(self, inner: Optimizer):
        self._inner = inner
        self._is_placeholder = False

    def materialize(
        self,
        pairs: Sequence[GroupPair],
        settings: MirroredSettings,
        state: Mapping[Any, dict[str, Any]],
    ) -> None:
        """Step the wrapped optimizer to create its state, for checkpointing tools to see.

        These tools take a step at rate 0 with zero gradients, and load only the entries they see
        then. Training discards this placeholder.
        """
        groups = [{**group} for group in self._inner.param_groups]
        settings.push(pairs)
        held = [parameter for group in groups for parameter in group["params"]]
        grads = [parameter.grad for parameter in held]
        # Not every step at rate 0 leaves weights as they are, to the last bit.
        values = [parameter.detach().clone() for parameter in held]
        for group in self._inner.param_groups:
            group["lr"] = group["lr"] * 0
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter)
        step_inner(self._inner)
        with torch.no_grad():
            for parameter, grad, value in zip(held, grads, values, strict=True):
                parameter.grad = grad
                parameter.copy_(value)
        for group, before in zip(self._inner.param_groups, groups, strict=True):
            group.update(before)
        self._is_placeholder = True
        self.mirror(pairs, state)

    def discard_placeholder(self) -> None:
        """Clear the state if it is a placeholder."""
        if self._is_placeholder:
            self._inner.state.clear()
            self._is_placeholder = False

    def mirror(self, pairs: Sequence[GroupPair], state: Mapping[Any, dict[str, Any]]) -> None:
        """Mirror the state in ours."""
        for ours, theirs in pairs:
            for parameter, held in zip(ours["params"], theirs["params"], strict=True):
                kept = state[parameter]
                for key in [key for key in kept if key.startswith(_INNER)]:
                    del kept[key]
                inner = self._inner.state.get(held, {})
                kept.update({f"{_INNER}{key}": value for key, value in inner.items()})

    def merged(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return our `state_dict()` with the present state under `inner.` names."""
        for index, state in self._inner.state_dict()["state"].items():
            kept = saved["state"].get(index, {})
            ours = {key: value for key, value in kept.items() if not key.startswith(_INNER)}
            inner = {f"{_INNER}{key}": value for key, value in state.items()}
            saved["state"][index] = ours | inner
        return saved

    def load(
        self,
        state: Mapping[Any, dict[str, Any]],
        saved_groups: Sequence[Mapping[str, Any]],
        has_stepped: bool,
    ) -> None:
        """Load the wrapped optimizer's entries of a saved state.

        `has_stepped` says whether it was saved after the first step.
        """
        # Parameters by the keys that the state was saved with: numbers, or the model's names in
        # distributed checkpoints.
        groups = [
            {**group, "params": saved["params"]}
            for group, saved in zip(
                self._inner.state_dict()["param_groups"], saved_groups, strict=True
            )
        ]
        made_early = bool(self._inner.state) and not self._is_placeholder
        # Free the placeholder before loading.
        self.discard_placeholder()
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        for kept in self._inner.state.values():
            # torch keeps the tensors it is given: training would change the caller's state dict.
            kept.update({k: v.clone() for k, v in kept.items() if isinstance(v, Tensor)})
        # A state that was saved before the first step is a placeholder, too.
        self._is_placeholder = not made_early and not has_stepped


def split_state(state: Mapping[Any, Mapping[str, Any]]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return our entries of each parameter in a saved state, and the wrapped optimizer's."""
    ours, theirs = {}, {}
    for index, kept in state.items():
        if "exp_avg" in kept or "momentum_buffer" in kept:
            raise ValueError(_NOT_WRAPPED)
        ours[index] = {k: v for k, v in kept.items() if not k.startswith(_INNER)}
        inner = {k[len(_INNER) :]: v for k, v in kept.items() if k.startswith(_INNER)}
        # Flattened states have an empty dict for each entry that was not saved.
        if any(not isinstance(value, dict) or value for value in inner.values()):
            theirs[index] = inner
    return ours, theirs


def check_wrapped_class(saved_groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise if saved groups of this library name another wrapped class, or none."""
    name = type(optimizer).__name__
    for saved in saved_groups:
        wrapped = saved.get(WRAPPED)
        if wrapped is None:
            raise ValueError(_NOT_WRAPPED)
        if wrapped != name:
            raise ValueError(
                f"this optimizer state was saved by a wrapped {wrapped}, and this wraps {name}: "
                f"{_FRESH}"
            )


def check_wrapped_shapes(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    saved: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Raise if the wrapped optimizer's entries were saved for parameters of other shapes.

    Entries that have a parameter's shape in `state`, our mirror of its state, are compared.
    """

    def entries_of(parameter: Tensor) -> list[str]:
        return [
            key
            for key, value in state.get(parameter, {}).items()
            if key.startswith(_INNER)
            and isinstance(value, Tensor)
            and value.shape == parameter.shape
        ]

    check_saved_shapes(groups, saved, plan, entries_of)


def check_wrapped_entries(
    saved_groups: Sequence[Mapping[str, Any]],
    saved_state: Mapping[Any, Mapping[str, Any]],
    stepped: Mapping[Any, bool],
    optimizer: Optimizer,
) -> None:
    """Raise if a saved parameter has no entries where this optimizer keeps some.

    `saved_state` holds the wrapped optimizer's entries, and `stepped` whether a parameter was
    trained, by saved parameter. This optimizer's state has been created already.
    """
    name = type(optimizer).__name__
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=False):
        entries = [set(map(str, optimizer.state.get(held, {}))) for held in group["params"]]
        # A parameter that never had a gradient has no entries: use those of another parameter.
        some = next((own for own in entries if own), set())
        for key, own in zip(saved["params"], entries, strict=False):
            if stepped.get(key) and some and not saved_state.get(key):
                raise ValueError(
                    f"this optimizer state has no {min(own or some)}, which the wrapped {name} "
                    "keeps here. Either it was saved with other settings: make the optimizer with "
                    "those. Or it was flattened, and something has looked at this optimizer "
                    "before: load it into a fresh one"
                )
