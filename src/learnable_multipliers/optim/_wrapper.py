"""Wrap any torch optimizer: it trains the raw weights, AdamW the multipliers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._placement import Placement
from learnable_multipliers._plan import Plan
from learnable_multipliers._rules import Rule
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._parameter import (
    ParameterSet,
    ParameterState,
    raw_gradient,
    write_effective_,
)
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._binding import Binding
from learnable_multipliers.optim._groups import MULTIPLIER_WEIGHT_DECAY, plan_for
from learnable_multipliers.optim._loading import check_saved_format, is_ours
from learnable_multipliers.optim._sharding import dtensor_like
from learnable_multipliers.optim._wrapped_groups import (
    check_can_be_wrapped,
    plain_groups,
    planned_groups,
)
from learnable_multipliers.optim._wrapped_rates import (
    DerivedScales,
    default_multiplier_lr_scale,
    update_size_is_lr,
)
from learnable_multipliers.optim._wrapped_settings import MirroredSettings
from learnable_multipliers.optim._wrapped_state import (
    InnerState,
    check_wrapped_class,
    check_wrapped_entries,
    check_wrapped_shapes,
    split_state,
)
from learnable_multipliers.optim._wrapped_step import check_caller, step_and_check


class LearnableMultipliers(MultiplierOptimizer):
    """Any torch optimizer for the raw weights, with AdamW for their multipliers.

    The wrapped optimizer keeps its parameter groups and settings; schedulers and training loops use
    this object in its place, for `zero_grad` too. Wrap an optimizer before its first step.

    Args:
        optimizer: A torch optimizer of parameters of `model`.
        multiplier_lr_scale: Multipliers train at `lr * multiplier_lr_scale`, so that schedulers
            move them too. None means 1 around Adam, AdamW, NAdam, RAdam, Adamax, RMSprop and Lion,
            whose learning rate is the size of an update, as AdamW's is. Around any other optimizer
            it is 1e-3 over the rate that a group is meant to reach, so that its multipliers reach
            1e-3: the rate of SGD or Adadelta is in other units, and far too high for AdamW. The
            group's rate is read at the first step: `max_lr` or `initial_lr` if a scheduler has set
            it in the group, else the larger of the constructor's and the present one.
        multiplier_betas: Betas of the multipliers' AdamW; `multiplier_eps` is its eps. The other
            settings are those of `lrm.AdamW`.
    """

    _settings = (
        *MultiplierOptimizer._settings,
        *("inner", "_inner_state", "_adamw", "_mirrored", "_derived"),
    )
    _has_moved = False
    """Whether a step has moved weights; until then, values are compared for writes elsewhere."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        plan: Plan,
        *,
        multiplier_betas: tuple[float, float] = (0.9, 0.95),
        multiplier_eps: float = 1e-8,
        multiplier_lr_scale: float | None = None,
        multiplier_weight_decay: float = MULTIPLIER_WEIGHT_DECAY,
        max_grad_norm: float | None = None,
        clip_multipliers: bool = False,
        backend: Backend = "auto",
        process_group: Any = None,
    ):
        if isinstance(optimizer, MultiplierOptimizer):
            raise ValueError(
                f"lrm.{type(optimizer).__name__} trains multipliers already; wrap an optimizer "
                "that does not, or use it as it is"
            )
        check_can_be_wrapped(optimizer)
        groups = planned_groups(optimizer, model, plan)
        if multiplier_lr_scale is None:
            for group in groups:
                group["multiplier_lr_scale"] = default_multiplier_lr_scale(optimizer, group)
        # None if the scale is given or 1.
        self._derived = None
        if multiplier_lr_scale is None and not update_size_is_lr(optimizer):
            self._derived = DerivedScales(groups)
        self.inner = optimizer
        self._inner_state = InnerState(optimizer)
        self._adamw = (*multiplier_betas, multiplier_eps)
        defaults = {
            "multiplier_lr_scale": multiplier_lr_scale,
            "multiplier_weight_decay": multiplier_weight_decay,
        }
        super().__init__(
            groups,
            defaults,
            max_grad_norm=max_grad_norm,
            clip_multipliers=clip_multipliers,
            backend=backend,
            process_group=process_group,
        )
        # Every group has its settings; schedulers look up their names here.
        self.defaults = {**optimizer.defaults, **self.defaults}
        self._mirrored = MirroredSettings(self.param_groups)
        for group in optimizer.param_groups:
            # Groups of `param_groups` carry these for our optimizers.
            for key in ("plan", "frozen", "model", "ddp_group"):
                group.pop(key, None)
        # Last, so that an error above leaves the optimizer usable by itself.
        optimizer.register_step_pre_hook(check_caller)

    # It takes one more argument, in front: the optimizer.
    @classmethod
    def from_model(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        optimizer: type[Optimizer],
        model: nn.Module,
        placement: Placement | Plan = "full",
        *,
        rules: Sequence[Rule] = (),
        **settings: Any,
    ) -> Self:
        """Return a wrapped torch optimizer for a model whose matrices carry multipliers.

        `settings` are the optimizer's (`lr`, `momentum`, ...) and the constructor's
        (`multiplier_lr_scale`, `max_grad_norm`, ...). Vectors train without decay.
        """
        if isinstance(optimizer, Optimizer):
            raise TypeError(
                f"from_model makes the optimizer: give it the class {type(optimizer).__name__}, or "
                "wrap this one by lrm.LearnableMultipliers(optimizer, model, plan)"
            )
        names = inspect.getfullargspec(cls.__init__).kwonlyargs
        own_settings = {name: settings.pop(name) for name in names if name in settings}
        plan = plan_for(model, placement, rules)
        groups = plain_groups(model, plan, settings.get("lr"))
        # The groups hold these settings now.
        entries = tuple(replace(e, lr_scale=1.0, weight_decay=None) for e in plan.entries)
        planned = replace(plan, entries=entries)
        return cls(optimizer(groups, **settings), model, planned, **own_settings)

    def adamw_settings(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """Return beta1, beta2 and eps of the multipliers."""
        return self._adamw

    def raw_lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        """Return the learning rate of a raw weight: the wrapped optimizer's."""
        return float(group["lr"])

    def _moment_names(self, matrix: Matrix | None) -> tuple[str, ...]:
        return ()

    def moments_of(self, state: ParameterState) -> dict[str, Tensor]:
        """Return the tensors that the wrapped optimizer keeps for a raw weight."""
        kept = self.inner.state.get(self._raw.get(state.index, state.parameter), {})
        return {name: value for name, value in kept.items() if isinstance(value, Tensor)}

    def _make_binding(self) -> Binding:
        binding = super()._make_binding()
        self._raw: dict[int, nn.Parameter] = {}
        states = iter(binding.states)
        for group in self.inner.param_groups:
            for place, held in enumerate(group["params"]):
                state = next(states)
                if state.owns_raw:
                    # A DTensor if the parameter is one: then the wrapped optimizer's state is one
                    # too, and an optimizer that needs whole matrices sees them.
                    raw = nn.Parameter(self.state[state.parameter]["raw"])
                    group["params"][place] = self._raw[state.index] = raw
                elif held is not state.parameter:
                    # A framework that shards or casts parameters has replaced it.
                    group["params"][place] = state.parameter
                new = group["params"][place]
                if held in self.inner.state and held is not new:
                    # State made for a 16-bit weight would stay 16-bit.
                    self.inner.state[new] = {
                        key: value.to(new.dtype) if _is_like(value, held) else value
                        for key, value in self.inner.state.pop(held).items()
                    }
        return binding

    def _step(self) -> None:
        self._mirrored.pull(self._group_pairs())
        if self._derived is not None:
            if not self._has_stepped:
                self._derived.update(self._group_pairs())
            self._derived.warn_if_high(self.param_groups, self.inner)
        super()._step()
        still = all(float(group["lr"]) == 0 for group in self.param_groups)
        if still and not self.inner.state and self.grad_norm is not None and not self.grad_norm:
            self._inner_state.materialize(self._group_pairs(), self._mirrored, self.state)

    def _update_(
        self, binding: Binding, active: ParameterSet, hyper: Any, clip: Tensor, go: Tensor
    ) -> None:
        # The wrapped optimizer steps on the host's word: it cannot read `go` on the device.
        if not bool(go):
            return
        self._inner_state.discard_placeholder()
        self._mirrored.push(self._group_pairs())
        for raw in self._raw.values():
            raw.grad = None
        kept = []
        for state in active:
            if state.owns_raw:
                grad = raw_gradient(state, clip)
                self._raw[state.index].grad = dtensor_like(grad, state.parameter)
            elif self.max_grad_norm is not None and state.grad is not None:
                kept.append((state.parameter, state.parameter.grad))
                grad = state.grad * clip.to(state.grad.dtype)
                state.parameter.grad = dtensor_like(grad, state.parameter)
        self._step_inner(active)
        for parameter, grad in kept:
            parameter.grad = grad
        for raw in self._raw.values():
            raw.grad = None
        self._mirrored.pull_all(self._group_pairs())
        self._inner_state.mirror(self._group_pairs(), self.state)
        for state in active:
            if state.owns_raw:
                write_effective_(state)
        binding.guard.remember(active)

    def _step_inner(self, active: ParameterSet) -> None:
        """Step the wrapped optimizer, and keep what it wrote in the tensors of the state."""
        owned = [state for state in active if state.owns_raw]
        step_and_check(self.inner, owned, compare_values=not self._has_moved)
        if not self._has_moved:
            moving = any(float(group["lr"]) != 0 for group in self.param_groups)
            self._has_moved = moving and bool(self.grad_norm)
        for state in active:
            held = self._raw.get(state.index, state.parameter)
            if not state.sharded and held.data_ptr() != state.raw.data_ptr():
                # The optimizer replaced the storage: `p.data = p.data - ...`.
                state.raw.copy_(held)
                held.data = state.raw

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the wrapped optimizer; none can be added once it is wrapped."""
        if hasattr(self, "_mirrored"):
            raise ValueError("add parameter groups to the optimizer before wrapping it")
        super().add_param_group(param_group)

    def _group_pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return each of our groups with the wrapped optimizer's."""
        return list(zip(self.param_groups, self.inner.param_groups, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return one state: ours, and the wrapped optimizer's under `inner.` names."""
        self._drop_replaced()
        self._mirrored.pull(self._group_pairs())
        if self.state and not self.inner.state and not self._has_stepped:
            # Our state was read before the first step. Checkpointing tools load only what they see
            # here, so the wrapped optimizer's state must be here, too.
            self._cached_binding()
            self._inner_state.materialize(self._group_pairs(), self._mirrored, self.state)
        return self._inner_state.merged(super().state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, from_plan: Plan | None = None) -> None:
        """Load both states; raise for one from another plan or of another optimizer."""
        if from_plan is not None:
            raise ValueError(
                "a wrapped optimizer's state cannot be converted to another plan: nothing is known "
                "of what it averages. Start with fresh optimizer state"
            )
        saved_groups = state_dict["param_groups"]
        if is_ours(state_dict):
            check_saved_format(state_dict)
            check_wrapped_class(saved_groups, self.inner)
        ours, theirs = split_state(state_dict["state"])
        if state_dict["state"]:
            self._cached_binding()
            if not self.inner.state:
                self._inner_state.materialize(self._group_pairs(), self._mirrored, self.state)
            stepped = {index: bool(state.get("step", 0)) for index, state in ours.items()}
            check_wrapped_entries(saved_groups, theirs, stepped, self.inner)
            check_wrapped_shapes(self.param_groups, self.state, state_dict, self.plan)
        super().load_state_dict({**state_dict, "state": ours})
        if state_dict["state"]:
            has_stepped = bool(self._cached_binding().steps.any())
            self._inner_state.load(theirs, saved_groups, has_stepped)
            self._inner_state.mirror(self._group_pairs(), self.state)
        else:
            # Create no state yet: a framework may still replace parameters.
            self.inner.state.clear()
        self._mirrored.push_all(self._group_pairs())


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.dtype == parameter.dtype
