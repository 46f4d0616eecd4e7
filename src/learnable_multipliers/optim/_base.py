"""What every optimizer with multipliers shares: state, clipping, the order of a step.

The parameter of the model is the effective weight. The optimizer owns the raw weight and the
multipliers; a step turns the gradient into theirs (eq. 4), clips, updates, and writes the
effective weight back. Raw weights are updated by AdamW; subclasses may do otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._multiplier import Matrix, multiplier
from learnable_multipliers._placement import Placement
from learnable_multipliers._plan import Plan
from learnable_multipliers._rules import Rule
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._parameter import ParameterSet, ParameterState
from learnable_multipliers.kernels._reference import effective_of, write_effective, write_raw
from learnable_multipliers.optim import _loading
from learnable_multipliers.optim._binding import MEAN_SQUARE, Binding
from learnable_multipliers.optim._clipping import clip_factor
from learnable_multipliers.optim._copies import Copies, copies_among
from learnable_multipliers.optim._groups import (
    MULTIPLIER_WEIGHT_DECAY,
    WEIGHT_DECAY,
    check_parameters,
    check_reached,
    check_settings,
    joined_plan,
    param_groups,
    plan_for,
)
from learnable_multipliers.optim._packed_multipliers import NAMES
from learnable_multipliers.optim._sharding import all_agree, full, is_sharded, local
from learnable_multipliers.optim._skipping import SkippedSteps
from learnable_multipliers.optim._write_guard import wrong_shape

_DEFAULTS = {
    "lr": 1e-3,
    "weight_decay": WEIGHT_DECAY,
    "multiplier_lr_scale": 1.0,
    "multiplier_weight_decay": MULTIPLIER_WEIGHT_DECAY,
}
"""Settings that parameter groups and the optimizer's arguments may both give."""
_SMALLEST_FACTOR = 1e-2
"""Raw weights are not divided by factors below it: one step may change these several times over."""


