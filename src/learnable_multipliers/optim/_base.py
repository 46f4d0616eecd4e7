"""Base class of optimizers with multipliers: clipping, and the order of a step.

The parameter of the model is the effective weight. The optimizer owns the raw weight and the
multipliers; a step splits the gradient into theirs (eq. 4), clips, updates, and writes the
effective weight back. AdamW updates the raw weights unless a subclass overrides that.
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
from learnable_multipliers.kernels._parameter import (
    ParameterSet,
    ParameterState,
    Rates,
    effective_weight,
)
from learnable_multipliers.optim import _loading
from learnable_multipliers.optim._binding import Binding
from learnable_multipliers.optim._group_checks import check_has_effect
from learnable_multipliers.optim._groups import (
    MULTIPLIER_WEIGHT_DECAY,
    WEIGHT_DECAY,
    param_groups,
    plan_for,
)
from learnable_multipliers.optim._owner import WeightOwner
from learnable_multipliers.optim._replicas import Replicas, replicas_among
from learnable_multipliers.optim._sharding import local
from learnable_multipliers.optim._skipping import SkippedSteps
from learnable_multipliers.optim._torch_defaults import torch_defaults

_DEFAULTS = {
    "lr": 1e-3,
    "weight_decay": WEIGHT_DECAY,
    "multiplier_lr_scale": 1.0,
    "multiplier_weight_decay": MULTIPLIER_WEIGHT_DECAY,
}
"""Defaults of settings that both parameter groups and the optimizer's arguments may give."""
_NORM_FLOOR = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


