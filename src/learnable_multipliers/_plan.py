"""The plan: the role of every parameter of a model, and the multipliers it carries.

A plan is data: names and shapes, no tensors. It does not depend on sharding or compiling,
serializes to JSON, and is matched with a model's parameters by name whenever it is used.
"""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from dataclasses import dataclass
from typing import Any

from torch import nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import (
    check_type,
    class_of,
    layer_template,
    named_parameters,
    unwrap,
)
from learnable_multipliers._placement import Placement
from learnable_multipliers._rules import VECTOR, Train
from learnable_multipliers._serialization import from_dict
from learnable_multipliers.roles import UNKNOWN

_FORMAT = 1
"""Version of the JSON that `Plan.to_json` writes."""
_HEADER = ("parameter", "shape", "role", "multipliers", "reason")
_REASON_WIDTH = 64
_LEAST_REASON = 24
"""Narrowest column for reasons; without room for it, each row becomes a paragraph."""
_PROSE_WIDTH, _NARROWEST = 100, 40
"""Most and fewest columns that sentences are wrapped to."""


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One parameter of a plan: its layout, multipliers and optimizer settings."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Other names of a tied parameter."""
    vector: bool = False
    """Vectors train without weight decay and carry nothing."""
    matrix: Matrix | None = None
    """None for a vector, and for a parameter that is not laid out as matrices."""
    reason: str = ""
    """The reason for its multipliers, in words."""
    lr_scale: float = 1.0
    """Learning rate of the raw weight over that of its group."""
    weight_decay: float | None = None
    """None follows the decay given to `param_groups`."""
    train: Train = "all"
    init_pending: bool = False
    """Whether `initialize_` still has to multiply the weight by its initial values."""

    @property
    def carries(self) -> bool:
        """Whether the parameter carries any multiplier."""
        return self.matrix is not None and self.matrix.carries

    @property
    def role(self) -> str:
        """Roles of the blocks in order, `vector` for a vector."""
        if self.vector:
            return VECTOR
        if self.matrix is None:
            return UNKNOWN
        return " | ".join(block.role for block in self.matrix.blocks)

    @property
    def multipliers(self) -> str:
        """Its multipliers in words: `row+col`, `row (ssm-z, ssm-dt)`, `scalar x5`."""
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
            count = "" if matrix.num_scalars == 1 else f" x{matrix.num_scalars}"
            per_head = any(block.per_head for block in matrix.blocks)
            words.append(f"scalar{count}{' per head' if per_head else ''}")
        return "+".join(words) if len(with_row) in (0, len(matrix.blocks)) else " + ".join(words)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The role and multipliers of every parameter of a model, in its order. Prints as a table.

    `plan[name]` is the entry of a parameter.
    """

    model: str
    """Class of the model it was made for."""
    placement: Placement
    entries: tuple[PlanEntry, ...]
    folds: tuple[tuple[str, float], ...] = ()
    """The model's own fixed multipliers that `initialize_` takes over, with their values."""
    assumptions: tuple[str, ...] = ()
    """Assumptions of a symmetry-aware placement about norms, in words."""
    symmetries: tuple[str, ...] = ()
    """The remaining symmetries of the model, in words, if the placement was derived from them."""

    def __getitem__(self, name: str) -> PlanEntry:
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

    @property
    def summary(self) -> str:
        """Number of matrices with multipliers, and number of multipliers, in words."""
        matrices = [entry for entry in self.entries if not entry.vector]
        carrying = [entry for entry in matrices if entry.carries]
        share = self.num_multipliers / max(self.num_parameters, 1)
        percent = f"{share:.3%}" if share >= 1e-5 or not share else "<0.001%"
        unknown = sum("unknown" in entry.role for entry in matrices)
        text = (
            f"{len(carrying)} of {len(matrices)} matrices carry multipliers: "
            f"{self.num_multipliers:,} numbers beside {self.num_parameters:,} parameters "
            f"({percent})."
        )
        return text + (f" {unknown} of unknown role." if unknown else "")

    def resolve(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the model's parameters by the plan's names; raise if the model does not fit."""
        present = dict(named_parameters(model))
        # Which name of a tied parameter comes first depends on the wrapper: accept any.
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
            actual = tuple(present[name].shape)
            flat = " (flattened by its wrapper: use FSDP2)" if len(actual) < len(shape) else ""
            problems.append(f"{name} has shape {actual}, planned {shape}{flat}")
        if problems:
            more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
            name = class_of(unwrap(model)).__name__
            raise ValueError(
                f"this plan, made for {self.model}, does not fit {name}: "
                f"{'; '.join(problems[:5])}{more}. Make a plan for this model with lrm.plan(model)."
            )
        return {name: present[name] for name in planned}

    def check_initialized(self) -> None:
        """Raise if initial values have not been applied to the model yet."""
        if self.folds or any(entry.init_pending for entry in self.entries):
            raise ValueError(
                "the plan has initial values that the model does not have yet; call "
                "plan = lrm.initialize_(model, plan) first"
            )

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` gives back an equal plan."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by `to_json`."""
        content = json.loads(text)
        if not isinstance(content, dict) or "format" not in content:
            raise ValueError("not a plan: expected a JSON object with the field `format`")
        if content.pop("format") != _FORMAT:
            raise ValueError(
                f"not a plan of format {_FORMAT}, the only one this version reads; make a new plan "
                "with lrm.plan(model)"
            )
        try:
            return from_dict(cls, content, "plan")
        except ValueError as error:
            raise ValueError(f"not a plan: {error}") from error


def check_is_plan(plan: Any) -> None:
    """Raise a TypeError if this is not a plan: the name of a placement, for instance."""
    check_type(plan, Plan, 'a plan, as lrm.plan(model, "full") makes one')


def render(plan: Plan, columns: int | None = None) -> str:
    """Return the plan as a table in which repeated layers share a line.

    Args:
        columns: Width of the terminal that the table must fit into; None for no limit.
    """
    lines: dict[tuple[str, ...], list[PlanEntry]] = {}
    for entry in plan.entries:
        lines.setdefault((layer_template(entry.name), *_cells(entry)), []).append(entry)
    vectors_last = sorted(lines.items(), key=lambda line: line[1][0].vector)
    rows = [(_joined_names(entries), *key[1:]) for key, entries in vectors_last]
    text = [f"{plan.placement} placement for {plan.model}", ""]
    text += _table(rows, columns) + [""]
    ends = [plan.summary]
    if plan.folds:
        folded = ", ".join(f"{field} {value:.4g}" for field, value in plan.folds)
        ends += [f"Taken over from the model by initialize_: {folded}."]
    for sentence in ends:
        text += [sentence] if columns is None else textwrap.wrap(sentence, max(columns, _NARROWEST))
    prose = min(_PROSE_WIDTH, max(columns or _PROSE_WIDTH, _NARROWEST))
    for sentence in plan.assumptions:
        text += textwrap.wrap(f"Assumes: {sentence}.", prose, subsequent_indent="  ")
    if plan.symmetries:
        text += ["Symmetries that remain:"]
    for sentence in plan.symmetries:
        text += textwrap.wrap(sentence, prose, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(line.rstrip() for line in text)


def _table(rows: list[tuple[str, ...]], columns: int | None) -> list[str]:
    """Return the lines of a table; if its columns do not fit, a paragraph per row."""
    widths = [max(len(row[i]) for row in [_HEADER, *rows]) for i in range(4)]
    left = _REASON_WIDTH if columns is None else columns - sum(widths) - 2 * len(widths)
    if left < min(_LEAST_REASON, max(len(row[4]) for row in [_HEADER, *rows])):
        return [line for row in rows for line in _paragraph(row, max(columns or 0, _NARROWEST))]
    widths.append(min(_REASON_WIDTH, left))
    rules = tuple("-" * width for width in widths)
    return [line for row in [_HEADER, rules, *rows] for line in _wrapped(row, widths)]


def _cells(entry: PlanEntry) -> tuple[str, str, str, str]:
    shape = "x".join(str(size) for size in entry.shape)
    extras = []
    if entry.matrix is not None:
        shape += " (in x out)" if entry.matrix.transposed else ""
        inits = {block.init for block in entry.matrix.blocks} - {1.0}
        if inits:
            extras.append("init " + ", ".join(f"{init:.4g}" for init in sorted(inits)))
        if entry.matrix.carries and entry.matrix.scale == "log":
            extras.append("log scale")
    if entry.train == "multipliers":
        extras.append("raw weight fixed" if entry.carries else "fixed")
    if entry.lr_scale != 1.0:
        extras.append(f"lr x{entry.lr_scale:g}")
    if entry.weight_decay is not None:
        extras.append(f"decay {entry.weight_decay:g}")
    if entry.aliases:
        extras.append(f"also {', '.join(entry.aliases)}")
    reason = entry.reason + (f" [{'; '.join(extras)}]" if extras else "")
    return shape, entry.role, entry.multipliers, reason


def _joined_names(entries: list[PlanEntry]) -> str:
    """Name several parameters at once: `layers.{0..35}.mlp.up_proj.weight`."""
    if len(entries) == 1:
        return entries[0].name
    names = [entry.name.split(".") for entry in entries]
    parts = []
    for column in zip(*names, strict=True):
        if len(set(column)) == 1:
            parts.append(column[0])
        else:
            numbers = sorted({int(part) for part in column})
            contiguous = numbers == list(range(numbers[0], numbers[-1] + 1))
            shown = [f"{numbers[0]}..{numbers[-1]}"] if contiguous else [str(n) for n in numbers]
            parts.append("{" + ",".join(shown) + "}")
    return ".".join(parts)


def _wrapped(row: tuple[str, ...], widths: list[int]) -> list[str]:
    *others, last = widths
    reasons = textwrap.wrap(row[4], last) or [""]
    first = "  ".join(cell.ljust(width) for cell, width in zip(row[:4], others, strict=True))
    indent = " " * (sum(others) + 2 * len(others))
    return [f"{first}  {reasons[0]}", *(indent + line for line in reasons[1:])]


def _paragraph(row: tuple[str, ...], columns: int) -> list[str]:
    name, shape, role, multipliers, reason = row
    carried = {"-": "", "none": ", no multipliers"}.get(multipliers, f", multipliers {multipliers}")
    text = f"{shape}, {role}{carried}" + (f": {reason}" if reason else "")
    wrapper = textwrap.TextWrapper(columns - 4, break_on_hyphens=False)
    return [name, *(" " * 4 + line for line in wrapper.wrap(text))]