class MultiplierOptimizer(Optimizer):
    """Base of the optimizers; not used by itself."""

    found_inf: Tensor | None = None
    """Set before `step` to skip it where this 0-d tensor is nonzero, as a bad gradient would: for
    a loss that is not finite. The same on all ranks, read on the device, cleared by the step."""
    _process_group: Any = None
    # Of a DistributedDataParallel that the parameters came from.
    _ddp_group: Any = None
    _copies: Copies | None = None
    _binding: Binding | None = None
    _has_loaded = False
    _model: Callable[[], nn.Module | None] | None = None
    _plan: Plan | None
    _settings: tuple[str, ...] = (
        "_plan",
        "max_grad_norm",
        "clip_multipliers",
        "backend",
        "grad_norm",
        "_skipped",
        "_has_stepped",
    )
    """Attributes that a copy of the optimizer keeps; torch's own copies its groups alone."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None,
        clip_multipliers: bool,
        backend: Backend,
        process_group: Any = None,
    ):
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise _bad_norm(max_grad_norm)
        if isinstance(params, nn.Module):
            name = type(self).__name__
            raise TypeError(
                f"{name} was given a model: use lrm.{name}.from_model(model), which plans its "
                "multipliers"
            )
        given = {name: defaults[name] for name in _DEFAULTS if defaults.get(name) is not None}
        defaults = {**defaults, **{n: v for n, v in _DEFAULTS.items() if n in defaults}, **given}
        self._plan = None
        self.max_grad_norm = max_grad_norm
        self.clip_multipliers = clip_multipliers
        self.backend: Backend = backend
        self.grad_norm: Tensor | None = None
        self._skipped: SkippedSteps | None = None
        self._process_group = process_group
        self._has_stepped = False
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._process_groups: dict[tuple[int, ...], Any] = {}
        groups = list(params)
        for name in given:
            check_reached(name, given[name], groups)
        ours = {"lr_scale": 1.0, "kind": "", "plan": "", "format": _loading.FORMAT}
        super().__init__(groups, {**ours, **defaults})
        if self._plan is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} was given parameters without a plan, which would train without "
                f"multipliers: use lrm.{name}.from_model(model), or "
                f'lrm.{name}.from_model(model, "none") if that is what you want'
            )
        for group in self.param_groups:
            self._check_parameters(group, bool(group["plan"]))

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        placement: Placement | Plan = "full",
        *,
        rules: Sequence[Rule] = (),
        **settings: Any,
    ) -> Self:
        """Return the optimizer of a model whose matrices carry multipliers.

        `placement` and `rules` are those of `lrm.plan`, or a plan itself; `settings` are the
        constructor's: `lr`, `weight_decay`, `multiplier_lr_scale`, `max_grad_norm`, ...
        """
        return cls(param_groups(model, plan_for(model, placement, rules)), **settings)

    @property
    def plan(self) -> Plan:
        """What every parameter is and carries."""
        assert self._plan is not None
        return self._plan

    # -- for subclasses -----------------------------------------------------------------------

    def _moment_names(self, matrix: Matrix | None) -> tuple[str, ...]:
        """Return the names in the state of what is averaged beside a raw weight."""
        return ("exp_avg", "exp_avg_sq")

    def _update_(
        self, bound: Binding, active: ParameterSet, hyper: Any, clip: Tensor, go: Tensor
    ) -> None:
        """Update raw weights that have gradients, write effective ones; nothing where `go` is 0."""
        bound.kernels.adamw_(active, hyper, clip, go)

    def raw_lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        """Return the learning rate of a raw weight."""
        return float(group["lr"]) * group["lr_scale"]

    def adamw_settings(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """Return beta1, beta2 and eps of the AdamW side."""
        return (*group["betas"], group["eps"])

    def _check_settings(self, group: dict[str, Any]) -> None:
        """Raise a ValueError for settings of a group that no step can be taken with."""
        check_settings(group, *self.adamw_settings(group))

    def moments_of(self, state: ParameterState) -> dict[str, Tensor]:
        """Return what is averaged beside a raw weight, by name; DTensors where it is sharded."""
        kept = self.state[state.parameter]
        return {name: kept[name] for name in state.moment_names}

    # -- a step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; gradients that are not finite leave everything as it is.

        The norm that was clipped is `grad_norm` afterwards.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Inside a compiled training step this part runs as it is.
        without_compiler: Callable[[], None] = torch.compiler.disable(self._step)  # pyright: ignore[reportAssignmentType]
        try:
            without_compiler()
        finally:
            self.found_inf = None
            if self._binding is not None:
                self._binding.release_gradients()
        return loss

    def _step(self) -> None:
        self._tell_of_unfrozen()
        bound = self._current()
        bound.guard.raise_pending()
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise _bad_norm(self.max_grad_norm)
        bound.check_replaced()
        for packed in bound.packed.values():
            packed.write_factors_()
        active = bound.collect_gradients()
        if not active:
            return
        # The long pass over all gradients first: a GPU is busy with it while the host goes on.
        grads, norm, finite = bound.gradients(active, self.clip_multipliers)
        if self.found_inf is not None:
            finite = finite & (self.found_inf == 0)
        touched = bound.guard.check()
        bound.set_rates([self._rates(state) for state in bound.classes])
        self.grad_norm = norm
        go = finite & ~touched.any() if touched.numel() else finite
        still = all(float(group["lr"]) == 0 for group in self.param_groups)
        # Checkpointing tools take a step without rate and gradient to see the state, maybe on one
        # rank alone; it must leave no trace.
        if self._copies is not None and (self._has_stepped or not still or bool(norm)):
            finite, go = self._copies.agree(finite, go, bound.states)
        if still:
            go = go & (norm != 0)
        else:
            self._has_stepped = True
        assert self._skipped is not None
        self._skipped.count_(finite)
        if bound.kernels.decides_on_host and not bool(go):
            return
        moved = bound.has_gradient(active)
        bound.steps += moved * go
        clip = clip_factor(norm, self.max_grad_norm)
        go = go.to(torch.int32)
        hyper, multiplier_hyper = bound.kernels.tabulate(bound.rates, bound.class_of, bound.steps)
        for dtype, packed in bound.packed.items():
            state = (packed.values, packed.exp_avg, packed.exp_avg_sq)
            owner, trained = packed.owner, packed.trained
            bound.kernels.multipliers_(
                state, grads[dtype], owner, trained, moved, multiplier_hyper, clip, go
            )
            packed.write_factors_(following=True)
        trained, fixed = bound.split_fixed(active)
        self._update_(bound, trained, hyper, clip, go)
        for state in fixed:
            weight = effective_of(state).to(state.weight.dtype)
            state.weight.copy_(torch.where(go != 0, weight, state.weight))
        if bound.kernels.decides_on_host:
            # Triton's writes do not change a tensor's version; torch's do.
            bound.guard.remember(active)

    def _tell_of_unfrozen(self) -> None:
        """Warn once of parameters that were frozen when the optimizer was made, and are no more."""
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            self._frozen = []
            more = f" and {len(unfrozen) - 1} more" if len(unfrozen) > 1 else ""
            warnings.warn(
                f"{unfrozen[0]}{more} was frozen when the optimizer was made and requires a "
                "gradient now, but no optimizer trains it: make the optimizer again",
                stacklevel=4,
            )

    @property
    def num_skipped(self) -> int:
        """How many steps were left out because a gradient was not finite."""
        return 0 if self._skipped is None else int(self._skipped.total)

    @property
    def skipped_last(self) -> Tensor | None:
        """Whether the last step was left out, on the device; None before the first."""
        return None if self._skipped is None else self._skipped.last

    def _rates(self, state: ParameterState) -> tuple[float, ...]:
        """Return a parameter's hyper-parameters in the order of `kernels.tabulate`."""
        group = state.group
        # Schedulers and users write to groups at any time.
        self._check_settings(group)
        return (
            self.raw_lr(group, state.matrix),
            float(group.get("weight_decay", 0.0)),
            float(group["lr"]) * group["multiplier_lr_scale"],
            group["multiplier_weight_decay"],
            *self.adamw_settings(group),
        )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, clip_multipliers: bool | None = None) -> Tensor:
        """Scale all gradients so that their clip norm is at most `max_norm`; return it.

        `clip_multipliers` is the optimizer's own unless given.
        """
        bound = self._current()
        for packed in bound.packed.values():
            packed.write_factors_()
        active = bound.collect_gradients()
        if not active:
            return torch.zeros(())
        counted = self.clip_multipliers if clip_multipliers is None else clip_multipliers
        _, norm, _ = bound.gradients(active, counted)
        clip = clip_factor(norm, max_norm)
        for state in active:
            grad = state.parameter.grad
            assert grad is not None
            local(grad).mul_(clip.to(grad.dtype))
        bound.release_gradients()
        return norm

    # -- state --------------------------------------------------------------------------------

    def parameter_states(self) -> tuple[ParameterState, ...]:
        """Return every parameter with the tensors kept for it: for modules of this library.

        To be read; `rewriting` is for changes.
        """
        return self._bound().states.states

    @contextmanager
    def rewriting(self, names: Collection[str]) -> Iterator[list[ParameterState]]:
        """Let raw weights and multipliers of some parameters be changed; their weights follow."""
        with torch.no_grad():
            bound = self._current()
            states = [state for state in bound.states if state.name in names]
            # What something else wrote to these weights would be lost without a word.
            bound.guard.check_weights(states)
            yield states
            bound.write_factors_()
            for state in states:
                if state.owns_raw:
                    write_effective(state)
            bound.guard.remember(states)

    def _current(self) -> Binding:
        """Return the binding, made again where parameters, their storage or the state changed."""
        self = unwrap(self)
        bound = self._bound()
        moved = bound.guard.moved()
        if self._has_stepped:
            # Moved is fine, changed is not; a state that was loaded must fit in every number.
            bound.guard.check_weights(bound.states if self._has_loaded else moved)
            self._has_loaded = False
        if moved or not bound.is_of(self.param_groups, self.state):
            self._binding = None
            bound = self._bound()
        if not self._has_stepped:
            # Weights may be loaded or initialized until training starts.
            bound.write_factors_()
            same = [not _differs(state) for state in bound.states]
            # A shard may be the same where those of other ranks are not.
            same = all_agree(bound.process_group, same, bound.device)
            self._follow_model_([s for s, kept in zip(bound.states, same, strict=True) if not kept])
        return bound

    def _bound(self) -> Binding:
        """Return the binding, made from parameter groups and state at its first use."""
        self = unwrap(self)
        if self._binding is None:
            with torch.no_grad():
                self._bind()
        assert self._binding is not None
        return self._binding

    def _bind(self) -> None:
        self._drop_replaced()
        states: list[ParameterState] = []
        matrices = self._matrices()
        for group in self.param_groups:
            fixed = group.get("train") == "multipliers"
            names = group.get("param_names") or [
                f"parameter {i}" for i in range(len(group["params"]))
            ]
            for parameter, name in zip(group["params"], names, strict=True):
                matrix = matrices.get(name)
                if matrix is not None and tuple(parameter.shape) != matrix.shape:
                    raise wrong_shape(name, tuple(parameter.shape), matrix.shape)
                states.append(
                    ParameterState(
                        index=len(states),
                        parameter=parameter,
                        name=name,
                        group=group,
                        matrix=matrix,
                        moment_names=() if fixed else self._moment_names(matrix),
                        sharded=is_sharded(parameter),
                        weight=local(parameter.detach()),
                    )
                )
        bound = Binding(states, self.state, self.backend, self._process_groups, self._model)
        if self._process_group is not None and bound.process_group is not None:
            raise ValueError(
                "process_group is for parameters that are not sharded; sharded ones tell which "
                "ranks share them, so leave it out"
            )
        if self._copies is None:
            self._copies = copies_among(self._process_group or self._ddp_group)
        if self._skipped is None:
            self._skipped = SkippedSteps(bound.device)
        self._binding = bound

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as torch's optimizers do."""
        self._drop_replaced()
        return super().state_dict()

    def _drop_replaced(self) -> None:
        """Drop the state of parameters that a framework has put others in the place of."""
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        for parameter in [p for p in self.state if p not in held]:
            del self.state[parameter]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, from_plan: Plan | None = None) -> None:
        """Load state at the precision it was saved in; torch alone would round it to bfloat16.

        The model's parameters are expected to hold the weights of the same moment. A state from
        another plan is converted where `from_plan` names it. A state of `torch.optim.AdamW` is
        adopted by ours: moments and step counts are kept, multipliers start at 1, and the groups
        keep their own settings. Anything else is refused before something has changed.
        """
        seen: dict[str, Any] = {}

        # Registered last, it sees what hooks of others have made of the state.
        def look(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            seen.update(self._readable(given, from_plan))
            return seen

        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        ids = [i for group in seen["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved, parameter in zip(ids, parameters, strict=True):
            if saved in seen["state"]:
                device = local(parameter).device
                self.state[parameter] = {
                    key: value.detach().clone().to(device) if isinstance(value, Tensor) else value
                    for key, value in seen["state"][saved].items()
                }
        self._binding = None
        self._has_stepped = any(bool(kept.get("step", 0)) for kept in seen["state"].values())
        self._has_loaded = True

    def _readable(self, saved: dict[str, Any], from_plan: Plan | None) -> dict[str, Any]:
        """Return a saved state as one of this plan; raise where it cannot be."""
        groups, matrices = self.param_groups, self._matrices()
        if not _loading.saved_by_us(saved):
            saved = _loading.adopted(groups, saved, self.plan)
        else:
            _loading.check_format(saved)
            if from_plan is not None:
                saved = _loading.converted(groups, saved, matrices, from_plan)
            _loading.check_plan(groups, saved, matrices)
        expected = {
            # The mean square is estimated again where a state has none.
            key: (name, [n for n in self._moment_names(matrices.get(name)) if n != MEAN_SQUARE])
            for group, other in zip(groups, saved["param_groups"], strict=False)
            if group.get("train") != "multipliers"
            for name, key in zip(group.get("param_names", ()), other["params"], strict=False)
        }
        _loading.check_moments(expected, saved)
        return saved

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._binding = self._model = None
        self._frozen = []
        # Process groups cannot be copied; a copy makes its own.
        self._process_groups = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at the next step."""
        group = dict(param_group)
        plan, frozen = group.pop("plan", None), group.pop("frozen", ())
        self._model = group.pop("model", self._model)
        ddp = group.pop("ddp", None)
        self._ddp_group = self._ddp_group if ddp is None else ddp().process_group
        super().add_param_group(group)
        try:
            self._check_settings(group)
            self._check_parameters(group, plan is not None)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if plan is not None:
            self._plan = plan if self._plan is None else joined_plan(self._plan, plan)
            matrices = self._matrices()
            names = [name for name in group["param_names"] if name in matrices]
            group["plan"] = _loading.fingerprint({name: matrices[name] for name in names})
        held = {id(p) for group in self.param_groups for p in group["params"]}
        self._frozen = [(n, p) for n, p in {**dict(self._frozen), **dict(frozen)}.items()]
        self._frozen = [(name, p) for name, p in self._frozen if id(p) not in held]
        self._binding = None

    def _check_parameters(self, group: dict[str, Any], has_plan: bool) -> None:
        others = [other for other in self.param_groups if other is not group]
        # The first groups are looked at again once it is known whether any has a plan.
        check_parameters(group, others, has_plan or self._plan is None)

    def _matrices(self) -> dict[str, Matrix]:
        """Return what the plan says of each matrix, by name."""
        return {entry.name: entry.matrix for entry in self.plan.entries if entry.matrix}

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} (", f"  {self.plan.summary}"]
        for index, group in enumerate(self.param_groups):
            hidden = ("params", "param_names", "plan", "format")
            settings = ", ".join(f"{k}={v}" for k, v in group.items() if k not in hidden)
            lines += [f"  group {index}: {len(group['params'])} parameters, {settings}"]
        return "\n".join([*lines, ")"])

    # -- the model's weights ------------------------------------------------------------------

    @torch.no_grad()
    def sync_from_model_(self) -> None:
        """Take the model's weights as they are now: raw weights follow, multipliers stay.

        Where a multiplier is near zero no raw weight can follow; the multipliers of such a matrix
        start at 1. Moments are kept.
        """
        self = unwrap(self)
        self._binding = None
        self._follow_model_(self._bound().states)

    def _follow_model_(self, states: Sequence[ParameterState] | ParameterSet) -> None:
        bound = self._bound()
        # Ranks share columns, so where one of them has a row near zero all start again.
        # Before the first step they are the initial values, which may be as small as asked for.
        least = _SMALLEST_FACTOR if self._has_stepped else torch.finfo(torch.float32).tiny
        flags = [_is_divisible(state, least) for state in states]
        divisible = all_agree(bound.process_group, flags, bound.device)
        for state, can_follow in zip(states, divisible, strict=True):
            if state.matrix is not None and not can_follow:
                for name in state.matrix.value_shapes():
                    state.multipliers[name].fill_(0.0 if state.matrix.scale == "log" else 1.0)
        bound.write_factors_()
        for state in states:
            if state.owns_raw:
                write_raw(state)
                write_effective(state)
        bound.guard.remember(states)

    @torch.no_grad()
    def multipliers(self) -> dict[str, dict[str, Tensor]]:
        """Return the multipliers by parameter name, full tensors."""
        found = {}
        for state in self.parameter_states():
            if state.matrix is None or not state.carries:
                continue
            kept = self.state[state.parameter]
            found[state.name] = {
                name: multiplier(state.matrix, full(kept[name]).detach().clone())
                for name in NAMES
                if name in kept
            }
        return found

    @torch.no_grad()
    def raw_weights(self) -> dict[str, Tensor]:
        """Return the raw weights by parameter name, full tensors; not copies where not sharded."""
        return {
            state.name: full(self.state[state.parameter].get("raw", state.parameter.detach()))
            for state in self.parameter_states()
        }


def unwrap(optimizer: Any) -> MultiplierOptimizer:
    """Return the optimizer of this library inside what a framework has put around it."""
    found = innermost(optimizer)
    if not isinstance(found, MultiplierOptimizer):
        raise TypeError(
            f"expected an optimizer of this library, got {type(optimizer).__name__}; make one "
            "with lrm.AdamW.from_model(model), or wrap it: lrm.LearnableMultipliers(optimizer, "
            "model, plan)"
        )
    return found


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside what a framework has put around it, whichever it is.

    Accelerate, Lightning, Fabric and schedulers hold it as `optimizer`, torchtitan's container in
    a list `optimizers`.
    """
    found = optimizer
    # What Lightning and Fabric put around an optimizer passes for one of its class.
    while not isinstance(found, MultiplierOptimizer) or hasattr(found, "optimizer"):
        several = getattr(found, "optimizers", None)
        if isinstance(several, Sequence) and len(several) > 1:
            raise ValueError(
                f"{type(found).__name__} holds {len(several)} optimizers, one for each part of the "
                "model: give one of them"
            )
        inner = several[0] if isinstance(several, Sequence) and several else None
        inner = getattr(found, "optimizer", None) if inner is None else inner
        if inner is None or inner is found:
            break
        found = inner
    return found


def _bad_norm(value: float) -> ValueError:
    return ValueError(f"max_grad_norm must be positive or None, got {value}")


def _is_divisible(state: ParameterState, least: float) -> bool:
    """Return whether no factor of a parameter is below `least`, so that its raw weight follows."""
    return state.factors is None or all(
        bool((factor.abs() >= least).all()) for factor in state.factors
    )


def _differs(state: ParameterState) -> bool:
    """Return whether a weight is another one than its raw weight and multipliers make."""
    if not state.owns_raw:
        return False
    weight = local(state.parameter.detach())
    return not torch.equal(effective_of(state).to(weight.dtype), weight)
