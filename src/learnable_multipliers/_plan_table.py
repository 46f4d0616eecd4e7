"""A plan as a table that a person can check in a minute: repeated layers share a line."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from learnable_multipliers._names import layer_template

if TYPE_CHECKING:
    from learnable_multipliers._plan import Entry, Plan

_HEADER = ("parameter", "shape", "role", "multipliers", "reason")
_REASON_WIDTH = 64


def render(plan: Plan) -> str:
    """Return the plan as text."""
    lines: dict[tuple[str, ...], list[Entry]] = {}
    for entry in plan.entries:
        lines.setdefault((layer_template(entry.name), *_cells(entry)), []).append(entry)
    matrices = [(_names(e), *key[1:]) for key, e in lines.items() if not e[0].vector]
    vectors = [(_names(e), *key[1:]) for key, e in lines.items() if e[0].vector]
    rows = [*matrices, *vectors]
    widths = [max(len(row[i]) for row in [_HEADER, *rows]) for i in range(4)]
    text = [f"{plan.placement} placement for {plan.model}", ""]
    for row in [_HEADER, tuple("-" * width for width in [*widths, _REASON_WIDTH]), *rows]:
        text += _wrapped(row, widths)
    text += ["", _summary(plan)]
    if plan.folds:
        folded = ", ".join(f"{field} {value:.4g}" for field, value in plan.folds)
        text += [f"Taken over from the model by initialize_: {folded}."]
    for sentence in plan.assumptions:
        text += textwrap.wrap(f"Assumes: {sentence}.", 100, subsequent_indent="  ")
    if plan.symmetries:
        text += ["Symmetries that remain:"]
    for sentence in plan.symmetries:
        text += textwrap.wrap(sentence, 100, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(line.rstrip() for line in text)


def _cells(entry: Entry) -> tuple[str, str, str, str]:
    shape = "x".join(str(size) for size in entry.shape)
    extras = []
    if entry.matrix is not None:
        shape += " (in x out)" if entry.matrix.transposed else ""
        inits = {block.init for block in entry.matrix.blocks} - {1.0}
        if inits:
            extras.append("init " + ", ".join(f"{init:.4g}" for init in sorted(inits)))
        if entry.matrix.carries and entry.matrix.scale == "log":
            extras.append("log scale")
    if entry.lr_scale != 1.0:
        extras.append(f"lr x{entry.lr_scale:g}")
    if entry.weight_decay is not None:
        extras.append(f"decay {entry.weight_decay:g}")
    if entry.aliases:
        extras.append(f"also {', '.join(entry.aliases)}")
    reason = entry.reason + (f" [{'; '.join(extras)}]" if extras else "")
    return shape, entry.role, entry.multipliers, reason


def _names(entries: list[Entry]) -> str:
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
    reasons = textwrap.wrap(row[4], _REASON_WIDTH) or [""]
    first = "  ".join(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True))
    indent = " " * (sum(widths) + 2 * len(widths))
    return [f"{first}  {reasons[0]}", *(indent + line for line in reasons[1:])]


def _summary(plan: Plan) -> str:
    matrices = [entry for entry in plan.entries if not entry.vector]
    carrying = [entry for entry in matrices if entry.carries]
    share = plan.num_multipliers / max(plan.num_parameters, 1)
    unknown = sum("unknown" in entry.role for entry in matrices)
    text = (
        f"{len(carrying)} of {len(matrices)} matrices carry multipliers: "
        f"{plan.num_multipliers:,} numbers beside {plan.num_parameters:,} parameters ({share:.3%})."
    )
    return text + (f" {unknown} of unknown role." if unknown else "")
