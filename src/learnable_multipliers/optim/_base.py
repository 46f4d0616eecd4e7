"""What every optimizer with multipliers shares: state, clipping, the order of a step.

The parameter of the model is the effective weight. The optimizer owns the raw weight and the
multipliers; a step turns the gradient into theirs (eq. 4), clips, updates, and writes the
effective weight back. Raw weights are updated by AdamW; subclasses may do otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._placement import Placement
from learnable_multipliers._plan import Plan
from learnable_multipliers._rules import Rule, as_number
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._parameter import ParameterSet, ParameterState
from learnable_multipliers.kernels._reference import effective_of
from learnable_multipliers.optim import _loading
from learnable_multipliers.optim._binding import Binding
from learnable_multipliers.optim._clipping import clip_factor
from learnable_multipliers.optim._copies import Copies, copies_among
from learnable_multipliers.optim._groups import (
    MULTIPLIER_WEIGHT_DECAY,
    WEIGHT_DECAY,
    check_reached,
    param_groups,
    plan_for,
)
from learnable_multipliers.optim._owner import WeightOwner
from learnable_multipliers.optim._sharding import local
from learnable_multipliers.optim._skipping import SkippedSteps
from learnable_multipliers.optim._surroundings import undisturbed

_DEFAULTS = {
    "lr": 1e-3,
    "weight_decay": WEIGHT_DECAY,
    "multiplier_lr_scale": 1.0,
    "multiplier_weight_decay": MULTIPLIER_WEIGHT_DECAY,
}
"""Settings that parameter groups and the optimizer's arguments may both give."""


class MultiplierOptimizer(WeightOwner):
    """Base of the optimizers; not used by itself."""

    found_inf: Tensor | None = None
    """Set before `step` to skip it where this 0-d tensor is nonzero, as a bad gradient would: for
    a loss that is not finite. The same on all ranks, read on the device, cleared by the step."""
    _copies: Copies | None = None
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
        _check_norm("max_grad_norm", max_grad_norm)
        if isinstance(params, nn.Module | Plan):
            name = type(self).__name__
            what = "plan" if isinstance(params, Plan) else "model"
            raise TypeError(
                f"{name} was given a {what}: use lrm.{name}.from_model(model), which plans its "
                "multipliers, or from_model(model, plan)"
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
        ours = {"raw_lr_scale": 1.0, "kind": "", "plan": "", "format": _loading.FORMAT}
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

    def _bind(self) -> None:
        if self._copies is None:
            self._copies = copies_among(self._process_group or self._ddp_group)
        super()._bind()
        if self._skipped is None:
            self._skipped = SkippedSteps(self._bound().device)

    def _update_(
        self, bound: Binding, active: ParameterSet, hyper: Any, clip: Tensor, go: Tensor
    ) -> None:
        """Update raw weights that have gradients, write effective ones; nothing where `go` is 0."""
        bound.kernels.adamw_(active, hyper, clip, go)

    def raw_lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        """Return the learning rate of a raw weight."""
        return float(group["lr"]) * group["raw_lr_scale"]

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
        with undisturbed(bound.device):
            self._take_step(bound)

    def _take_step(self, bound: Binding) -> None:
        bound.guard.raise_pending()
        _check_norm("max_grad_norm", self.max_grad_norm)
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
            # A tensor that is written to would be the same one at the next step.
            float(group["multiplier_weight_decay"]),
            *map(float, self.adamw_settings(group)),
        )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, clip_multipliers: bool | None = None) -> Tensor:
        """Scale all gradients so that their clip norm is at most `max_norm`; return it.

        `clip_multipliers` is the optimizer's own unless given.
        """
        _check_norm("max_norm", max_norm)
        bound = self._current()
        for packed in bound.packed.values():
            packed.write_factors_()
        active = bound.collect_gradients()
        if not active:
            return torch.zeros(())
        counted = self.clip_multipliers if clip_multipliers is None else clip_multipliers
        with undisturbed(bound.device):
            _, norm, _ = bound.gradients(active, counted)
        clip = clip_factor(norm, max_norm)
        for state in active:
            grad = state.parameter.grad
            assert grad is not None
            local(grad).mul_(clip.to(grad.dtype))
        bound.release_gradients()
        return norm

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} (", f"  {self.plan.summary}"]
        for index, group in enumerate(self.param_groups):
            hidden = ("params", "param_names", "plan", "format")
            settings = ", ".join(f"{k}={v}" for k, v in group.items() if k not in hidden)
            lines += [f"  group {index}: {len(group['params'])} parameters, {settings}"]
        return "\n".join([*lines, ")"])


def _check_norm(name: str, value: float | None) -> None:
    if value is not None and not as_number(name, value) > 0:
        raise ValueError(f"{name} must be positive or None, got {value}")
