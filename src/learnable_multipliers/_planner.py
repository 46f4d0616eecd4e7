"""Make a plan for a model: read its roles, then apply a placement and rules to each matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

from learnable_multipliers._formats import first_of
from learnable_multipliers._initialize import FixedMultiplier, fixed_multipliers
from learnable_multipliers._multiplier import Block, Kind, Matrix, Scale
from learnable_multipliers._names import class_of, unwrap
from learnable_multipliers._placement import (
    PLACEMENTS,
    Choice,
    Placement,
    choose,
    derived_choices,
)
from learnable_multipliers._plan import Plan, PlanEntry
from learnable_multipliers._rules import VECTOR, Rule, Train, check_rules, quoted, unmatched_error
from learnable_multipliers.roles import QKV, UNKNOWN, ParameterRole, Part, read_roles
from learnable_multipliers.symmetry import find_symmetries
from learnable_multipliers.symmetry._derived_placement import Carried, derived_placement
from learnable_multipliers.symmetry._proxy import Proxy


def plan(
    model: nn.Module,
    placement: Placement = "full",
    rules: Sequence[Rule] = (),
    *,
    train: Train = "all",
    scale: Scale = "linear",
    init: Literal["one", "fold"] = "one",
    derive: bool = False,
    inputs: Any = None,
    proxy: Proxy = "auto",
) -> Plan:
    """Decide for every parameter of `model` which multipliers it carries.

    Reads names, module types and shapes only, so it works on the meta device.

    Args:
        placement: `"full"` puts row and column multipliers on every matrix but the head,
            `"symmetry-aware"` leaves out the redundant ones, `"scalar"` is one number per matrix,
            `"none"` no multipliers.
        rules: Exceptions; the first that matches a matrix decides.
        train: `"multipliers"` trains only those: raw weights and vectors stay fixed.
        scale: Scale of multipliers whose rule sets none: the number itself, or its logarithm.
        init: Multipliers start at 1, or with `"fold"` at the model's own fixed forward multipliers,
            which become 1 (`lrm.initialize_`).
        derive: Compute the symmetry-aware placement from the symmetries of the model itself, by
            running a copy of it; the plan lists those that remain. The conventions are in
            `symmetry/_derived_placement.py`.
        inputs: For `derive`, the arguments of the forward pass; random tokens by default.
        proxy: For `derive`, as in `lrm.find_symmetries`.
    """
    if placement not in PLACEMENTS:
        choices = ", ".join(repr(known) for known in PLACEMENTS)
        raise ValueError(f"unknown placement {placement!r}; choose from {choices}")
    if scale not in get_args(Scale):
        raise ValueError(f"scale is 'linear' or 'log', got {scale!r}")
    if init not in ("one", "fold"):
        raise ValueError(f"init is 'one' or 'fold', got {init!r}; a rule can give a number")
    bare = unwrap(model)
    roles = read_roles(bare)
    if derive and placement != "symmetry-aware":
        raise ValueError(f"derive=True computes the symmetry-aware placement, not {placement!r}")
    if not derive and (inputs is not None or proxy != "auto"):
        name = "proxy" if inputs is None else "inputs"
        raise ValueError(f"`{name}` has no effect without derive=True: set that, or leave it out")
    rules = check_rules(rules)
    if placement == "none" and not rules:
        for name, value, default in (
            ("scale", scale, "linear"),
            ("init", init, "one"),
            ("train", train, "all"),
        ):
            if value != default:
                raise ValueError(
                    f"{name}={value!r} has no effect with the placement 'none' and no rules: no "
                    "matrix carries multipliers"
                )
    carried, unconfirmed = derived_placement(bare, inputs, proxy) if derive else ({}, ())
    planner = _Planner(placement, rules, carried, train, scale, init == "fold")
    entries = tuple(planner.entry(parameter) for parameter in roles.parameters)
    planner.check(roles.parameters)
    entries, folds, kept = planner.fold(entries, fixed_multipliers(bare))
    assumptions = roles.assumptions if placement == "symmetry-aware" and not derive else ()
    planned = Plan(
        model=class_of(bare).__name__,
        placement=placement,
        entries=entries,
        folds=folds,
        assumptions=(*assumptions, *kept),
    )
    if derive:
        remaining = find_symmetries(bare, planned, inputs, proxy=proxy)
        unsure = dict.fromkeys((*unconfirmed, *remaining.unconfirmed))
        words = [str(symmetry) for symmetry in remaining]
        words += [f"perhaps, found on a small proxy but not confirmed: {text}" for text in unsure]
        planned = replace(planned, symmetries=tuple(words))
    return planned


@dataclass(frozen=True)
class _Decision:
    """The decision for one logical matrix."""

    part: Part
    choice: Choice
    rule: Rule | None = None

    @property
    def kind(self) -> Kind:
        return self.choice.kind

    @property
    def init(self) -> float:
        number = None if self.rule is None else self.rule.init
        return float(number) if isinstance(number, float | int) else 1.0

    @property
    def pending(self) -> bool:
        return self.init != 1.0 and self.rule is not None and self.rule.init_keeps == "raw"


class _Planner:
    """Applies placement and rules to each parameter in turn."""

    def __init__(
        self,
        placement: Placement,
        rules: tuple[Rule, ...],
        carried: Mapping[str, Carried],
        train: Train,
        scale: Scale,
        folds: bool,
    ):
        self.train: Train = train
        self.scale: Scale = scale
        self.folds = folds
        self.placement: Placement = placement
        self.carried = carried
        self.rules = rules
        self.used: set[int] = set()
        self.undecided: list[str] = []
        self.found_vectors: dict[int, ParameterRole] = {}
        self.found_frozen: dict[int, str] = {}
        # Logical matrices (name, role) whose rule asks for the model's own multipliers.
        self.to_fold: set[tuple[str, str]] = set()

    def entry(self, parameter: ParameterRole) -> PlanEntry:
        if not parameter.is_vector:
            parameter = self._describe(parameter)
        if parameter.is_vector:
            return self._vector(parameter)
        derived: Mapping[int, Choice] = {}
        if parameter.name in self.carried and not parameter.reparametrized:
            parameter, derived = derived_choices(parameter, self.carried[parameter.name])
        decisions = [
            self._decide(parameter, part, derived.get(index))
            for index, part in enumerate(parameter.parts)
        ]
        rules = [decision.rule for decision in decisions]
        entry = PlanEntry(
            name=parameter.name,
            shape=parameter.shape,
            aliases=parameter.aliases,
            reason=_joined_reasons(decisions),
            lr_scale=_agreed(parameter, "lr_scale", rules, 1.0),
            weight_decay=_agreed(parameter, "weight_decay", rules, None),
            train=_agreed(parameter, "train", rules, self.train),
            init_pending=any(decision.pending for decision in decisions),
        )
        if parameter.opaque and all(decision.kind == "none" for decision in decisions):
            return entry
        blocks = tuple(
            Block(
                role=decision.part.role,
                size=decision.part.size,
                row=decision.kind in ("row", "row+col"),
                scalar=decision.kind in ("scalar", "per-head"),
                per_head=decision.kind == "per-head",
                init=decision.init,
                head_dim=decision.part.head_dim,
            )
            for decision in decisions
        )
        try:
            matrix = Matrix(
                shape=parameter.shape,
                blocks=blocks,
                repeats=parameter.repeats,
                col=_shared_column(decisions),
                transposed=parameter.transposed,
                scale=_agreed(parameter, "scale", rules, self.scale),
            )
        except ValueError as error:
            raise ValueError(f"{parameter.name}: {error}") from error
        return replace(entry, matrix=matrix)

    def check(self, parameters: Sequence[ParameterRole]) -> None:
        """Raise if a rule matches nothing, or if a role is needed and unknown."""
        for index, rule in enumerate(self.rules):
            if index in self.used or rule.optional:
                continue
            if index in self.found_vectors:
                vector = self.found_vectors[index]
                raise ValueError(
                    f"rule {quoted(rule.pattern)} finds {vector.name!r} of shape {vector.shape}, "
                    "which is not a matrix: multipliers need one (a vector is a scale already)"
                )
            if index in self.found_frozen:
                raise ValueError(
                    f"rule {quoted(rule.pattern)} finds {self.found_frozen[index]!r}, which is "
                    "frozen: unfreeze it before planning, learn multipliers over the fixed weight "
                    'with train="multipliers", or let the rule match nothing with optional=True'
                )
            raise unmatched_error(rule, [parameter.name for parameter in parameters])
        if self.undecided:
            raise ValueError(
                f"the symmetry-aware placement needs the role of {first_of(self.undecided, 5)}. "
                "Say what it does, "
                'for instance Rule(r"attn\\.qkv\\.weight$", split={"query": 64, "key": 64, '
                '"value": 64}) or Rule(r"proj\\.weight$", role="down"), or what it carries: '
                'Rule(r"proj\\.weight$", "row+col").'
            )

    def fold(
        self, entries: tuple[PlanEntry, ...], fixed: Sequence[FixedMultiplier]
    ) -> tuple[tuple[PlanEntry, ...], tuple[tuple[str, float], ...], tuple[str, ...]]:
        """Start multipliers at the model's fixed ones; also return which are folded or stay."""
        if not self.to_fold:
            return entries, (), ()
        if not fixed:
            raise ValueError(
                "init='fold' takes over a model's fixed forward multipliers, and this model has "
                "none that are known; give init a number instead"
            )
        carried = {
            (entry.name, block.role)
            for entry in entries
            if entry.matrix is not None
            for block in entry.matrix.blocks
            # Columns are shared by all blocks, which may start at different values.
            if block.row or block.scalar or (entry.matrix.col and len(entry.matrix.blocks) == 1)
        }
        inits: dict[tuple[str, str], float] = {}
        folds, kept = [], []
        for multiplier in fixed:
            free = [target for target in multiplier.targets if target not in carried & self.to_fold]
            if free:
                name, role = free[0]
                folded = free[0] in carried
                why = "is not folded by a rule" if folded else "carries no multiplier of its own"
                stays = f"{multiplier.field} stays fixed at {multiplier.value:g}"
                kept.append(f"{stays}: {name} ({role}) {why}")
                continue
            folds.append((multiplier.field, multiplier.value))
            for target in multiplier.targets:
                inits[target] = inits.get(target, 1.0) * multiplier.value
        return tuple(_started_at(entry, inits) for entry in entries), tuple(folds), tuple(kept)

    def _vector(self, parameter: ParameterRole) -> PlanEntry:
        entry = PlanEntry(
            name=parameter.name,
            shape=parameter.shape,
            aliases=parameter.aliases,
            vector=True,
            train=self.train,
            reason="frozen" if parameter.frozen else parameter.note,
        )
        for index, rule in enumerate(self.rules):
            if rule.only is not None or not rule.finds(parameter.name):
                continue
            describes = rule.describes and rule.role != VECTOR
            needs_matrix = describes or rule.init is not None or rule.scale is not None
            if rule.kind not in (None, "none") or needs_matrix:
                self.found_vectors.setdefault(index, parameter)
            else:
                self.used.add(index)
            return replace(
                entry,
                lr_scale=1.0 if rule.lr_scale is None else rule.lr_scale,
                weight_decay=rule.weight_decay,
                train=rule.train or self.train,
            )
        return entry

    def _describe(self, parameter: ParameterRole) -> ParameterRole:
        """Apply the description of this parameter in the first rule that matches it."""
        rule = next((r for r in self.rules if r.only is None and r.finds(parameter.name)), None)
        if rule is None or not rule.describes:
            return parameter
        if rule.role == VECTOR:
            return replace(parameter, parts=(), note=f"by rule {quoted(rule.pattern)}")
        if rule.transposed is not None:
            parameter = replace(parameter, transposed=rule.transposed)
        if rule.split is not None:
            parts = tuple(Part(role, size) for role, size in rule.split.items())
            parameter = replace(parameter, parts=parts, repeats=rule.repeats, opaque=False)
        elif rule.role is not None or rule.transposed is not None:
            rows = parameter.shape[-1 if parameter.transposed else -2]
            parts = (Part(rule.role or UNKNOWN, rows),)
            parameter = replace(parameter, parts=parts, repeats=1, opaque=False)
        if rule.head_dim is not None:
            if not any(part.role in QKV for part in parameter.parts):
                raise ValueError(
                    f"rule {quoted(rule.pattern)} sets the heads of {parameter.name}, which holds "
                    "no query, key or value; if it does, set role or split"
                )
            parts = tuple(
                replace(part, head_dim=rule.head_dim) if part.role in QKV else part
                for part in parameter.parts
            )
            parameter = replace(parameter, parts=parts)
        return parameter

    def _decide(self, parameter: ParameterRole, part: Part, derived: Choice | None) -> _Decision:
        matching = (
            (index, rule)
            for index, rule in enumerate(self.rules)
            if rule.finds(parameter.name) and rule.only in (None, part.role)
        )
        index, rule = next(matching, (-1, None))
        train = self.train if rule is None or rule.train is None else rule.train
        if parameter.frozen and train == "all":
            if rule is not None and rule.kind != "none":
                self.found_frozen.setdefault(index, parameter.name)
            else:
                self.used.add(index)
            return _Decision(part, Choice("none", "frozen"))
        self.used.add(index)
        if rule is not None and rule.kind is not None:
            choice = Choice(rule.kind, f"by rule {quoted(rule.pattern)}")
        elif derived is not None:
            choice = derived
        elif (choice := choose(self.placement, parameter, part)) is None:
            self.undecided.append(f"{parameter.name} ({parameter.note})")
            choice = Choice("none", "unknown role")
        if choice.kind == "per-head" and part.head_dim is None:
            raise _no_heads(parameter, part)
        if part.role == "tied-embedding" and choice.kind in ("row", "row+col"):
            raise ValueError(
                f"{parameter.name} is tied to the head ({', '.join(parameter.aliases)}): its row "
                "multipliers would scale single logits. Give it columns, "
                f'Rule(r"{parameter.name}", "col"), or untie the two.'
            )
        decision = _Decision(part, choice, rule)
        if self.folds if rule is None or rule.init is None else rule.init == "fold":
            self.to_fold.add((parameter.name, part.role))
        elif rule is not None and decision.init != 1.0 and choice.kind == "none":
            raise ValueError(
                f"rule {quoted(rule.pattern)} starts {parameter.name} ({part.role}) at "
                f"{decision.init:g}, but it carries no multiplier; give the rule a kind"
            )
        return decision


