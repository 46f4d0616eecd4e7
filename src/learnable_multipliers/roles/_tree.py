"""The module tree of a model: its layers, and the roles of its parameters.

Roles are assigned to rows of a stored matrix (`Part`), collected by parameter (`ParameterRole`) and
by model (`ModelRoles`). A recognizer sees one module of the tree at a time (`Site`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

from torch import Tensor, nn

from learnable_multipliers._names import canonical_name, children, class_of, unwrap_module

UNKNOWN = "unknown"
SSM_ROLES = ("ssm-z", "ssm-x", "ssm-B", "ssm-C", "ssm-dt")
"""Blocks of rows of Mamba-2's input matrix, in order."""
ROLES = (
    *("embedding", "position-embedding", "tied-embedding", "head"),
    *("query", "key", "value", "attention-out", "query-latent", "kv-latent"),
    *("gate", "up", "ungated-up", "down"),
    *(*SSM_ROLES, "ssm-out"),
    *("router", "adapter", UNKNOWN),
)
"""`ungated-up` is the first matrix of an MLP without a gate: its rows feed only the activation.
The two latents are the low-rank inputs of multi-head latent attention. An `adapter` is a factor of
a low-rank update of another matrix, as in LoRA."""


def check_role(role: str) -> None:
    """Raise if a role is not one of `ROLES`, with the closest ones."""
    if role not in ROLES:
        close = difflib.get_close_matches(role, ROLES, n=3, cutoff=0.0)
        raise ValueError(f"unknown role {role!r}; closest: {', '.join(close)}")


@dataclass(frozen=True)
class Part:
    """One logical matrix: all rows of a stored one, or one block of a fused one."""

    role: str
    size: int
    """Rows in one repeat of the stored matrix's row pattern."""
    row_norm: str = ""
    """Name of the learnable norm after it, whose weight already scales these rows."""
    normalized: bool = False
    """Whether a norm without a trained weight follows, which removes a scale of all these rows."""
    head_dim: int | None = None
    """Rows of one attention head; None if rows are not heads, or if it is unknown."""


@dataclass(frozen=True, kw_only=True)
class ParameterRole:
    """The roles and the layout of one parameter of a model."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Other names of the same parameter (tied weights)."""
    frozen: bool = False
    parts: tuple[Part, ...] = ()
    """Empty for a vector, which carries nothing: it is a scale or a shift already."""
    repeats: int = 1
    transposed: bool = False
    column_norm: str = ""
    """Name of the learnable norm before it, whose weight already scales the columns."""
    homogeneous: bool = False
    """Whether the activation after it is positively homogeneous (ReLU and its powers)."""
    opaque: bool = False
    """Whether it is not known to be a matrix or a stack of matrices."""
    reparametrized: bool = False
    """Whether the layer's weight is computed from it, as under `weight_norm`."""
    note: str = ""

    @property
    def is_vector(self) -> bool:
        """Whether the parameter is not a matrix."""
        return not self.parts


@dataclass(frozen=True)
class ModelRoles:
    """Every parameter of a model, once, in the model's order."""

    parameters: tuple[ParameterRole, ...]
    assumptions: tuple[str, ...] = ()


