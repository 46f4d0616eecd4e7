"""Rules: settings a user gives to parameters, by name or by role; the first match wins."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from learnable_multipliers._multiplier import KINDS, Kind, Scale
from learnable_multipliers._names import check_type
from learnable_multipliers.roles import check_role

VECTOR = "vector"
"""Role of parameters that are no matrices: norm weights, biases and the like."""
Train = Literal["all", "multipliers"]
"""Train all of a parameter, or only its multipliers over a fixed raw weight."""


@dataclass(frozen=True)
class Rule:
    """Settings for the parameters that a pattern finds.

    The first rule that matches a logical matrix decides everything about it; settings that this
    rule leaves out are as without rules.
    """

    pattern: str
    """Regular expression searched for in the parameter's name."""
    kind: Kind | None = None
    """Multipliers to carry: `per-head` is one scalar for each head of query, key or value. None
    keeps the placement's choice."""
    _: KW_ONLY
    only: str | None = None
    """Restrict the rule to logical matrices of this role: a block of a fused matrix, too."""
    role: str | None = None
    """Set the role of a matrix that is unknown or misread. A `vector` carries no multipliers and
    trains with AdamW, without decay."""
    split: Mapping[str, int] | None = None
    """Set the row blocks of a fused matrix: role -> rows, in order, within one repeat."""
    repeats: int = 1
    """How often the pattern of `split` repeats down the rows: heads, if interleaved by head."""
    transposed: bool | None = None
    """Set whether the weight is stored (in, out)."""
    head_dim: int | None = None
    """Set the rows of one attention head, of queries, keys and values."""
    scale: Scale | None = None
    """Linear or log; None follows `lrm.plan`."""
    init: float | Literal["fold"] | None = None
    """Initial value of the product of the multipliers. `fold` takes over the model's own fixed
    forward multipliers, which become 1. None follows `lrm.plan`."""
    init_keeps: Literal["function", "raw"] = "function"
    """What an initial number keeps: the function (the raw weight is divided by it), or the raw
    weight (the effective weight is multiplied by it, on purpose)."""
    lr_scale: float | None = None
    """Learning rate of the raw weight over the group's; it does not affect multipliers."""
    weight_decay: float | None = None
    """Weight decay of the raw weight; None is the optimizer's."""
    train: Train | None = None
    """`all`, or the `multipliers` alone; None follows `lrm.plan`."""
    optional: bool = False
    """Allow the rule to match nothing."""

    def __post_init__(self) -> None:
        check_type(self.pattern, str, "a pattern as text")
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}; choose from {', '.join(KINDS)}")
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{quoted(self.pattern)} is not a regular expression: {error}"
            ) from error
        for role in (self.only, self.role, *(self.split or ())):
            if role is not None and (role, self.role) != (VECTOR, VECTOR):
                check_role(role)
        for name in ("lr_scale", "weight_decay"):
            value = getattr(self, name)
            if value is None:
                continue
            if not 0 <= as_number(name, value) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {value}")
            # Saved plans must not need the library of a number's type, such as NumPy.
            object.__setattr__(self, name, float(value))
        if self.scale not in (None, *get_args(Scale)):
            raise ValueError(f"scale is 'linear' or 'log', got {self.scale!r}")
        if isinstance(self.init, str) and self.init != "fold":
            raise ValueError(f"init is a number or 'fold', got {self.init!r}")
        if self.init not in (None, "fold"):
            object.__setattr__(self, "init", as_number("init", self.init))
        if self.train not in (None, *get_args(Train)):
            raise ValueError(f"train is 'all' or 'multipliers', got {self.train!r}")
        if self.init_keeps not in ("function", "raw"):
            raise ValueError(f"init_keeps is 'function' or 'raw', got {self.init_keeps!r}")
        if self.repeats != 1 and self.split is None:
            raise ValueError(
                f"repeats={self.repeats} has no effect without `split`, whose pattern it repeats"
            )
        if self.init_keeps == "raw" and self.init in (None, "fold"):
            raise ValueError(
                "init_keeps='raw' has no effect without a number in `init`: give one, or leave "
                "init_keeps out"
            )
        if self.kind == "none" and self.init == "fold":
            raise ValueError(
                "init='fold' has no effect on kind 'none', which has no multiplier to start"
            )
        if self.train == "multipliers":
            for name in ("lr_scale", "weight_decay"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} has no effect with train='multipliers', which keeps the raw "
                        "weight fixed: leave one of them out"
                    )
        if self.only is not None and self.describes:
            raise ValueError("a rule with `only` cannot set a matrix's role, split, axes or heads")
        own = (self.transposed, self.head_dim, self.scale, self.init)
        if self.role == VECTOR and (
            self.kind not in (None, "none") or any(v is not None for v in own)
        ):
            raise ValueError(
                "a rule with role='vector' takes no kind, axes, heads, scale or init: a vector "
                "carries no multipliers"
            )
        if self.role is not None and self.split is not None:
            raise ValueError("give `role` for a whole matrix or `split` for its blocks, not both")

    @property
    def describes(self) -> bool:
        """Whether the rule describes a matrix, and not only sets its multipliers."""
        descriptions = (self.role, self.split, self.transposed, self.head_dim)
        return any(value is not None for value in descriptions)

    def finds(self, name: str) -> bool:
        """Return whether the pattern occurs in a parameter's name."""
        return re.search(self.pattern, name) is not None


def check_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return rules as a tuple; raise if they are anything else."""
    check_type(rules, Iterable, "a list of lrm.Rule")
    rules = tuple(rules)
    for rule in rules:
        check_type(rule, Rule, "a list of lrm.Rule")
    return rules


def as_number(name: str, value: Any) -> float:
    """Return a number of any library as a float; raise for anything else."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        got = f"the text {value!r}" if isinstance(value, str) else repr(value)
        raise TypeError(f"{name} must be a number, got {got}")
    return float(value)


def quoted(pattern: str) -> str:
    """Return a pattern in quotes, with its backslashes as the user wrote them."""
    # A line break would break the table of a plan.
    return f"'{pattern}'" if pattern.isprintable() else repr(pattern)


def unmatched_error(rule: Rule, names: Sequence[str]) -> ValueError:
    """Return the error for a rule that matched nothing, with the closest names."""
    matches = [name for name in names if rule.finds(name)]
    if matches and rule.only is not None:
        return ValueError(
            f"rule {quoted(rule.pattern)} finds {matches[0]!r}, but nothing of role {rule.only!r} "
            "that an earlier rule has not decided"
        )
    if matches:
        return ValueError(
            f"rule {quoted(rule.pattern)} decides nothing: earlier rules match all it finds, such "
            f"as {matches[0]!r}; put it before them"
        )
    plain = re.sub(r"[^\w.]", "", rule.pattern.replace("\\.", "."))
    close = difflib.get_close_matches(plain, names, n=3, cutoff=0.0)
    return ValueError(
        f"rule {quoted(rule.pattern)} matches no parameter; closest names: {', '.join(close)}"
    )


NO_EMBEDDING = tuple(
    Rule("", "none", only=role, optional=True)
    for role in ("embedding", "tied-embedding", "position-embedding")
)
"""Variant the paper tried (app. C): embeddings without multipliers."""
