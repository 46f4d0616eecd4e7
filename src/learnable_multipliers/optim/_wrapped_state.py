"""Check whether a saved state of a wrapped optimizer fits the optimizer that loads it.

States name the wrapped class. Older states do not, and are checked by their entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

WRAPPED = "wrapped"
"""Key in our parameter groups: the class of the wrapped optimizer."""
_FRESH = "load it into the kind that saved it, or start with fresh optimizer state"


def check_kind(saved_groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise if saved groups name another class, or lack a setting of this optimizer's groups."""
    name = type(optimizer).__name__
    for saved in saved_groups:
        found = saved.get(WRAPPED)
        if found not in (None, name):
            raise ValueError(
                f"this optimizer state was saved by a wrapped {found}, and this wraps {name}: "
                f"{_FRESH}"
            )
        # Boolean flags come and go with releases of torch, numbers do not.
        numbers = {
            k for k, v in optimizer.defaults.items() if v is not None and type(v) is not bool
        }
        missing = sorted(numbers - saved.keys())
        if found is None and missing:
            raise ValueError(
                f"this optimizer state has no {missing[0]}, which the wrapped {name} holds in its "
                f"groups: it is of another kind of optimizer; {_FRESH}"
            )


def check_kept(
    saved_groups: Sequence[Mapping[str, Any]],
    saved_state: Mapping[Any, Mapping[str, Any]],
    stepped: Mapping[Any, bool],
    optimizer: Optimizer,
) -> None:
    """Raise if the saved entries of a parameter are not those that this optimizer keeps for it.

    `saved_state` holds the wrapped optimizer's entries, and `stepped` whether a parameter was
    trained, by saved parameter. This optimizer's state has been created already.
    """
    name = type(optimizer).__name__
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=False):
        kept = [set(map(str, optimizer.state.get(held, {}))) for held in group["params"]]
        # A parameter that never had a gradient has no entries: use those of another parameter.
        some = next((own for own in kept if own), set())
        for key, own in zip(saved["params"], kept, strict=False):
            found = set(saved_state.get(key, {}))
            if stepped.get(key) and some and not found:
                raise ValueError(
                    f"this optimizer state has no {min(own or some)}, which the wrapped {name} "
                    "keeps here. Either it was saved with other settings: make the optimizer with "
                    "those. Or it was flattened, and something has looked at this optimizer "
                    "before: load it into a fresh one"
                )
            if saved.get(WRAPPED) is None and own and found and own != found:
                raise ValueError(
                    f"this optimizer state holds {', '.join(sorted(found))} where the wrapped "
                    f"{name} keeps {', '.join(sorted(own))}: {_FRESH}"
                )
