"""From scalings to what optimizers and models take: rules for `lrm.plan`, and `mup_*` fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from learnable_multipliers._forward_multipliers import SSM_ROLES
from learnable_multipliers._multiplier import Kind
from learnable_multipliers._rules import Rule
from learnable_multipliers.mup._recipes import Scaling
from learnable_multipliers.roles import ROLES


@dataclass(frozen=True, kw_only=True)
class TunedRates:
    """Factors on learning rate and decay that somebody tuned, on top of any width scaling.

    Falcon-H1 has 16 for learning rates and 7 for decays. Their values are not public: there is
    no default here but 1.
    """

    lr: Mapping[str, float] = field(default_factory=dict)
    """Role of a matrix -> factor on its learning rate."""
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    """Role of a matrix -> factor on its weight decay."""
    vector_lr: Mapping[str, float] = field(default_factory=dict)
    """Regular expression for names of vectors (norms, biases) -> factor on their learning rate."""

    def __post_init__(self) -> None:
        for role in (*self.lr, *self.weight_decay):
            if role not in ROLES:
                close = difflib.get_close_matches(role, ROLES, n=3, cutoff=0.0)
                raise ValueError(f"unknown role {role!r}; closest: {', '.join(close)}")
        for name in ("lr", "weight_decay", "vector_lr"):
            for key, factor in getattr(self, name).items():
                if not factor > 0:
                    raise ValueError(f"{name}[{key!r}] is a factor above 0, got {factor}")

    def apply(self, scalings: Mapping[str, Scaling]) -> dict[str, Scaling]:
        """Return scalings with the factors of the matrices multiplied in."""
        roles = dict.fromkeys((*scalings, *self.lr, *self.weight_decay))
        result = {}
        for role in roles:
            scaling = scalings.get(role, Scaling())
            result[role] = replace(
                scaling,
                lr=scaling.lr * self.lr.get(role, 1.0),
                weight_decay=scaling.weight_decay * self.weight_decay.get(role, 1.0),
            )
        return result


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
        kind: What matrices carry; None keeps the placement's choice.
        multipliers: Where scalings other than 1 live. `fixed`: in the model's forward pass, see
            `mup_fields`. `learned`: multipliers start there, which `lrm.initialize_` brings into
            the weights; scalars, unless `kind` says otherwise.
        tuned: Factors of one's own besides; every pattern for vectors must find one.
    """
    tuned = tuned or TunedRates()
    scalings = tuned.apply(scalings)
    scaled = [role for role, scaling in scalings.items() if scaling.multiplier != 1.0]
    if scaled and multipliers is None:
        raise ValueError(
            f"the recipe scales the multipliers of {', '.join(scaled[:3])}, ...: give the model "
            "mup_fields(scalings) and these rules multipliers='fixed', or let matrices learn from "
            "there with multipliers='learned'"
        )
    result = [
        _rule(role, scaling, weight_decay, kind, multipliers == "learned")
        for role, scaling in scalings.items()
    ]
    # After the rules by role: patterns for vectors decide nothing about a matrix with a role.
    result += [Rule(pattern, lr_scale=factor) for pattern, factor in tuned.vector_lr.items()]
    return result


def _rule(
    role: str, scaling: Scaling, weight_decay: float, kind: Kind | None, learned: bool
) -> Rule:
    starts = learned and scaling.multiplier != 1.0
    return Rule(
        "",
        kind or ("scalar" if starts else None),
        only=role,
        lr_scale=scaling.lr,
        weight_decay=weight_decay * scaling.weight_decay,
        init=scaling.multiplier if starts else None,
        init_keeps="raw" if starts else "function",
        optional=True,
    )


def mup_fields(scalings: Mapping[str, Scaling]) -> dict[str, float]:
    """Return the forward multipliers as the `mup_*` fields of a Falcon-H1 or Llama config.

    Queries, keys and values share the factor on attention's input, as z, x, B, C and dt share the
    mixer's. `up` has no field of its own: it meets `down` as a product, which takes both.
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
