"""What every optimizer with multipliers shares: state, clipping, the order of a step.

The parameter of the model is the effective weight. The optimizer owns the raw weight and the
multipliers; a step turns the gradient into theirs (eq. 4), clips, updates, and writes the
effective weight back. Raw weights are updated by AdamW; subclasses may do otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._multiplier import Matrix, multiplier
from learnable_multipliers._plan import matrix_from
from learnable_multipliers._reparametrize import explicit_multipliers
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._parameter import ParameterSet, ParameterState
from learnable_multipliers.kernels._reference import write_effective, write_raw
from learnable_multipliers.optim._binding import Binding
from learnable_multipliers.optim._clipping import clip_factor
from learnable_multipliers.optim._packed_multipliers import NAMES
from learnable_multipliers.optim._sharding import all_agree, full, is_sharded, local

_FORMAT = 1
"""Of the optimizer's state; every parameter group carries it, so that all checkpoints do."""


class MultiplierOptimizer(Optimizer):
    """Base of the optimizers; not used by itself."""

    found_inf: Tensor | None = None
    """Set before `step` to skip it where this 0-d tensor is nonzero, as a bad gradient would: for
    a loss that is not finite. The same on all ranks, read on the device, cleared by the step."""
    _binding: Binding | None = None
    _settings: tuple[str, ...] = ("max_grad_norm", "backend", "grad_norm", "_skipped")
    """Attributes that a copy of the optimizer keeps; torch's own copies its groups alone."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None,
        backend: Backend,
    ):
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive or None, got {max_grad_norm}")
        for name in ("lr", "eps", "weight_decay", "multiplier_weight_decay", "multiplier_lr_scale"):
            value = defaults.get(name, 0)
            if isinstance(value, int | float | Tensor) and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self.max_grad_norm = max_grad_norm
        self.backend: Backend = backend
        self.grad_norm: Tensor | None = None
        self._skipped: Tensor | None = None
        self._process_groups: dict[tuple[int, ...], Any] = {}
        ours = {"lr_scale": 1.0, "matrices": "", "kind": "", "format": _FORMAT}
        super().__init__(params, {**ours, **defaults})

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

    def moments_of(self, state: ParameterState) -> dict[str, Tensor]:
        """Return what is averaged beside a raw weight, by name; DTensors where it is sharded."""
        kept = self.state[state.parameter]
        return {name: kept[name] for name in state.moment_names}

    # -- a step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; gradients that are not finite leave everything as it is."""
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
        bound = self._current()
        bound.guard.raise_pending()
        for packed in bound.packed.values():
            packed.write_factors_()
        active = bound.collect_gradients()
        if not active:
            return
        # The long pass over all gradients first: a GPU is busy with it while the host goes on.
        grads, norm, finite = bound.gradients(active)
        if self.found_inf is not None:
            finite = finite & (self.found_inf == 0)
        touched = bound.guard.check()
        self.grad_norm = norm
        go = finite & ~touched.any() if touched.numel() else finite
        if all(float(group["lr"]) == 0 for group in self.param_groups):
            # Checkpointing tools take a step without rate and gradient to see the state; it must
            # leave no trace.
            go = go & (norm != 0)
        assert self._skipped is not None
        self._skipped += ~finite
        if bound.kernels.decides_on_host and not bool(go):
            return
        moved = bound.has_gradient(active)
        bound.steps += moved * go
        clip = clip_factor(norm, self.max_grad_norm)
        go = go.to(torch.int32)
        bound.set_rates([self._rates(state) for state in bound.classes])
        hyper, multiplier_hyper = bound.kernels.tabulate(bound.rates, bound.class_of, bound.steps)
        for dtype, packed in bound.packed.items():
            state = (packed.values, packed.exp_avg, packed.exp_avg_sq)
            owner, trained = packed.owner, packed.trained
            bound.kernels.multipliers_(
                state, grads[dtype], owner, trained, moved, multiplier_hyper, clip, go
            )
            packed.write_factors_(following=True)
        self._update_(bound, active, hyper, clip, go)
        if bound.kernels.decides_on_host:
            # Triton's writes do not change a tensor's version; torch's do.
            bound.guard.remember(active)

    @property
    def num_skipped(self) -> int:
        """How many steps were left out because a gradient was not finite."""
        return 0 if self._skipped is None else int(self._skipped)

    def _rates(self, state: ParameterState) -> tuple[float, ...]:
        """Return a parameter's hyper-parameters in the order of `kernels.tabulate`."""
        group = state.group
        return (
            self.raw_lr(group, state.matrix),
            float(group.get("weight_decay", 0.0)),
            float(group["lr"]) * group["multiplier_lr_scale"],
            group["multiplier_weight_decay"],
            *self.adamw_settings(group),
        )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the raw gradients' norm is at most `max_norm`; return it."""
        bound = self._current()
        for packed in bound.packed.values():
            packed.write_factors_()
        active = bound.collect_gradients()
        if not active:
            return torch.zeros(())
        _, norm, _ = bound.gradients(active)
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
        bound = self._bound()
        if not bound.is_of(self.param_groups, self.state) or bound.guard.storage_moved():
            self._binding = None
        return self._bound()

    def _bound(self) -> Binding:
        """Return the binding, made from parameter groups and state at its first use."""
        if self._binding is None:
            with torch.no_grad():
                self._bind()
        assert self._binding is not None
        return self._binding

    def _bind(self) -> None:
        states: list[ParameterState] = []
        for group in self.param_groups:
            planned = json.loads(group["matrices"] or "{}")
            names = group.get("param_names") or [
                f"parameter {i}" for i in range(len(group["params"]))
            ]
            for parameter, name in zip(group["params"], names, strict=True):
                matrix = matrix_from(planned[name]) if name in planned else None
                if matrix is not None and tuple(parameter.shape) != matrix.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(parameter.shape)}, but its plan is for "
                        f"{matrix.shape}; flattened parameters (FSDP1, ZeRO) cannot carry "
                        "multipliers, use FSDP2"
                    )
                states.append(
                    ParameterState(
                        index=len(states),
                        parameter=parameter,
                        name=name,
                        group=group,
                        matrix=matrix,
                        moment_names=self._moment_names(matrix),
                        sharded=is_sharded(parameter),
                        weight=local(parameter.detach()),
                    )
                )
        bound = Binding(states, self.state, self.backend, self._process_groups)
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=bound.device)
        self._binding = bound

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state at the precision it was saved in; torch alone would round it to bfloat16.

        The model's parameters are expected to hold the weights of the same moment. A state of
        another format or from another plan is refused before anything has changed.
        """
        seen: dict[str, Any] = {}

        # Registered last, it sees what hooks of others have made of the state.
        def look(_: Optimizer, given: dict[str, Any]) -> None:
            for group, saved in zip(self.param_groups, given["param_groups"], strict=False):
                _check_group(group, saved)
            seen.update(given)

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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._binding = None
        # Process groups cannot be copied; a copy makes its own.
        self._process_groups = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at the next step."""
        super().add_param_group(param_group)
        self._binding = None

    # -- the model's weights ------------------------------------------------------------------

    @torch.no_grad()
    def sync_from_model_(self) -> None:
        """Take the model's weights as they are now: raw weights follow, multipliers stay.

        Where a multiplier is zero no raw weight can follow; there the multipliers start at 1.
        Moments are kept.
        """
        self._binding = None
        bound = self._bound()
        # Ranks share columns, so where one of them has a row at zero all start again.
        flags = [_is_divisible(state) for state in bound.states]
        divisible = all_agree(bound.process_group, flags, bound.device)
        for state, can_follow in zip(bound.states, divisible, strict=True):
            if state.matrix is not None and not can_follow:
                for name in state.matrix.value_shapes():
                    state.multipliers[name].fill_(0.0 if state.matrix.scale == "log" else 1.0)
        bound.write_factors_()
        for state in bound.states:
            if state.owns_raw:
                write_raw(state)
                write_effective(state)
        bound.guard.remember(bound.states)

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


