"""Finds the scale symmetries of a model: on itself if it is small, else through a small twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import named_parameters, unwrap
from learnable_multipliers.roles import read_roles
from learnable_multipliers.symmetry._axes import layouts
from learnable_multipliers.symmetry._probe import Probe
from learnable_multipliers.symmetry._proxy import make_twin
from learnable_multipliers.symmetry._search import search
from learnable_multipliers.symmetry._symmetry import Symmetries
from learnable_multipliers.symmetry._transfer import probe_like, transfer

if TYPE_CHECKING:
    from learnable_multipliers._plan import Plan

# Time grows with the cube of the number of scales: half a minute on one core for these.
_MOST_SCALES = 1500

Twin = nn.Module | Literal["auto"] | None


def find_symmetries(
    model: nn.Module, plan: Plan | None, inputs: Any = None, *, twin: Twin = "auto"
) -> Symmetries:
    """Return every rescaling of a model's scales that leaves its outputs alone.

    The scales are the multipliers that `plan` puts on matrices (all rows and columns for None) and
    the entries of norm weights, biases and other vectors. `inputs` is what the model is called
    with: a tensor, a tuple of arguments or a dict of keyword arguments; random tokens for a
    language model if not given.

    A small model is asked itself, in float64; a large one through its `twin`, a small model of the
    same class: made from the model's config ("auto"), or given. Each symmetry of the twin is
    confirmed on the model before it is told. None asks the model itself, whatever its size.
    """
    carried = None if plan is None else matrices_of(plan)
    small = twin_of(model, carried, twin)
    if small is None:
        return search(Probe(model, inputs, carried))
    probe = Probe(small, None, fitted(carried, small))
    return transfer(search(probe), probe, probe_like(probe, model, inputs, carried))


def twin_of(model: nn.Module, carried: Mapping[str, Matrix] | None, twin: Twin) -> nn.Module | None:
    """Return the small model to ask in place of a large one; None to ask the model itself."""
    if twin != "auto":
        return twin
    found = layouts(model, carried)
    shapes = {name: parameter.shape for name, parameter in named_parameters(model)}
    scales = sum(
        layout.num_entries(axis.kind, shapes[name])
        for name, layout in found.items()
        for axis in layout.axes(name, shapes[name])
    )
    return make_twin(model) if scales > _MOST_SCALES else None


def matrices_of(plan: Plan) -> dict[str, Matrix]:
    """Return what a plan puts on matrices, by parameter name."""
    return {entry.name: entry.matrix for entry in plan.entries if entry.matrix is not None}


def fitted(carried: Mapping[str, Matrix] | None, twin: nn.Module) -> dict[str, Matrix] | None:
    """Return the same multipliers on a twin's matrices."""
    if carried is None:
        return None
    on_twin = {}
    for reading in read_roles(unwrap(twin)).parameters:
        matrix = carried.get(reading.name)
        if matrix is None:
            continue
        sizes = [part.size for part in reading.parts]
        if len(sizes) != len(matrix.blocks):
            raise ValueError(
                f"{reading.name} has {len(matrix.blocks)} blocks in the plan, and {len(sizes)} can "
                "be told in a small twin of the model: pass twin=None to ask the model itself"
            )
        blocks = [replace(b, size=size) for b, size in zip(matrix.blocks, sizes, strict=True)]
        on_twin[reading.name] = replace(
            matrix, shape=reading.shape, blocks=tuple(blocks), repeats=reading.repeats
        )
    return on_twin
