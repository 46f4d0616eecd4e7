"""The module tree of a model, and what lies around a block in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from learnable_multipliers.roles.layers import (
    is_conv1d,
    is_learnable_norm,
    is_linear,
    linears,
    weight_shape,
)
from learnable_multipliers.roles.reading import Part, Reading

PRE_NORM = (
    "Norms inside a layer are taken to feed its blocks (pre-norm): their weights are the column "
    "multipliers of q, k, v, gate, up and ssm-in."
)
NO_PRE_NORM = (
    "No learnable norm was found in front of some blocks (norm-after, frozen norms or none): "
    "their first matrices have no column multiplier unless they carry one."
)
POST_NORM = (
    "Norms follow some blocks' outputs: their weights are the row multipliers of attention-out "
    "and down there."
)


@dataclass(frozen=True)
class Norms:
    """Which learnable norms touch a block."""

    before: bool
    after: bool


class Tree:
    """A model's modules by name; recognizers ask it about surroundings."""

    def __init__(self, model: nn.Module):
        self.model = model
        # Dotted names, modules under several names included.
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.embeddings = [m for m in self.modules.values() if isinstance(m, nn.Embedding)]
        self.assumptions: list[str] = []

    def parent(self, name: str) -> nn.Module | None:
        """Return the module that holds the one called `name`; None for the model itself."""
        return self.modules[name.rpartition(".")[0]] if name else None

    def lineage(self, name: str) -> Iterator[nn.Module]:
        """Yield the module called `name` and those that hold it, innermost first."""
        while name:
            yield self.modules[name]
            name = name.rpartition(".")[0]

    def norms_around(self, name: str, block: str) -> Norms:
        """Tell which learnable norms feed and follow the attention, mlp or ssm block `name`."""
        names = self._layer_norms(name)
        after_mlp = _matching(names, r"post_(feed_?forward|mlp|ffn?|moe)")
        before_mlp = _matching(names, r"pre_(feed_?forward|mlp|ffn?|moe)")
        after_attention = _matching(names, r"post_(self_attn|attn|mixer)")
        rest = names - after_mlp - before_mlp - after_attention
        # Llama's `post_attention_layernorm` feeds its MLP; in Gemma 2 and OLMo 2 it follows
        # attention, and the MLP has a norm of its own or follows the same pattern.
        ambiguous = _matching(rest, r"post_attention")
        if ambiguous and not after_attention and (before_mlp or not rest - ambiguous):
            after_attention, rest = ambiguous, rest - ambiguous
        before = bool(rest | before_mlp) if block == "mlp" else bool(rest - ambiguous)
        after = {"attention": after_attention, "mlp": after_mlp, "ssm": set()}[block]
        self.assume(PRE_NORM if before else NO_PRE_NORM)
        if after:
            self.assume(POST_NORM)
        return Norms(before, bool(after))

    def _layer_norms(self, name: str) -> set[str]:
        """Names of the learnable norms beside the block, in the layer that holds it."""
        if not _is_layer(self.modules[name]):
            if not name:
                return set()
            name = name.rpartition(".")[0]
        while True:
            norms = {leaf for leaf, m in self.modules[name].named_children() if _norm_like(m)}
            # A number is a place in a list of layers: norms above it belong to no one layer.
            if norms or not name or name.rpartition(".")[2].isdigit():
                return norms
            name = name.rpartition(".")[0]

    def assume(self, sentence: str) -> None:
        """Note, once, what is taken for granted."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)


def _is_layer(module: nn.Module) -> bool:
    """Tell a module that holds whole blocks beside its own matrices, as OPT's layers do."""
    blocks = (m for m in module.children() if not is_linear(m) and not _norm_like(m))
    return any(next(block.parameters(), None) is not None for block in blocks)


def _norm_like(module: nn.Module) -> bool:
    """Tell a learnable norm, or a list of them where a layer has several blocks of a kind."""
    if isinstance(module, nn.ModuleList):
        return len(module) > 0 and all(is_learnable_norm(child) for child in module)
    return is_learnable_norm(module)


def _matching(names: set[str], pattern: str) -> set[str]:
    return {name for name in names if re.match(pattern, name)}


@dataclass(frozen=True)
class Site:
    """One module of the tree, as a recognizer sees it."""

    name: str
    module: nn.Module
    tree: Tree

    @property
    def linears(self) -> dict[str, nn.Module]:
        """The linear layers directly inside the module."""
        return linears(self.module)

    def path(self, leaf: str) -> str:
        """Return the full name of something inside the module."""
        return f"{self.name}.{leaf}" if self.name else leaf

    def norms(self, block: str) -> Norms:
        """Return the learnable norms around the module."""
        return self.tree.norms_around(self.name, block)

    def linear(
        self,
        leaf: str,
        *parts: Part,
        columns_normed: bool = False,
        homogeneous: bool = False,
        repeats: int = 1,
        note: str | None = None,
    ) -> Reading:
        """Return the reading of the weight of the linear layer at `leaf`."""
        layer = self.module.get_submodule(leaf)
        reading = Reading(
            name=self.path(f"{leaf}.weight"),
            shape=weight_shape(layer),
            parts=parts,
            columns_normed=columns_normed,
            homogeneous=homogeneous,
            repeats=repeats,
            note=note or f"{leaf} of {type(self.module).__name__}",
        )
        return conv1d_axes(layer, reading)


def conv1d_axes(layer: nn.Module, reading: Reading) -> Reading:
    """Turn the axes where the layer is GPT-2's Conv1D."""
    if not is_conv1d(layer):
        return reading
    if len(reading.parts) == 1:
        part = replace(reading.parts[0], size=reading.shape[1])
        reading = replace(reading, parts=(part,))
    return replace(reading, transposed=True)