def multipliers(source: MultiplierOptimizer | nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the multipliers by the name of their matrix: {"row": ..., "col": ..., "scalar": ...}.

    Takes an optimizer of this library, or a reparametrized model. Values are the multipliers
    themselves on either scale, full tensors; `row` spans all rows, with 1 where a block carries
    none.
    """
    if isinstance(source, MultiplierOptimizer):
        return source.multipliers()
    return explicit_multipliers(source)


def raw_weights(optimizer: MultiplierOptimizer) -> dict[str, Tensor]:
    """Return what each parameter trains by name: the raw weight, the parameter where it is one."""
    return optimizer.raw_weights()


def _is_divisible(state: ParameterState) -> bool:
    """Return whether no factor of a parameter is zero, so that its raw weight can follow."""
    return state.factors is None or all(bool(factor.all()) for factor in state.factors)


def _check_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise where a saved parameter group is of another format, or from another plan."""
    found = saved.get("format")
    if found != _FORMAT:
        what = "has no format number" if found is None else f"is of format {found}"
        raise ValueError(
            f"this optimizer state {what}, and only format {_FORMAT} is read here: load it with "
            "the release that wrote it, or start with fresh optimizer state"
        )
    ours, theirs = (json.loads(one.get("matrices") or "{}") for one in (group, saved))
    for name in (*ours, *theirs):
        here, there = ours.get(name), theirs.get(name)
        if here is None or there is None or _placed(here) != _placed(there):
            raise ValueError(
                f"this optimizer state was saved under another plan, which differs at {name}: "
                "make the optimizer with the plan of the saved run, or start with fresh "
                "optimizer state"
            )


def _placed(matrix: dict[str, Any]) -> dict[str, Any]:
    """Return a matrix without its initial values, which matter at the first step only."""
    blocks = [{k: v for k, v in block.items() if k != "init"} for block in matrix["blocks"]]
    return {**matrix, "blocks": blocks}