class MultiplierOptimizer(WeightOwner):
    """Abstract base class of the optimizers."""

    found_inf: Tensor | None = None
    """A 0-d tensor that skips the next step if it is nonzero, for a loss that is not finite.

    It must be the same on all ranks. The device reads it, and the step clears it."""
    _replicas: Replicas | None = None
    _settings: tuple[str, ...] = (
        "_plan",
        "max_grad_norm",
        "clip_multipliers",
        "backend",
        "grad_norm",
        "_skipped",
        "_has_stepped",
    )

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
            check_has_effect(name, given[name], groups)
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
            self._check_group_parameters(group, bool(group["plan"]))

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

    def _make_binding(self) -> Binding:
        if self._replicas is None:
            self._replicas = replicas_among(self._process_group or self._ddp_group)
        binding = super()._make_binding()
        if self._skipped is None:
            self._skipped = SkippedSteps(binding.device)
        return binding

    def _update_(
        self, binding: Binding, active: ParameterSet, hyper: Any, clip: Tensor, go: Tensor
    ) -> None:
        """Update raw weights with gradients, write effective weights; do nothing if `go` is 0."""
        binding.kernels.adamw_(active, hyper, clip, go)

    def raw_lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        """Return the learning rate of a raw weight."""
        return float(group["lr"]) * group["raw_lr_scale"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; skip it if a gradient is not finite.

        Afterwards `grad_norm` is the norm before clipping.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A compiled training step runs this uncompiled.
        without_compiler: Callable[[], None] = torch.compiler.disable(self._step)  # pyright: ignore[reportAssignmentType]
        try:
            without_compiler()
        finally:
            self.found_inf = None
            if self._binding is not None:
                self._binding.release_gradients()
        return loss

    def _step(self) -> None:
        self._warn_unfrozen()
        binding = self._current_binding()
        with torch_defaults(binding.device):
            self._take_step(binding)

    def _take_step(self, binding: Binding) -> None:
        binding.guard.raise_pending()
        _check_norm("max_grad_norm", self.max_grad_norm)
        binding.check_replaced()
        for packed in binding.packed.values():
            packed.write_factors_()
        active = binding.collect_gradients()
        if not active:
            return
        # The long pass over all gradients first: the host works on while the GPU runs it.
        grads, norm, finite = binding.gradients(active, self.clip_multipliers)
        if self.found_inf is not None:
            finite = finite & (self.found_inf == 0)
        touched = binding.guard.check()
        binding.set_rates([self._rates(state) for state in binding.classes])
        self.grad_norm = norm
        go = finite & ~touched.any() if touched.numel() else finite
        still = all(float(group["lr"]) == 0 for group in self.param_groups)
        # Checkpointing tools take a step at rate 0 with zero gradients to create state, perhaps on
        # one rank only; it must change nothing.
        if self._replicas is not None and (self._has_stepped or not still or bool(norm)):
            finite, go = self._replicas.agree(finite, go, binding.states)
        if still:
            go = go & (norm != 0)
        else:
            self._has_stepped = True
        assert self._skipped is not None
        self._skipped.count_(finite)
        if binding.kernels.decides_on_host and not bool(go):
            return
        moved = binding.has_gradient(active)
        binding.steps += moved * go
        clip = _clip_factor(norm, self.max_grad_norm)
        go = go.to(torch.int32)
        hyper, multiplier_hyper = binding.kernels.tabulate(
            binding.rates, binding.class_of, binding.steps
        )
        for dtype, packed in binding.packed.items():
            state = (packed.values, packed.exp_avg, packed.exp_avg_sq)
            owner, trained = packed.owner, packed.trained
            binding.kernels.multipliers_(
                state, grads[dtype], owner, trained, moved, multiplier_hyper, clip, go
            )
            packed.write_factors_(following=True)
        self._update_(binding, active.trained, hyper, clip, go)
        for state in active.fixed:
            weight = effective_weight(state).to(state.weight.dtype)
            state.weight.copy_(torch.where(go != 0, weight, state.weight))
        if binding.kernels.decides_on_host:
            # Triton's writes do not change a tensor's version; torch's do.
            binding.guard.remember(active)

    def _warn_unfrozen(self) -> None:
        """Warn once about parameters unfrozen since the optimizer was made."""
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            self._frozen = []
            more = f" (and {len(unfrozen) - 1} more)" if len(unfrozen) > 1 else ""
            warnings.warn(
                f"{unfrozen[0]}{more} was frozen when the optimizer was made and requires a "
                "gradient now: this optimizer does not train it. If no other one does, make the "
                "optimizer again",
                stacklevel=4,
            )

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped because a gradient was not finite."""
        return 0 if self._skipped is None else int(self._skipped.total)

    @property
    def skipped_last(self) -> Tensor | None:
        """Whether the last step was skipped, on the device; None before the first step."""
        return None if self._skipped is None else self._skipped.last

    def _rates(self, state: ParameterState) -> Rates:
        """Return a parameter's hyper-parameters."""
        group = state.group
        # Schedulers and users may write to groups at any time.
        self._check_group_settings(group)
        return Rates(
            self.raw_lr(group, state.matrix),
            float(group.get("weight_decay", 0.0)),
            float(group["lr"]) * group["multiplier_lr_scale"],
            # A float: a tensor that is written to in place would compare equal at the next step.
            float(group["multiplier_weight_decay"]),
            *map(float, self.adamw_settings(group)),
        )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, clip_multipliers: bool | None = None) -> Tensor:
        """Scale all gradients so that their clip norm is at most `max_norm`; return it.

        `clip_multipliers` overrides the optimizer's setting.
        """
        _check_norm("max_norm", max_norm)
        binding = self._current_binding()
        for packed in binding.packed.values():
            packed.write_factors_()
        active = binding.collect_gradients()
        if not active:
            return torch.zeros(())
        counted = self.clip_multipliers if clip_multipliers is None else clip_multipliers
        with torch_defaults(binding.device):
            _, norm, _ = binding.gradients(active, counted)
        clip = _clip_factor(norm, max_norm)
        for state in active:
            grad = state.parameter.grad
            assert grad is not None
            local(grad).mul_(clip.to(grad.dtype))
        binding.release_gradients()
        return norm

    def _summary(self) -> list[str]:
        """Return lines that say what is trained, for printing."""
        return [self.plan.summary]

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} (", *(f"  {line}" for line in self._summary())]
        for index, group in enumerate(self.param_groups):
            hidden = ("params", "param_names", "plan", "format")
            settings = ", ".join(f"{k}={v}" for k, v in group.items() if k not in hidden)
            lines += [f"  group {index}: {len(group['params'])} parameters, {settings}"]
        return "\n".join([*lines, ")"])


def _clip_factor(norm: Tensor, max_norm: float | None) -> Tensor:
    """Return the factor on all gradients that makes their norm at most `max_norm`."""
    if max_norm is None:
        return torch.ones_like(norm)
    return (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)


def check_fused_and_foreach(fused: bool | None, foreach: bool | None) -> None:
    """Raise if both arguments are True; apart from that they have no effect."""
    if fused and foreach:
        raise ValueError("fused and foreach cannot both be True, here as in torch.optim.AdamW")


def _check_norm(name: str, value: float | None) -> None:
    if value is not None and not as_number(name, value) > 0:
        raise ValueError(f"{name} must be positive or None, got {value}")
