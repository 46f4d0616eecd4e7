"""The width-scaling recipes of table 1: the effect of each on a layer, and rules to apply it.

The layer is y = s W x with x in R^d. Lengths are rms. The weight is in its equilibrium
|W| ~ sqrt(lr / wd) (eq. 1), an update has |dW| ~ lr, and alignments do not depend on d; everything
here follows from these three, and `_coordinates` measures how far they hold. `scale_roles` turns a
recipe into factors by role, `rules` and `mup_fields` turn those into rules for `lrm.plan` and
fields of a model config. Falcon-H1's published multipliers are last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from learnable_multipliers._multiplier import Kind
from learnable_multipliers._rules import Rule
from learnable_multipliers.roles import ROLES, SSM_ROLES, UNKNOWN, check_role


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings that change with width, as powers of d."""

    lr: float = 0.0
    weight_decay: float = 0.0
    multiplier: float = 0.0
    """Exponent of the forward multiplier s."""

    @property
    def weight(self) -> float:
        """Power of `|W|`: eq. 1, `|W| ~ sqrt(lr / wd)`."""
        return (self.lr - self.weight_decay) / 2

    @property
    def output(self) -> float:
        """Power of `|y| ~ s d |W| |x|`."""
        return self.multiplier + 1 + self.weight

    @property
    def relative_update(self) -> float:
        """Power of `|dy| / |y| ~ |dW| / |W| ~ sqrt(lr wd)`; `|dW|` goes by the learning rate."""
        return self.lr - self.weight

    @property
    def expected(self) -> dict[str, float]:
        """Powers of everything that the coordinate check measures, by its names."""
        return {
            "multiplier": self.multiplier,
            "input": 0.0,
            "weight": self.weight,
            "update": self.lr,
            "output": self.output,
            "relative_update": self.relative_update,
            "alignment": 0.0,
            "update_alignment": 0.0,
        }


RECIPES: Mapping[str, Recipe] = {
    "lr": Recipe(lr=-1.0),
    "lr-wd": Recipe(lr=-1.0, weight_decay=1.0),
    "multiplier": Recipe(multiplier=-1.0),
    "none": Recipe(),
}
"""Table 1 from top to bottom: standard, through LR; through LR and WD; through the multiplier.
`none` is not in the table: nothing changes with width, as the control of an experiment."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Factors on a layer's settings, relative to the base width."""

    lr: float = 1.0
    weight_decay: float = 1.0
    multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Number of input features of each kind of layer; omitted sizes grow with `hidden`."""

    hidden: int
    """Width of the residual stream."""
    attention: int | None = None
    """Into attention-out: heads times head_dim."""
    mlp: int | None = None
    """Into down."""
    ssm: int | None = None
    """Into ssm-out (d_ssm)."""


_READS = {"attention-out": "attention", "down": "mlp", "ssm-out": "ssm"}
"""The width that a role reads, if it is not `hidden`."""


def scale_layer(recipe: Recipe, fan_in: int, base_fan_in: int) -> Scaling:
    """Return how a layer's settings change when it reads `fan_in` features: table 1."""
    if min(fan_in, base_fan_in) < 1:
        raise ValueError(
            f"fan_in counts features: it must be at least 1, got {fan_in} and base {base_fan_in}"
        )
    ratio = fan_in / base_fan_in
    return Scaling(
        lr=ratio**recipe.lr,
        weight_decay=ratio**recipe.weight_decay,
        multiplier=ratio**recipe.multiplier,
    )


def scale_roles(
    recipe: Recipe, width: int | Widths, base_width: int | Widths
) -> dict[str, Scaling]:
    """Return the scaling of every role of matrix in `lrm.plan` except `unknown`.

    A number is the hidden size, with all inner sizes in proportion. Embeddings are not scaled.
    """
    width, base_width = (
        Widths(hidden=sizes) if isinstance(sizes, int) else sizes for sizes in (width, base_width)
    )
    # An embedding picks a row: there is no sum over d for a recipe to compensate.
    scalings = {role: Scaling() for role in ROLES if role.endswith("embedding")}
    for role in ROLES:
        if role == UNKNOWN or role in scalings:
            continue
        read = _READS.get(role, "hidden")
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


@dataclass(frozen=True, kw_only=True)
class TunedRates:
    """Tuned factors on learning rate and decay, on top of any width scaling.

    Falcon-H1 has 16 for learning rates and 7 for decays. Their values are not public, so the
    defaults are 1.
    """

    lr: Mapping[str, float] = field(default_factory=dict)
    """Role of a matrix -> factor on its learning rate."""
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    """Role of a matrix -> factor on its weight decay."""
    vector_lr: Mapping[str, float] = field(default_factory=dict)
    """Regular expression for names of vectors (norms, biases) -> factor on their learning rate."""

    def __post_init__(self) -> None:
        for role in (*self.lr, *self.weight_decay):
            check_role(role)
        for name in ("lr", "weight_decay", "vector_lr"):
            for key, factor in getattr(self, name).items():
                if not factor > 0:
                    raise ValueError(f"{name}[{key!r}] is a factor above 0, got {factor}")


