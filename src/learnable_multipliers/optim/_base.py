"""What every optimizer with multipliers shares: state, clipping, the order of a step.

The parameter of the model is the effective weight. The optimizer owns the raw weight and the
multipliers; a step turns the gradient into theirs (eq. 4), clips, updates, and writes the
effective weight back. Subclasses say how a raw weight is updated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers._multiplier import Matrix, multiplier
from learnable_multipliers._plan import matrix_from
from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.kernels._reference import write_effective
from learnable_multipliers.kernels._work import Rates
from learnable_multipliers.optim._binding import Binding, Member
from learnable_multipliers.optim._packed_multipliers import NAMES
from learnable_multipliers.optim._process_group import all_agree
from learnable_multipliers.optim._sharding import full, local, share_of
from learnable_multipliers.optim._slots import Slot, can_be_divided, start_raw

_NORM_FLOOR = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


class MultiplierOptimizer(Optimizer):
    """Base of the optimizers; not used by itself."""

    found_inf: Tensor | None = None
    """Set before `step` to skip it where this 0-d tensor is nonzero, as a bad gradient would: for
    a loss that is not finite. The same on all ranks, read on the device, cleared by the step."""
    _binding: Binding | None = None
    _settings: tuple[str, ...] = ("max_grad_norm", "backend", "grad_norm", "_skipped")
    """Attributes that travel with a copy of the optimizer; torch's own copy its groups alone."""

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
        super().__init__(params, {"lr_scale": 1.0, "matrices": "", "kind": "", **defaults})

    # -- for subclasses -----------------------------------------------------------------------

    def _moment_names(self, group: dict[str, Any], matrix: Matrix | None) -> tuple[str, ...]:
        """Return the names of the moments kept beside a raw weight."""
        raise NotImplementedError

    def _update_(
        self, bound: Binding, active: list[Slot], hyper: Any, clip: Tensor, go: Tensor
    ) -> None:
        """Update raw weights that have gradients, write effective ones; nothing where `go` is 0."""
        raise NotImplementedError

    def _keeps_mean_square(self, matrix: Matrix | None) -> bool:
        """Tell whether an average of mean(g^2), one number, stands in for a second moment."""
        return False

    def _lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        """Return the learning rate of a raw weight."""
        return float(group["lr"]) * group["lr_scale"]

    def _adamw_settings(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """Return beta1, beta2 and eps of the AdamW side."""
        return (*group["betas"], group["eps"])

    def _moments_of(self, slot: Slot) -> dict[str, Tensor]:
        """Return the moments kept beside a raw weight, by name."""
        names = self._moment_names(slot.group, slot.matrix)
        return dict(zip(names, slot.work.moments, strict=True))

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
                self._binding.let_go_of_gradients()
        return loss

    def _step(self) -> None:
        bound = self._current()
        bound.watch.raise_late()
        for bank in bound.banks.values():
            bank.write_factors_()
        active = bound.with_gradients()
        if not active:
            return
        # The long pass over all gradients first: a GPU is busy with it while the host goes on.
        grads, norm, finite = bound.gradients(active)
        if self.found_inf is not None:
            finite = finite & (self.found_inf == 0)
        touched = bound.watch.look(bound.works(bound.slots))
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
        moved = bound.moved(active)
        bound.steps += moved * go
        clip = torch.ones_like(norm)
        if self.max_grad_norm is not None:
            clip = (self.max_grad_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)
        go = go.to(torch.int32)
        hyper, multiplier_hyper = bound.kernels.tabulate(self._rates(bound))
        for dtype, bank in bound.banks.items():
            owner = bound.owners[dtype]
            state = (bank.values, bank.exp_avg, bank.exp_avg_sq)
            bound.kernels.multipliers_(
                state, grads[dtype], owner, bank.trained, moved, multiplier_hyper, clip, go
            )
            bank.write_factors_(following=True)
        self._update_(bound, active, hyper, clip, go)
        if bound.kernels.decides_on_host:
            # Triton's writes leave no trace in a tensor's version; torch's do.
            bound.watch.remember(active)

    @property
    def num_skipped(self) -> int:
        """How many steps were left out because a gradient was not finite."""
        return 0 if self._skipped is None else int(self._skipped)

    def _rates(self, bound: Binding) -> Rates:
        """Gather the hyper-parameters of all classes of parameters."""
        return bound.rates(
            [
                (
                    self._lr(group, matrix),
                    float(group.get("weight_decay", 0.0)),
                    float(group["lr"]) * group["multiplier_lr_scale"],
                    group["multiplier_weight_decay"],
                    *self._adamw_settings(group),
                )
                for group, matrix in bound.classes
            ]
        )

    # -- state --------------------------------------------------------------------------------

    def _current(self) -> Binding:
        """Return the binding, made anew where parameters, their storage or the state changed."""
        bound = self._bound()
        if not bound.is_of(self.param_groups, self.state) or bound.watch.storage_moved():
            self._binding = None
        return self._bound()

    def _bound(self) -> Binding:
        """Return the binding, made from parameter groups and state when these have changed."""
        if self._binding is None:
            with torch.no_grad():
                self._bind()
        assert self._binding is not None
        return self._binding

    def _bind(self) -> None:
        members = []
        for group in self.param_groups:
            planned = json.loads(group["matrices"] or "{}")
            names = group.get("param_names") or [
                f"parameter {i}" for i in range(len(group["params"]))
            ]
            for parameter, name in zip(group["params"], names, strict=True):
                matrix = matrix_from(planned[name]) if name in planned else None
                members.append(self._member(parameter, name, group, matrix))
        bound = Binding(members, self.state, self.backend, self._process_groups)
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=bound.device)
        self._binding = bound

    def _member(
        self, parameter: Any, name: str, group: dict[str, Any], matrix: Matrix | None
    ) -> Member:
        if matrix is not None and tuple(parameter.shape) != matrix.shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, but its plan is for {matrix.shape}; "
                "flattened parameters (FSDP1, ZeRO) cannot carry multipliers, use FSDP2"
            )
        return Member(
            parameter=parameter,
            name=name,
            group=group,
            matrix=matrix,
            share=share_of(parameter, matrix),
            moments=self._moment_names(group, matrix),
            keeps_mean_square=self._keeps_mean_square(matrix),
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state at the precision it was saved in; torch alone would round it to bfloat16.

        The model's parameters are expected to hold the weights of the same moment.
        """
        seen: dict[str, Any] = {}
        # Registered last, it sees what hooks of others have made of the state.
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.update(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        state_dict = seen
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved, parameter in zip(ids, parameters, strict=True):
            if saved in state_dict["state"]:
                device = local(parameter).device
                self.state[parameter] = {
                    key: value.detach().clone().to(device) if isinstance(value, Tensor) else value
                    for key, value in state_dict["state"][saved].items()
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
        carrying = [slot for slot in bound.owned if slot.work.index in bound.bank_of]
        # Ranks share columns, so where one of them has a row at zero all start anew.
        divisible = all_agree(
            bound.team, [can_be_divided(slot.work) for slot in carrying], bound.device
        )
        for slot, can_follow in zip(carrying, divisible, strict=True):
            bank, place = bound.bank_of[slot.work.index]
            if slot.matrix is not None and not can_follow:
                start = 0.0 if slot.matrix.scale == "log" else 1.0
                for view in bank.views_of(bank.values, place).values():
                    view.fill_(start)
        bound.write_factors_()
        for slot in bound.owned:
            start_raw(slot.work)
            write_effective(slot.work)
        bound.watch.remember(bound.slots)

    @torch.no_grad()
    def multipliers(self) -> dict[str, dict[str, Tensor]]:
        """Return the multipliers by parameter name, full tensors."""
        found = {}
        for slot in self._bound().slots:
            if slot.matrix is None or not slot.matrix.carries:
                continue
            state = self.state[slot.parameter]
            found[slot.name] = {
                name: multiplier(slot.matrix, full(state[name]).detach().clone())
                for name in NAMES
                if name in state
            }
        return found

    def raw_state(self, slot: Slot) -> dict[str, Any]:
        """Return the state of what trains a raw weight: the moments are there."""
        return self.state[slot.parameter]

    @torch.no_grad()
    def raw_weights(self) -> dict[str, Tensor]:
        """Return the raw weights by parameter name, full tensors; not copies where not sharded."""
        return {
            slot.name: full(self.state[slot.parameter].get("raw", slot.parameter.detach()))
            for slot in self._bound().slots
        }

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the raw gradients' norm is at most `max_norm`; return it."""
        bound = self._current()
        for bank in bound.banks.values():
            bank.write_factors_()
        active = bound.with_gradients()
        if not active:
            return torch.zeros(())
        _, norm, _ = bound.gradients(active)
        clip = (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)
        for slot in active:
            grad = slot.parameter.grad
            assert grad is not None
            local(grad).mul_(clip.to(grad.dtype))
        bound.let_go_of_gradients()
        return norm