class Tree:
    """A model's modules by name, and the assumptions made while reading them."""

    def __init__(self, model: nn.Module):
        self.model = model
        # By canonical name; a shared module has several. A wrapper comes before the module that it
        # wraps, which has the same canonical name.
        self.modules = {
            canonical_name(name): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        self.root = self._root()
        """Name of the module whose children are the parts of the model. A module around it, such as
        a LightningModule, holds one module with parameters and none of its own."""
        self.assumptions: list[str] = []

    def _root(self) -> str:
        name = ""
        while True:
            module = self.modules[name]
            inside = [n for n, child in children(module).items() if [*child.parameters()]]
            if len(inside) != 1 or module._parameters:
                return name
            name = f"{name}.{inside[0]}".removeprefix(".")

    def embeddings(self) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
        """Yield the model's embedding tables."""
        for name, module in self.modules.items():
            if is_embedding(module):
                yield name, module

    def widths(self) -> set[int]:
        """Return the widths of the model's residual streams: those of its embeddings."""
        return {table.embedding_dim for _, table in self.embeddings()}

    @cached_property
    def norm_widths(self) -> set[int]:
        """Return the numbers of features that the model's norms scale."""
        return {size for module in self.modules.values() if (size := norm_width(module))}

    def lineage(self, name: str) -> Iterator[nn.Module]:
        """Yield the module called `name` and the modules around it, innermost first."""
        yield self.modules[name]
        while name:
            name = name.rpartition(".")[0]
            yield self.modules[name]

    def assume(self, sentence: str) -> None:
        """Record an assumption, once."""
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
        return {leaf: child for leaf, child in children(self.module).items() if is_linear(child)}

    def child(self, leaf: str) -> nn.Module:
        """Return something inside the module, by its name there."""
        return self.tree.modules[self.path(leaf) if leaf else self.name]

    def path(self, leaf: str) -> str:
        """Return the full name of something inside the module."""
        return f"{self.name}.{leaf}" if self.name else leaf

    def rows(self, leaf: str) -> int:
        """Return the number of output features of the linear layer at `leaf`."""
        return features(self.child(leaf))[0]

    def norm(self, *names: str) -> str:
        """Return the full name of a child that is a learnable norm of one of `names`, if any."""
        inside = children(self.module)
        norms = (n for n in names if n in inside and is_learnable_norm(inside[n]))
        return next(map(self.path, norms), "")

    def has_fixed_norm(self, *names: str) -> bool:
        """Return whether a child of one of `names` is a norm without a trained weight."""
        inside = children(self.module)
        return any(
            is_norm(inside[name]) and not is_learnable_norm(inside[name])
            for name in names
            if name in inside
        )

    def linear(
        self, leaf: str, *parts: Part, column_norm: str = "", note: str = "", **more: Any
    ) -> ParameterRole:
        """Return the role of the weight of the linear layer at `leaf`.

        Args:
            column_norm: The norm before it by its place and name. One of another width is not.
        """
        layer = self.child(leaf)
        if column_norm and norm_width(self.tree.modules[column_norm]) != features(layer)[1]:
            column_norm = ""
        return ParameterRole(
            name=self.path(f"{leaf}.weight"),
            shape=weight_shape(layer),
            parts=parts,
            transposed=is_conv1d(layer),
            column_norm=column_norm,
            note=note or f"{leaf} of {class_of(self.module).__name__}",
            **more,
        )

    def whole(
        self,
        leaf: str,
        role: str,
        row_norm: str = "",
        *,
        normalized: bool = False,
        head_dim: int | None = None,
        **more: Any,
    ) -> ParameterRole:
        """Return the parameter with one role for all rows."""
        return self.linear(
            leaf, Part(role, self.rows(leaf), row_norm, normalized, head_dim), **more
        )


# Predicates of single modules.


def class_path(module: nn.Module) -> str:
    """Return a module's class with the Python module that defines it."""
    return f"{class_of(module).__module__}.{class_of(module).__qualname__}"


_HOMOGENEOUS = {
    *("ReLU", "LeakyReLU", "PReLU", "ReLUSquaredActivation"),
    *("relu", "leaky_relu", "relu2"),
}
_ACTIVATIONS = ("act_fn", "act", "activation", "activation_fn", "nonlinearity")


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is GPT-2's transposed linear layer, which stores (in, out)."""
    return class_of(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Return whether this is a linear layer: torch's, GPT-2's, or another library's by name."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    weight = getattr(module, "weight", None)
    return class_of(module).__name__.endswith("Linear") and getattr(weight, "ndim", 0) == 2


def is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Return whether this is a table of embeddings."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def weight_shape(module: nn.Module) -> tuple[int, ...]:
    """Return the stored shape of a layer's weight."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear) and weight is None:
        # A weight computed from other parameters, as under weight_norm, is not evaluated here.
        return module.out_features, module.in_features
    # Layers of other libraries may hold it as a buffer, or compute it.
    weight = module.weight if weight is None else weight
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)


def features(linear: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear layer, however it stores its weight."""
    shape = weight_shape(linear)
    return (shape[1], shape[0]) if is_conv1d(linear) else (shape[0], shape[1])


def is_norm(module: nn.Module) -> bool:
    """Return whether this is a normalization layer: by its name, and without matrices inside."""
    name = class_of(module).__name__.lower()
    # A weight of several axes, such as (heads, channels), still scales what is normalized.
    own = {leaf for leaf, _ in module.named_parameters()} <= {"weight", "bias"}
    if name.endswith("norm") and own:
        return True
    return "norm" in name and all(is_flat(parameter.shape) for parameter in module.parameters())


def is_learnable_norm(module: nn.Module) -> bool:
    """Return whether this is a norm with a trained weight, which acts as a multiplier."""
    return is_norm(module) and any(
        parameter.requires_grad and not name.endswith("bias")
        for name, parameter in module.named_parameters()
    )


def norm_width(module: nn.Module) -> int:
    """Return the number of features that a norm scales, each norm of a list alike; 0 if unknown."""
    norms = children(module).values() if isinstance(module, nn.ModuleList) else [module]
    sizes = {
        parameter.numel()
        for norm in norms
        if is_norm(norm)
        for name, parameter in norm.named_parameters()
        if not name.endswith("bias")
    }
    return sizes.pop() if len(sizes) == 1 else 0


def is_flat(shape: Sequence[int]) -> bool:
    """Return whether at most one dimension has more than one entry."""
    return sum(size != 1 for size in shape) <= 1


def is_homogeneous(activation: object) -> bool:
    """Return whether f(s x) is a power of s times f(x) for s > 0, as for ReLU."""
    if isinstance(activation, nn.Module):
        return class_of(unwrap_module(activation)).__name__ in _HOMOGENEOUS
    return getattr(activation, "__name__", type(activation).__name__) in _HOMOGENEOUS


def has_homogeneous_activation(module: nn.Module) -> bool:
    """Return whether the activation kept in the module is positively homogeneous."""
    activations = (getattr(module, leaf, None) for leaf in _ACTIVATIONS)
    activation = next((activation for activation in activations if activation is not None), None)
    return activation is not None and is_homogeneous(activation)
