"""The vocabulary of roles, and what is known about one parameter."""

from __future__ import annotations

from dataclasses import dataclass

ROLES = (
    "embedding",
    "position-embedding",
    "tied-embedding",
    "head",
    "query",
    "key",
    "value",
    "attention-out",
    "query-latent",
    "kv-latent",
    "gate",
    "up",
    "ungated-up",
    "down",
    "ssm-z",
    "ssm-x",
    "ssm-B",
    "ssm-C",
    "ssm-dt",
    "ssm-out",
    "router",
    "unknown",
)
"""`ungated-up` is the first matrix of an MLP without a gate: its rows meet the activation alone.
The two latents are the low-rank inputs of multi-head latent attention."""

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Part:
    """One logical matrix: all rows of a stored one, or one block of a fused one."""

    role: str
    size: int
    """Rows in one repeat of the stored matrix's row pattern."""
    row_norm: str = ""
    """Name of the learnable norm behind it, whose weight already scales these rows."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one parameter of a model is."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Other names of the same parameter (tied weights)."""
    frozen: bool = False
    parts: tuple[Part, ...] = ()
    """Empty for a vector: it is a scale or a shift already and carries nothing."""
    repeats: int = 1
    transposed: bool = False
    column_norm: str = ""
    """Name of the learnable norm in front, whose weight already scales the columns."""
    homogeneous: bool = False
    """The activation behind it lets a scale through unchanged (ReLU and its powers)."""
    opaque: bool = False
    """Not laid out as a matrix or a stack of them, as far as can be told."""
    note: str = ""

    @property
    def is_vector(self) -> bool:
        """Whether the parameter is not a matrix."""
        return not self.parts


@dataclass(frozen=True)
class ModelReading:
    """Every parameter of a model, once, in the model's order."""

    parameters: tuple[Reading, ...]
    assumptions: tuple[str, ...] = ()
