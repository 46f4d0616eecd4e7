"""Keep the settings of a wrapped optimizer equal in its parameter groups and in ours.

Schedulers and users may write to either. Changes show against the settings as last seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_Group = dict[str, Any]
GroupPair = tuple[_Group, _Group]
"""A group of ours, and the wrapped optimizer's group of the same parameters."""
WRAPPED = "wrapped"
"""Key in our parameter groups: the class of the wrapped optimizer."""
OURS = {
    "params",
    "param_names",
    "plan",
    "format",
    WRAPPED,
    "multiplier_lr_scale",
    "multiplier_weight_decay",
}
"""Entries of our groups that are none of the wrapped optimizer's settings."""


class MirroredSettings:
    """The settings of each group as last seen, to copy what has changed since.

    The methods take the groups, as loading a state replaces them.
    """

    def __init__(self, groups: Sequence[_Group]):
        self._last = [own_settings(group) for group in groups]

    def push(self, pairs: Sequence[GroupPair]) -> None:
        """Copy to the wrapped optimizer what schedulers and users changed in our groups.

        Only changes: some optimizers keep notes of their own in their groups.
        """
        for (ours, theirs), last in zip(pairs, self._last, strict=True):
            theirs.update(_changes(ours, last))

    def pull(self, pairs: Sequence[GroupPair]) -> None:
        """Copy to our groups what a scheduler on the wrapped optimizer changed in its groups.

        Changes in our own groups take precedence.
        """
        for (ours, theirs), last in zip(pairs, self._last, strict=True):
            own = _changes(ours, last)
            changed = {k: v for k, v in _changes(theirs, last).items() if k not in own}
            ours.update(changed)
            last.update(changed)

    def pull_all(self, pairs: Sequence[GroupPair]) -> None:
        """Copy to our groups all settings of the wrapped optimizer, with what its step noted."""
        for (ours, theirs), last in zip(pairs, self._last, strict=True):
            settings = own_settings(theirs)
            ours.update(settings)
            last.update(settings)

    def push_all(self, pairs: Sequence[GroupPair]) -> None:
        """Copy to the wrapped optimizer all settings of our groups, as after loading a state."""
        for (ours, theirs), last in zip(pairs, self._last, strict=True):
            settings = own_settings(ours)
            theirs.update(settings)
            last.update(settings)


def own_settings(group: _Group) -> _Group:
    """Return the entries of a group that are settings of the wrapped optimizer."""
    return {key: value for key, value in group.items() if key not in OURS}


def _changes(group: _Group, last: _Group) -> _Group:
    """Return the settings of the wrapped optimizer that have changed."""
    return {
        key: value
        for key, value in own_settings(group).items()
        # Numbers of an unpickled optimizer are equal, but not the same objects.
        if value is not last.get(key, value)
        and not (isinstance(value, int | float) and value == last[key])
    }
