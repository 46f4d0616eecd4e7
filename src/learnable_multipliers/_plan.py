"""The plan: for every parameter of a model, what it is and which multipliers it carries.

A plan is data. It knows names and shapes, never tensors, so it survives sharding, compiling and
JSON, and is resolved against a model by name whenever it is used.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from learnable_multipliers._multiplier import Block, Matrix
from learnable_multipliers._names import named_parameters, unwrap
from learnable_multipliers._placement import PLACEMENTS, Placement
from learnable_multipliers._plan_table import render
from learnable_multipliers.roles import UNKNOWN

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the plan says of one parameter."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    vector: bool = False
    """Vectors train without weight decay and carry nothing."""
    matrix: Matrix | None = None
    """None for a vector, and for a parameter that is not laid out as matrices."""
    reason: str = ""
    lr_scale: float = 1.0
    weight_decay: float | None = None
    """None follows the decay given to `param_groups`."""
    init_pending: bool = False
    """Whether the weight still has to be multiplied by its initial values, by `initialize_`."""

    @property
    def carries(self) -> bool:
        """Whether the parameter carries any multiplier."""
        return self.matrix is not None and self.matrix.carries

    @property
    def role(self) -> str:
        """Roles of the blocks in order, `vector` for a vector."""
        if self.vector:
            return "vector"
        if self.matrix is None:
            return UNKNOWN
        return " | ".join(block.role for block in self.matrix.blocks)

    @property
    def multipliers(self) -> str:
        """What is carried, in words: `row+col`, `row (ssm-z, ssm-dt)`, `scalar x5`."""
        matrix = self.matrix
        if matrix is None or not matrix.carries:
            return "-" if self.vector else "none"
        words = []
        with_row = [block.role for block in matrix.blocks if block.row]
        if with_row:
            everywhere = len(with_row) == len(matrix.blocks)
            words.append("row" if everywhere else f"row ({', '.join(with_row)})")
        if matrix.col:
            words.append("col")
        if matrix.num_scalars:
            words.append("scalar" if matrix.num_scalars == 1 else f"scalar x{matrix.num_scalars}")
        return "+".join(words) if len(with_row) in (0, len(matrix.blocks)) else " + ".join(words)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every parameter of a model is, in the model's order. `print` shows it as a table."""

    model: str
    """Class of the model it was made for."""
    placement: Placement
    entries: tuple[Entry, ...]
    folds: tuple[tuple[str, float], ...] = ()
    """The model's own fixed multipliers that `initialize_` takes over, with their values."""
    assumptions: tuple[str, ...] = ()
    symmetries: tuple[str, ...] = ()
    """What remains of the model's symmetries, in words, for a placement derived from them."""

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if name == entry.name or name in entry.aliases:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        return render(self)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model itself."""
        return sum(math.prod(entry.shape) for entry in self.entries)

    @property
    def num_multipliers(self) -> int:
        """Numbers learned besides the model's parameters."""
        return sum(entry.matrix.num_multipliers for entry in self.entries if entry.matrix)

    def resolve(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the model's parameters by the plan's names; refuse a model it does not fit."""
        present = dict(named_parameters(model))
        # The first name of a tied parameter depends on the wrapper; any of its names will do.
        for entry in self.entries:
            for alias in entry.aliases:
                if alias in present and entry.name not in present:
                    present[entry.name] = present.pop(alias)
        planned = {entry.name: entry.shape for entry in self.entries}
        problems = [f"{name} is missing" for name in planned if name not in present]
        problems += [f"{name} is not planned" for name in present if name not in planned]
        for name, shape in planned.items():
            if name not in present or tuple(present[name].shape) == shape:
                continue
            found = tuple(present[name].shape)
            flat = " (flattened by its wrapper: use FSDP2)" if len(found) < len(shape) else ""
            problems.append(f"{name} has shape {found}, planned {shape}{flat}")
        if problems:
            more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"this plan, made for {self.model}, does not fit {type(unwrap(model)).__name__}: "
                f"{'; '.join(problems[:5])}{more}. Make a plan for this model with lrm.plan(model)."
            )
        return {name: present[name] for name in planned}

    def refuse_pending(self) -> None:
        """Raise where initial values have not reached the model yet."""
        if self.folds or any(entry.init_pending for entry in self.entries):
            raise ValueError(
                "the plan has initial values that the model does not have yet; call "
                "plan = lrm.initialize_(model, plan) first"
            )

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` gives back an equal plan."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by `to_json`."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"not a plan of format {_FORMAT}: expected an object with that field")
        del content["format"]
        try:
            entries = tuple(_entry_from(entry) for entry in content.pop("entries"))
            folds = tuple((field, value) for field, value in content.pop("folds"))
            assumptions = tuple(content.pop("assumptions"))
            symmetries = tuple(content.pop("symmetries", ()))
            plan = cls(
                entries=entries,
                folds=folds,
                assumptions=assumptions,
                symmetries=symmetries,
                **content,
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a plan: {error}") from error
        if plan.placement not in PLACEMENTS:
            raise ValueError(f"not a plan: unknown placement {plan.placement!r}")
        return plan


def matrix_from(content: dict[str, Any]) -> Matrix:
    """Return a matrix from its plain data, as `dataclasses.asdict` gives it."""
    rest = dict(content)
    blocks = tuple(Block(**block) for block in rest.pop("blocks"))
    return Matrix(shape=tuple(rest.pop("shape")), blocks=blocks, **rest)


def _entry_from(content: dict[str, Any]) -> Entry:
    matrix = content.pop("matrix")
    matrix = None if matrix is None else matrix_from(matrix)
    shape, aliases = tuple(content.pop("shape")), tuple(content.pop("aliases"))
    return Entry(shape=shape, aliases=aliases, matrix=matrix, **content)
