"""Recognizes Mamba-2 mixers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from learnable_multipliers.roles._layers import features, learnable_norm
from learnable_multipliers.roles._norms import norms_around
from learnable_multipliers.roles._reading import Part, Reading
from learnable_multipliers.roles._tree import Site

VECTORS = ("A_log", "D", "dt_bias")
"""Per-head parameters of a mixer; some models store them with two axes."""


def mamba2(site: Site) -> Iterator[Reading]:
    """Read a mixer: the rows of in_proj are z, x, B, C, dt, and conv1d runs over x, B, C.

    Every size follows from the shapes, and they must add up.
    """
    linears = site.linears
    own = dict(site.module.named_parameters(recurse=False))
    convolution = getattr(site.module, "conv1d", None)
    if not isinstance(convolution, nn.Conv1d) or not set(VECTORS) <= own.keys():
        return
    if not {"in_proj", "out_proj"} <= linears.keys():
        return
    rows, _ = features(linears["in_proj"])
    width, inner = features(linears["out_proj"])
    heads = own["dt_bias"].numel()
    states, odd = divmod(convolution.out_channels - inner, 2)
    if odd or states <= 0 or rows != 2 * inner + 2 * states + heads:
        return
    norms = norms_around(site.tree, site.name, "mixer")
    sizes = {"ssm-z": inner, "ssm-x": inner, "ssm-B": states, "ssm-C": states, "ssm-dt": heads}
    parts = (Part(role, size) for role, size in sizes.items())
    yield site.linear("in_proj", *parts, column_norm=norms.before)
    part = Part("ssm-out", width, row_norm=norms.after)
    # The gated norm on the mixer's output, which Falcon-H1 can switch off.
    inner_norm = learnable_norm(site.module, ("norm",))
    yield site.linear("out_proj", part, column_norm=inner_norm and site.path(inner_norm))
