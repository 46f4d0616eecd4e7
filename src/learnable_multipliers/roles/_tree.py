"""The module tree of a model, and one place in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from learnable_multipliers.roles._layers import is_conv1d, linears, weight_shape
from learnable_multipliers.roles._reading import Part, Reading


class Tree:
    """A model's modules by name, and what is taken for granted while reading them."""

    def __init__(self, model: nn.Module):
        self.model = model
        # Dotted names, modules under several names included.
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.assumptions: list[str] = []

    def embeddings(self) -> Iterator[tuple[str, nn.Embedding]]:
        """Yield the model's embedding tables."""
        for name, module in self.modules.items():
            if isinstance(module, nn.Embedding):
                yield name, module

    def widths(self) -> set[int]:
        """Return the widths of the model's residual streams, as its embeddings show them."""
        return {table.embedding_dim for _, table in self.embeddings()}

    def lineage(self, name: str) -> Iterator[nn.Module]:
        """Yield the module called `name` and those that hold it, innermost first."""
        yield self.modules[name]
        while name:
            name = name.rpartition(".")[0]
            yield self.modules[name]

    def assume(self, sentence: str) -> None:
        """Note, once, what is taken for granted."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)


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

    def linear(
        self,
        leaf: str,
        *parts: Part,
        column_norm: str = "",
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
            column_norm=column_norm,
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
