"""Base class that owns raw weights and multipliers: groups, state, saving, loading, resync.

`_base` adds the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._multiplier import MULTIPLIERS, Matrix, multiplier
from learnable_multipliers._plan import Plan
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._parameter import ParameterState, write_effective_
from learnable_multipliers.optim import _loading
from learnable_multipliers.optim._binding import MEAN_SQUARE, Binding
from learnable_multipliers.optim._group_checks import (
    check_group_has_names,
    check_group_parameters,
    check_group_settings,
    names_in,
)
from learnable_multipliers.optim._groups import joined_plan
from learnable_multipliers.optim._resync import find_changed, resync_raw_
from learnable_multipliers.optim._sharding import full, is_sharded, local
from learnable_multipliers.optim._torch_adamw_state import import_torch_adamw
from learnable_multipliers.optim._torch_defaults import torch_defaults
from learnable_multipliers.optim._unwrap import innermost
from learnable_multipliers.optim._write_guard import wrong_shape


class WeightOwner(Optimizer):
    """Base of the optimizers without the step."""

    backend: Backend
    _process_group: Any = None
    _ddp_group: Any = None
    """Process group of the DistributedDataParallel model that the parameters came from."""
    _binding: Binding | None = None
    _has_loaded = False
    _has_stepped: bool
    _models: tuple[Callable[[], nn.Module | None], ...] = ()
    """Weak references to the models that the parameters came from."""
    _plan: Plan | None
    _frozen: list[tuple[str, nn.Parameter]]
    _process_groups: dict[tuple[int, ...], Any]
    _settings: tuple[str, ...]
    """Attributes that a copy of the optimizer keeps; torch copies only its groups and state."""

    @property
    def plan(self) -> Plan:
        """The plan of the parameters."""
        assert self._plan is not None
        return self._plan

    def _moment_names(self, matrix: Matrix | None) -> tuple[str, ...]:
        """Return the names of a raw weight's moments in the state."""
        return ("exp_avg", "exp_avg_sq")

    def adamw_settings(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """Return beta1, beta2 and eps of AdamW."""
        beta1, beta2 = group["betas"]
        return beta1, beta2, group["eps"]

    def _check_group_settings(self, group: dict[str, Any]) -> None:
        """Raise a ValueError for settings of a group that a step cannot use."""
        check_group_settings(group, *self.adamw_settings(group))

    def moments_of(self, state: ParameterState) -> dict[str, Tensor]:
        """Return a raw weight's moments by name; DTensors if it is sharded."""
        kept = self.state[state.parameter]
        return {name: kept[name] for name in state.moment_names}

    def parameter_states(self) -> tuple[ParameterState, ...]:
        """Return every parameter with the tensors kept for it, for other modules of this library.

        Read-only: `rewriting` is for changes.
        """
        return self._cached_binding().states.states

    @contextmanager
    def rewriting(self, names: Collection[str]) -> Iterator[list[ParameterState]]:
        """Allow changes to raw weights and multipliers; write the weights from them on exit."""
        with torch.no_grad():
            binding = self._current_binding()
            states = [state for state in binding.states if state.name in names]
            # Raise first: an outside write would be overwritten silently.
            binding.guard.check_weights(states)
            yield states
            binding.write_factors_()
            for state in states:
                if state.owns_raw:
                    write_effective_(state)
            binding.guard.remember(states)

    def _current_binding(self) -> Binding:
        """Return the binding, made again if parameters, their storage or the state changed."""
        # Lightning's wrapper subclasses the optimizer: act on the wrapped one.
        self = innermost(self)
        binding = self._cached_binding()
        moved = binding.guard.moved()
        is_old = bool(moved) or not binding.is_current(self.param_groups, self.state)
        if self._has_stepped:
            # Moved storage is fine, changed values are not. After loading, compare every weight.
            suspects = [*moved, *binding.guard.written()] if is_old else []
            binding.guard.check_weights(binding.states if self._has_loaded else suspects)
            self._has_loaded = False
        if is_old:
            self._binding = None
            binding = self._cached_binding()
        if not self._has_stepped:
            # Weights may be loaded or initialized until training starts.
            resync_raw_(binding, find_changed(binding), False)
        return binding

    def _cached_binding(self) -> Binding:
        """Return the binding as it was last made; make it at its first use."""
        # Lightning's wrapper subclasses the optimizer: act on the wrapped one.
        self = innermost(self)
        if self._binding is None:
            # Ordinary tensors, even if first accessed under torch.inference_mode.
            with torch.inference_mode(False), torch.no_grad(), torch_defaults(torch.device("cpu")):
                self._binding = self._make_binding()
        return self._binding

    def _make_binding(self) -> Binding:
        """Return a new binding of the present parameters to the state."""
        self._drop_replaced()
        states: list[ParameterState] = []
        matrices = self._matrices()
        tied = {e.name: (e.name, *e.aliases) for e in self.plan.entries if e.aliases}
        for group in self.param_groups:
            fixed = group.get("train") == "multipliers"
            for parameter, named in zip(group["params"], names_in(group), strict=True):
                name = named or f"parameter {len(states)}"
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
                        tied_names=tied.get(name, ()),
                        weight=local(parameter.detach()),
                    )
                )
        binding = Binding(
            states,
            self.param_groups,
            self.state,
            self.backend,
            self._process_groups,
            self._models,
        )
        if self._process_group is not None and binding.process_group is not None:
            raise ValueError(
                "process_group is for parameters that are not sharded; the mesh of sharded ones "
                "says which ranks share them, so leave it out"
            )
        return binding

    @torch.no_grad()
    def sync_from_model_(self) -> None:
        """Adopt the model's weights as they are now: recompute raw weights, keep multipliers.

        Raw weights of unchanged weights stay, to the last bit. If a multiplier is near zero, no raw
        weight can be computed: the multipliers of that matrix restart at 1. Moments are kept.
        """
        # Lightning's wrapper subclasses the optimizer: act on the wrapped one.
        self = innermost(self)
        self._binding = None
        binding = self._cached_binding()
        resync_raw_(binding, find_changed(binding), self._has_stepped)
        binding.guard.remember(binding.states)

    @torch.no_grad()
    def multipliers(self) -> dict[str, dict[str, Tensor]]:
        """Return the multipliers by parameter name, full tensors."""
        by_name = {}
        for state in self.parameter_states():
            if state.matrix is None or not state.carries:
                continue
            kept = self.state[state.parameter]
            by_name[state.name] = {
                name: multiplier(state.matrix, full(kept[name]).detach().clone())
                for name in MULTIPLIERS
                if name in kept
            }
        return by_name

    @torch.no_grad()
    def raw_weights(self) -> dict[str, Tensor]:
        """Return the raw weights by parameter name, full tensors; no copies unless sharded."""
        return {
            state.name: full(self.state[state.parameter].get("raw", state.parameter.detach()))
            for state in self.parameter_states()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as torch's optimizers do."""
        self._drop_replaced()
        return super().state_dict()

    def _drop_replaced(self) -> None:
        """Drop the state of parameters that a framework has replaced."""
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        for parameter in [p for p in self.state if p not in held]:
            del self.state[parameter]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, from_plan: Plan | None = None) -> None:
        """Load state at the precision it was saved in; torch alone would round it to bfloat16.

        The model's parameters must hold the weights of the same step. A state of another plan is
        converted if `from_plan` is that plan. A state of `torch.optim.AdamW` is imported: moments
        and step counts are kept, multipliers start at 1, and the groups keep their own settings.
        Any other state raises an error before anything changes.
        """
        converted: dict[str, Any] = {}

        # Registered last, it gets the state after the hooks of others.
        def convert(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            converted.update(self._converted(given, from_plan))
            return converted

        # Before the hooks of others, which may change the loaded state.
        def restore(_: Optimizer) -> None:
            self._restore(converted)

        convert_hook = self.register_load_state_dict_pre_hook(convert)
        restore_hook = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            convert_hook.remove()
            restore_hook.remove()

    def _restore(self, saved: dict[str, Any]) -> None:
        """Set the state to the saved one, which torch has cast to the parameters' dtype."""
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, parameter in zip(ids, parameters, strict=True):
            if index in saved["state"]:
                device = local(parameter).device
                self.state[parameter] = {
                    key: value.detach().clone().to(device) if isinstance(value, Tensor) else value
                    for key, value in saved["state"][index].items()
                }
        self._binding = None
        self._has_stepped = any(bool(kept.get("step", 0)) for kept in saved["state"].values())
        self._has_loaded = True

    def _converted(self, saved: dict[str, Any], from_plan: Plan | None) -> dict[str, Any]:
        """Return a saved state as one of this plan; raise if that is impossible."""
        groups, matrices = self.param_groups, self._matrices()
        # Raw weights that the saved run did not train have no moments yet.
        started = _loading.untrained(from_plan) if from_plan is not None else set()
        if not _loading.is_ours(saved):
            saved = import_torch_adamw(groups, saved, self.plan)
            _loading.check_saved_shapes(groups, saved, self.plan)
        else:
            _loading.check_saved_format(saved)
            _loading.check_saved_shapes(groups, saved, self.plan)
            if from_plan is not None:
                saved = _loading.convert_plan(groups, saved, matrices, from_plan)
            _loading.check_saved_plan(groups, saved, matrices)
        expected = {
            # The mean square is estimated again where a state has none.
            key: (name, [n for n in self._moment_names(matrices.get(name)) if n != MEAN_SQUARE])
            for group, other in zip(groups, saved["param_groups"], strict=False)
            if group.get("train") != "multipliers"
            for name, key in zip(group.get("param_names", ()), other["params"], strict=False)
            if name not in started
        }
        _loading.check_saved_moments(expected, saved)
        return saved

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._binding, self._models = None, ()
        self._frozen = []
        # The weights of a copy may be written to before it is trained.
        self._has_loaded = True
        # Process groups cannot be copied; a copy makes its own.
        self._process_groups = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at the next step."""
        group = dict(param_group)
        plan, frozen = group.pop("plan", None), group.pop("frozen", ())
        model, ddp_group = group.pop("model", None), group.pop("ddp_group", None)
        if self._plan is not None:
            # torch's own error does not mention plans.
            check_group_has_names(group)
        super().add_param_group(group)
        try:
            self._check_group_settings(group)
            self._check_group_parameters(group, plan is not None)
            joined = joined_plan(self._plan or plan, plan) if plan is not None else self._plan
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if model is not None and model not in self._models:
            self._models = (*self._models, model)
        if ddp_group is not None:
            self._ddp_group = ddp_group
        self._plan = joined
        if plan is not None:
            matrices = self._matrices()
            names = [name for name in group["param_names"] if name in matrices]
            group["plan"] = _loading.fingerprint({name: matrices[name] for name in names})
        held = {id(p) for group in self.param_groups for p in group["params"]}
        self._frozen = [(n, p) for n, p in {**dict(self._frozen), **dict(frozen)}.items()]
        self._frozen = [(name, p) for name, p in self._frozen if id(p) not in held]

    def _check_group_parameters(self, group: dict[str, Any], has_plan: bool) -> None:
        others = [other for other in self.param_groups if other is not group]
        # The first groups are checked again once it is known whether any has a plan.
        check_group_parameters(group, others, has_plan or self._plan is None)

    def _matrices(self) -> dict[str, Matrix]:
        """Return the plan's matrices by name."""
        return {entry.name: entry.matrix for entry in self.plan.entries if entry.matrix}
