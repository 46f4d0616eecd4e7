"""The width-scaling recipes of table 1, and what each must do to a linear layer (sec. 4.2).

The layer is y = s W x with x in R^d. Lengths are rms. The weight sits in its equilibrium
|W| ~ sqrt(lr / wd) (eq. 1), an update has |dW| ~ lr, and alignments do not depend on d; everything
here follows from these three, and `coordinates` measures how far they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from learnable_multipliers._forward_multipliers import SSM_ROLES


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What changes with width, as powers of d."""

    lr: float = 0.0
    weight_decay: float = 0.0
    multiplier: float = 0.0
    """Of the forward multiplier s."""

    @property
    def weight(self) -> float:
        """Power of |W|: eq. 1, |W| ~ sqrt(lr / wd)."""
        return (self.lr - self.weight_decay) / 2

    @property
    def update(self) -> float:
        """Power of |dW|: that of the learning rate, for an optimizer without a scale."""
        return self.lr

    @property
    def output(self) -> float:
        """Power of |y| ~ s d |W| |x|."""
        return self.multiplier + 1 + self.weight

    @property
    def relative_update(self) -> float:
        """Power of |dy| / |y| ~ |dW| / |W| ~ sqrt(lr wd)."""
        return self.update - self.weight

    @property
    def expected(self) -> dict[str, float]:
        """Powers of everything that the coordinate check measures, by its names."""
        return {
            "multiplier": self.multiplier,
            "input": 0.0,
            "weight": self.weight,
            "update": self.update,
            "output": self.output,
            "relative_update": self.relative_update,
            "alignment": 0.0,
            "update_alignment": 0.0,
        }


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "lr": Recipe(lr=-1.0),
        "lr-wd": Recipe(lr=-1.0, weight_decay=1.0),
        "multiplier": Recipe(multiplier=-1.0),
        "none": Recipe(),
    }
)
"""Table 1 from top to bottom: standard, through LR; through LR and WD; through the multiplier.
`none` is not in the table: nothing changes with width, the control of an experiment."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What a layer's settings are multiplied by, compared with the base width."""

    lr: float = 1.0
    weight_decay: float = 1.0
    multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Widths:
    """How many features each kind of layer reads; sizes left out grow with `hidden`."""

    hidden: int
    """Of the residual stream."""
    attention: int | None = None
    """Into attention-out: heads times head_dim."""
    mlp: int | None = None
    """Into down."""
    ssm: int | None = None
    """Into ssm-out (d_ssm)."""


_READS_HIDDEN = (
    *("head", "query", "key", "value", "query-latent", "kv-latent"),
    *("gate", "up", "ungated-up", "router", *SSM_ROLES),
)
_READS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_READS_HIDDEN, "hidden"),
        "attention-out": "attention",
        "down": "mlp",
        "ssm-out": "ssm",
    }
)
_READS_TOKENS = ("embedding", "position-embedding", "tied-embedding")
"""An embedding picks a row: the sum over d that the recipes make up for is not there."""


def scale_layer(recipe: Recipe, fan_in: int, base_fan_in: int) -> Scaling:
    """Return how a layer's settings change when it reads `fan_in` features: table 1."""
    for name, value in (("fan_in", fan_in), ("base_fan_in", base_fan_in)):
        if value < 1:
            raise ValueError(f"{name} counts features: it must be at least 1, got {value}")
    ratio = fan_in / base_fan_in
    return Scaling(
        lr=ratio**recipe.lr,
        weight_decay=ratio**recipe.weight_decay,
        multiplier=ratio**recipe.multiplier,
    )


def scale_roles(
    recipe: Recipe, width: int | Widths, base_width: int | Widths
) -> dict[str, Scaling]:
    """Return the scaling of every role of matrix that `lrm.plan` knows but `unknown`.

    A number is the hidden size, with all inner sizes in proportion. Embeddings stay as they are.
    """
    width, base_width = (
        Widths(hidden=sizes) if isinstance(sizes, int) else sizes for sizes in (width, base_width)
    )
    scalings: dict[str, Scaling] = {role: Scaling() for role in _READS_TOKENS}
    for role, read in _READS.items():
        fan_in, base_fan_in = getattr(width, read), getattr(base_width, read)
        if (fan_in is None) != (base_fan_in is None):
            raise ValueError(
                f"`{read}` is {fan_in} at this width and {base_fan_in} at the base width: give "
                "both, or neither to let it grow with `hidden`"
            )
        if fan_in is None:
            fan_in, base_fan_in = width.hidden, base_width.hidden
        scalings[role] = scale_layer(recipe, fan_in, base_fan_in)
    return scalings