def rules(
    scalings: Mapping[str, Scaling],
    *,
    weight_decay: float,
    kind: Kind | None = None,
    multipliers: Literal["fixed", "learned"] | None = None,
    tuned: TunedRates | None = None,
) -> list[Rule]:
    """Return rules for `lrm.plan` that give each role its learning rate and decay.

    Args:
        scalings: As `scale_roles` gives them.
        weight_decay: At the base width, as for `lrm.param_groups`.
        kind: Multipliers of the matrices; None keeps the placement's choice.
        multipliers: Where scalings other than 1 are applied. `fixed`: in the model's forward pass,
            see `mup_fields`. `learned`: multipliers start there, and `lrm.initialize_` applies them
            to the weights; scalars, unless `kind` is given.
        tuned: Further factors; every pattern for vectors must match one.
    """
    if multipliers not in (None, "fixed", "learned"):
        raise ValueError(f"multipliers are 'fixed' or 'learned', got {multipliers!r}")
    tuned = tuned or TunedRates()
    scaled = [role for role, scaling in scalings.items() if scaling.multiplier != 1.0]
    if scaled and multipliers is None:
        raise ValueError(
            f"the recipe scales the multipliers of {', '.join(scaled[:3])}, ...: give the model "
            "mup_fields(scalings) and these rules multipliers='fixed', or let matrices learn from "
            "there with multipliers='learned'"
        )
    result = []
    for role in dict.fromkeys((*scalings, *tuned.lr, *tuned.weight_decay)):
        scaling = scalings.get(role, Scaling())
        starts = multipliers == "learned" and scaling.multiplier != 1.0
        decay = scaling.weight_decay * tuned.weight_decay.get(role, 1.0)
        rule = Rule(
            "",
            kind or ("scalar" if starts else None),
            only=role,
            lr_scale=scaling.lr * tuned.lr.get(role, 1.0),
            weight_decay=weight_decay * decay,
            init=scaling.multiplier if starts else None,
            init_keeps="raw" if starts else "function",
            optional=True,
        )
        result.append(rule)
    # After the rules by role, so that patterns for vectors do not apply to matrices.
    result += [Rule(pattern, lr_scale=factor) for pattern, factor in tuned.vector_lr.items()]
    return result


def mup_fields(scalings: Mapping[str, Scaling]) -> dict[str, float]:
    """Return the forward multipliers as the `mup_*` fields of a Falcon-H1 or Llama config.

    Queries, keys and values share the factor on attention's input, as z, x, B, C and dt share the
    mixer's. `up` has no field of its own: its product with `down` takes both.
    """
    factor = {role: scaling.multiplier for role, scaling in scalings.items()}
    attention_in, ssm_in = factor["query"], factor["ssm-x"]
    return {
        "mup_embedding": factor["embedding"],
        "mup_head": factor["head"],
        "mup_attention_in": attention_in,
        "mup_key": factor["key"] / attention_in,
        "mup_attention_out": factor["attention-out"] * factor["value"] / attention_in,
        "mup_ssm_in": ssm_in,
        **{f"mup_{role.removeprefix('ssm-')}": factor[role] / ssm_in for role in SSM_ROLES},
        "mup_ssm_out": factor["ssm-out"],
        "mup_gate": factor["gate"],
        "mup_down": factor["up"] * factor["down"],
    }


# Falcon-H1's technical report (arXiv 2507.22448) tuned 12 forward multipliers at one shape. Configs
# of four sizes are public, and the width rules here give all of their values. Learning rate and
# decay are the same at every size: this is the last recipe of table 1. Its factors on learning
# rates and decays are not public; `TunedRates` takes your own.


@dataclass(frozen=True, kw_only=True)
class FalconH1Shape:
    """The sizes that forward multipliers depend on."""

    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    attention_size: int
    """Query heads times head_dim, not always the hidden size."""
    head_dim: int
    ssm_size: int
    """Width inside the mixer (d_ssm)."""
    ssm_state_size: int
    """States per feature (d_state)."""

    def __post_init__(self) -> None:
        for size in fields(self):
            if getattr(self, size.name) < 1:
                raise ValueError(f"{size.name} must be at least 1, got {getattr(self, size.name)}")


FALCON_H1_BASE = FalconH1Shape(
    hidden_size=1280,
    intermediate_size=3072,
    attention_size=768,
    head_dim=128,
    ssm_size=1536,
    ssm_state_size=256,
)
"""Falcon-H1-1.5B-Deep, where the multipliers were tuned."""


def falcon_h1_multipliers(shape: FalconH1Shape) -> dict[str, float]:
    """Return the forward multipliers of a shape, as the `mup_*` fields of a model config.

    Each is a power of sqrt(2) or a simple ratio at the base shape, divided by the number of
    features that the layers it stands for read. One factor stands for two layers where their
    outputs meet as a product: queries and keys, values and attention-out, up and down.
    """
    base = FALCON_H1_BASE
    hidden = base.hidden_size / shape.hidden_size
    # Attention divides by sqrt(head_dim); the root makes it head_dim, for aligned q and k.
    head = math.sqrt(base.head_dim / shape.head_dim)
    return {
        "mup_embedding": 2**2.5,
        "mup_head": 2**-5 * hidden,
        "mup_attention_in": 1.0,
        "mup_key": 1 / 2**2.5 * hidden**2 * head,
        "mup_attention_out": 2**-1 * hidden * (base.attention_size / shape.attention_size),
        "mup_ssm_in": hidden,
        "mup_z": 2**-1.5,
        "mup_x": 2**-2,
        "mup_B": 2**-2.5 * (base.ssm_state_size / shape.ssm_state_size),
        "mup_C": 2**-1,
        "mup_dt": 2**-1.5,
        "mup_ssm_out": math.sqrt(2) / 6 * (base.ssm_size / shape.ssm_size),
        "mup_gate": 2**-0.5 * hidden,
        "mup_down": 5 / 16 * hidden * (base.intermediate_size / shape.intermediate_size),
    }