def _no_heads(parameter: ParameterRole, part: Part) -> ValueError:
    """Return the error for a multiplier per head if no heads are known."""
    advice = 'heads are those of query, key and value; narrow the rule, such as with only="query"'
    if part.role == UNKNOWN:
        advice = (
            "its role is unknown; set role or split to show where its queries, keys or values are"
        )
    elif part.role in QKV:
        rule = f'lrm.Rule(r"{re.escape(parameter.name)}", "per-head", head_dim=64)'
        advice = f"the model does not show how many rows a head has; set it with a rule, {rule}"
    return ValueError(
        f"{parameter.name} ({part.role}) cannot have one multiplier for each head: {advice}"
    )


def _agreed(
    parameter: ParameterRole, attribute: str, rules: Sequence[Rule | None], otherwise: Any
) -> Any:
    """Return a setting of the rules of a matrix's blocks; raise if they differ."""
    given = [None if rule is None else getattr(rule, attribute) for rule in rules]
    values = dict.fromkeys(otherwise if value is None else value for value in given)
    if len(values) > 1:
        raise ValueError(
            f"{parameter.name} is one stored matrix, but rules give its blocks different "
            f"{attribute}: {', '.join(str(value) for value in values)}"
        )
    return next(iter(values))


def _shared_column(decisions: Sequence[_Decision]) -> bool:
    with_col = [d.part.role for d in decisions if d.kind in ("col", "row+col")]
    if with_col and len(with_col) < len(decisions):
        without = [d.part.role for d in decisions if d.part.role not in with_col]
        raise ValueError(
            f"its blocks share one column multiplier, wanted for {', '.join(with_col)} but not "
            f"for {', '.join(without)}; ask for it on all of them or none"
        )
    return bool(with_col)


def _joined_reasons(decisions: Sequence[_Decision]) -> str:
    """Return each reason once, with the blocks it is for, and the one about columns last."""
    reasons: dict[str, list[str]] = {}
    for decision in decisions:
        reasons.setdefault(decision.choice.reason, []).append(decision.part.role)
    parts = list(reasons)
    if len(reasons) > 1:
        parts = [f"{', '.join(roles)}: {reason}" for reason, roles in reasons.items()]
    columns = {decision.choice.columns: None for decision in decisions if decision.choice.columns}
    return "; ".join([*parts, *columns])


def _started_at(entry: PlanEntry, inits: dict[tuple[str, str], float]) -> PlanEntry:
    if entry.matrix is None or not any(name == entry.name for name, _ in inits):
        return entry
    blocks = tuple(
        replace(block, init=inits.get((entry.name, block.role), block.init))
        for block in entry.matrix.blocks
    )
    try:
        return replace(entry, matrix=replace(entry.matrix, blocks=blocks), init_pending=True)
    except ValueError as error:
        raise ValueError(f"{entry.name}: {error}") from error
