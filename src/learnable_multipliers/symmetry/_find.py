"""Find the scale symmetries of a model: on the model if it is small, else on a small proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import named_parameters
from learnable_multipliers.roles import read_roles
from learnable_multipliers.symmetry._axes import layouts
from learnable_multipliers.symmetry._probe import Probe
from learnable_multipliers.symmetry._proxy import make_proxy
from learnable_multipliers.symmetry._search import search
from learnable_multipliers.symmetry._symmetry import Symmetries
from learnable_multipliers.symmetry._transfer import probe_like, transfer

if TYPE_CHECKING:
    from learnable_multipliers._plan import Plan

# Time grows with the cube of the number of scales: half a minute on one core for these.
_MOST_SCALES = 1500

Proxy = nn.Module | Literal["auto"] | None


def find_symmetries(
    model: nn.Module, plan: Plan | None, inputs: Any = None, *, proxy: Proxy = "auto"
) -> Symmetries:
    """Return every rescaling of a model's scales that leaves its outputs unchanged.

    The scales are the multipliers that `plan` puts on matrices (all rows and columns for None) and
    the entries of norm weights, biases and other vectors. `inputs` are the arguments of the forward
    pass: a tensor, a tuple or a dict of keyword arguments; random tokens for a language model if
    not given.

    A small model is searched itself, in float64; a large one through its `proxy`, a small model of
    the same class: made from the model's config ("auto"), or given. Each symmetry of the proxy is
    confirmed on the model before it is returned. None searches the model itself, whatever its size.
    """
    carried = None if plan is None else matrices_of(plan)
    small = proxy_of(model, carried, proxy)
    if small is None:
        return search(Probe(model, inputs, carried))
    probe = Probe(small, None, fitted(carried, small))
    return transfer(search(probe), probe, probe_like(probe, model, inputs, carried))


def proxy_of(
    model: nn.Module, carried: Mapping[str, Matrix] | None, proxy: Proxy
) -> nn.Module | None:
    """Return the proxy to search in place of a large model; None to search the model itself."""
    if proxy != "auto":
        return proxy
    found = layouts(model, carried)
    shapes = {name: parameter.shape for name, parameter in named_parameters(model)}
    scales = sum(
        layout.num_entries(axis.kind, shapes[name])
        for name, layout in found.items()
        for axis in layout.axes(name, shapes[name])
    )
    return make_proxy(model) if scales > _MOST_SCALES else None


def matrices_of(plan: Plan) -> dict[str, Matrix]:
    """Return what a plan puts on matrices, by parameter name."""
    return {entry.name: entry.matrix for entry in plan.entries if entry.matrix is not None}


def fitted(carried: Mapping[str, Matrix] | None, proxy: nn.Module) -> dict[str, Matrix] | None:
    """Return the same multipliers at the sizes of the proxy's matrices."""
    if carried is None:
        return None
    on_proxy = {}
    for role in read_roles(proxy).parameters:
        matrix = carried.get(role.name)
        if matrix is None:
            continue
        sizes = [part.size for part in role.parts]
        if len(sizes) != len(matrix.blocks):
            raise ValueError(
                f"{role.name} has {len(matrix.blocks)} blocks in the plan, and {len(sizes)} in "
                "a small proxy of the model: pass proxy=None to search the model itself"
            )
        blocks = [replace(b, size=size) for b, size in zip(matrix.blocks, sizes, strict=True)]
        on_proxy[role.name] = replace(
            matrix, shape=role.shape, blocks=tuple(blocks), repeats=role.repeats
        )
    return on_proxy
