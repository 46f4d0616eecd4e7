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

from learnable_multipliers.kernels import choose_kernels
from learnable_multipliers.kernels.backend import Backend
from learnable_multipliers.kernels.reference import write_effective
from learnable_multipliers.kernels.work import Rates, Work
from learnable_multipliers.multiplier import Matrix, multiplier, raw_dtype
from learnable_multipliers.optim.bank import NAMES, MultiplierBank
from learnable_multipliers.optim.packed_sums import PackedSums
from learnable_multipliers.optim.sharding import (
    Share,
    as_sharded,
    full,
    is_sharded,
    local,
    local_gradient,
    share_of,
)
from learnable_multipliers.optim.slots import Slot, can_be_divided, factors_of, start_raw
from learnable_multipliers.optim.team import all_agree, team_of
from learnable_multipliers.optim.watch import Watch
from learnable_multipliers.plan import matrix_from

MOST_SUBSETS = 16
"""Sets of parameters with gradients whose tables are kept; more of them start over."""
MEAN_SQUARE = "mean_sq"
"""Name in the state of an average of mean(g^2); a state of earlier releases lacks it, and it starts
anew."""
_NORM_FLOOR = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


class MultiplierOptimizer(Optimizer):
    """Base of the optimizers; not used by itself."""

    _slots: list[Slot] | None = None
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

    def _update_(self, slots: list[Slot], hyper: Any, clip: Tensor, go: Tensor) -> None:
        """Update raw weights and write effective weights; where `go` is 0, do nothing."""
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
            self._let_go_of_gradients()
        return loss

    def _let_go_of_gradients(self) -> None:
        """Keep no gradient alive beyond the step that used it."""
        for slot in self._slots or ():
            slot.work.grad = slot.work.weight

    def _step(self) -> None:
        slots = self._current()
        self._watch.raise_late()
        for bank in self._banks.values():
            bank.write_factors_()
        active = self._with_gradients(slots)
        if not active:
            return
        # The long pass over all gradients first: a GPU is busy with it while the host goes on.
        grads, norm, finite = self._gradients(active)
        touched = self._watch.look(self._works(slots))
        self.grad_norm = norm
        go = finite & ~touched.any() if touched.numel() else finite
        if all(float(group["lr"]) == 0 for group in self.param_groups):
            # Checkpointing tools take a step without rate and gradient to see the state; it must
            # leave no trace.
            go = go & (norm != 0)
        assert self._skipped is not None
        self._skipped += ~finite
        if self._kernels.decides_on_host and not bool(go):
            return
        moved = self._moved(slots, active)
        self._steps += moved * go
        clip = torch.ones_like(norm)
        if self.max_grad_norm is not None:
            clip = (self.max_grad_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)
        go = go.to(torch.int32)
        hyper, multiplier_hyper = self._kernels.tabulate(self._rates())
        for dtype, bank in self._banks.items():
            owner = self._owners[dtype]
            state = (bank.values, bank.exp_avg, bank.exp_avg_sq)
            self._kernels.multipliers_(
                state, grads[dtype], owner, bank.trained, moved, multiplier_hyper, clip, go
            )
            bank.write_factors_(following=True)
        self._update_(active, hyper, clip, go)
        if self._kernels.decides_on_host:
            # Triton's writes leave no trace in a tensor's version; torch's do.
            self._watch.remember(active)

    @property
    def num_skipped(self) -> int:
        """How many steps were left out because a gradient was not finite."""
        return 0 if self._skipped is None else int(self._skipped)

    def _with_gradients(self, slots: list[Slot]) -> list[Slot]:
        active = []
        for slot in slots:
            grad = slot.parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise ValueError(f"{slot.name}: sparse gradients are not supported")
            slot.work.grad = local_gradient(slot.parameter, grad) if slot.sharded else grad
            active.append(slot)
        if len(active) == len(slots):
            return slots
        # One list for one set of parameters, so that kernels find their tables again.
        key = tuple(slot.work.index for slot in active)
        if key not in self._subsets and len(self._subsets) >= MOST_SUBSETS:
            self._subsets.clear()
            self._lists.clear()
        return self._subsets.setdefault(key, active)

    def _works(self, slots: list[Slot]) -> list[Work]:
        """Return the slots' works, the same list for the same slots."""
        known = self._lists.get(id(slots))
        if known is None or known[0] is not slots:
            known = self._lists[id(slots)] = (slots, [slot.work for slot in slots])
        return known[1]

    def _gradients(self, active: list[Slot]) -> tuple[dict[torch.dtype, Tensor], Tensor, Tensor]:
        """Return the multipliers' gradients by bank, the norm of all others, and if all is finite.

        Where parameters are spread over ranks these are the same numbers on each of them.
        """
        if len(active) < len(self._bound()):
            # Matrices without a gradient this time must not bring sums of the last one.
            for bank in self._banks.values():
                bank.out_sums.zero_()
                bank.in_sums.zero_()
            if self._squares is not None:
                self._squares.zero_()
        square = self._kernels.reduce(self._works(active), self._squares)
        grads = {dtype: bank.gradients() for dtype, bank in self._banks.items()}
        if self._sums is not None:
            assert self._squares is not None
            finite = self._sums.take_(grads, self._squares)
            norm = self._squares.sum().sqrt()
            return grads, norm, finite & norm.isfinite()
        norm = square.sqrt()
        finite = norm.isfinite()
        for grad in grads.values():
            finite = finite & grad.isfinite().all()
        return grads, norm, finite

    def _moved(self, slots: list[Slot], active: list[Slot]) -> Tensor:
        """Return 1 for each parameter that has a gradient, 0 for the others."""
        if len(active) == len(slots):
            return torch.ones_like(self._steps)
        moved = torch.zeros(len(slots))
        moved[[slot.work.index for slot in active]] = 1.0
        return moved.to(self._steps.device)

    def _rates(self) -> Rates:
        """Gather the hyper-parameters of all classes of parameters."""
        rows = [
            (
                self._lr(group, matrix),
                float(group.get("weight_decay", 0.0)),
                float(group["lr"]) * group["multiplier_lr_scale"],
                group["multiplier_weight_decay"],
                *self._adamw_settings(group),
            )
            for group, matrix in self._classes
        ]
        if rows != self._last_rates:
            # Only what a scheduler has changed travels to the device.
            self._last_rates = rows
            self._rate_table = torch.tensor(rows, dtype=torch.float64).to(self._steps.device)
        return Rates(table=self._rate_table, class_of=self._class_of, steps=self._steps)

    # -- state --------------------------------------------------------------------------------

    def _current(self) -> list[Slot]:
        """Return the slots, bound anew where parameters, their storage or the state changed."""
        slots = self._bound()
        parameters = [p for group in self.param_groups for p in group["params"]]
        same = len(parameters) == len(slots) and all(
            p is slot.parameter and self.state[p].get("step") is slot.step
            for p, slot in zip(parameters, slots, strict=True)
        )
        if not same or self._watch.storage_moved():
            self._slots = None
        return self._bound()

    def _bound(self) -> list[Slot]:
        """Return the slots, made from parameter groups and state when these have changed."""
        if self._slots is None:
            with torch.no_grad():
                self._bind()
        assert self._slots is not None
        return self._slots

    def _bind(self) -> None:
        found: list[tuple[Any, str, dict[str, Any], Matrix | None, Share]] = []
        for group in self.param_groups:
            matrices = json.loads(group["matrices"] or "{}")
            names = group.get("param_names") or [
                f"parameter {i}" for i in range(len(group["params"]))
            ]
            for parameter, name in zip(group["params"], names, strict=True):
                matrix = matrix_from(matrices[name]) if name in matrices else None
                if matrix is not None and tuple(parameter.shape) != matrix.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(parameter.shape)}, but its plan is for "
                        f"{matrix.shape}; flattened parameters (FSDP1, ZeRO) cannot carry "
                        "multipliers, use FSDP2"
                    )
                found.append((parameter, name, group, matrix, share_of(parameter, matrix)))
        devices = {local(parameter).device for parameter, *_ in found}
        if len(devices) > 1:
            raise ValueError(f"parameters lie on several devices: {sorted(map(str, devices))}")
        device = devices.pop()
        dtypes = {raw_dtype(parameter) for parameter, *_ in found}
        self._kernels = choose_kernels(self.backend, device, dtypes)
        self._steps = torch.zeros(len(found), dtype=torch.float32, device=device)
        widest = torch.float64 if torch.float64 in dtypes else torch.float32
        self._mean_squares = torch.zeros(len(found), dtype=widest, device=device)
        kept_squares = any(self._keeps_mean_square(matrix) for *_, matrix, _ in found)
        self._team = team_of((parameter for parameter, *_ in found), self._process_groups)
        needs_squares = kept_squares or self._team is not None
        self._squares = torch.zeros_like(self._mean_squares) if needs_squares else None
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._make_banks(found, device)
        new = {parameter for parameter, *_ in found if "raw" not in self.state[parameter]}
        self._slots = [self._slot(index, *one) for index, one in enumerate(found)]
        for bank in self._banks.values():
            bank.write_factors_()
            bank.write_factors_(following=True)
        for slot in self._slots:
            if slot.owns_raw and slot.parameter in new:
                start_raw(slot.work)
                blocks = slot.matrix.blocks if slot.matrix is not None else ()
                if any(block.init != 1.0 for block in blocks):
                    # Dividing by an initial value and multiplying again may miss the last bit.
                    write_effective(slot.work)
        self._owned = [slot for slot in self._slots if slot.owns_raw]
        self._subsets: dict[tuple[int, ...], list[Slot]] = {}
        self._lists: dict[int, tuple[list[Slot], list[Work]]] = {}
        self._classify(self._slots)
        self._watch = Watch(self._slots, self._banks.values(), self._kernels)

    def _classify(self, slots: list[Slot]) -> None:
        """Find parameters that share all hyper-parameters: few, whatever the model's size."""
        classes: dict[tuple[Any, ...], int] = {}
        self._classes: list[tuple[dict[str, Any], Matrix | None]] = []
        members = []
        for slot in slots:
            key = (id(slot.group), self._moment_names(slot.group, slot.matrix))
            if key not in classes:
                classes[key] = len(classes)
                self._classes.append((slot.group, slot.matrix))
            members.append(classes[key])
        self._class_of = torch.tensor(members, device=self._steps.device)
        self._last_rates: list[tuple[float, ...]] = []

    def _make_banks(self, found: list[tuple[Any, ...]], device: torch.device) -> None:
        members: dict[torch.dtype, list[int]] = {}
        for index, (parameter, _, _, matrix, _) in enumerate(found):
            if matrix is not None and matrix.carries:
                members.setdefault(raw_dtype(parameter), []).append(index)
        self._banks = {
            dtype: MultiplierBank(
                [found[i][3] for i in indices], [found[i][4].extent for i in indices], dtype, device
            )
            for dtype, indices in members.items()
        }
        # The slot that each multiplier belongs to.
        self._owners = {
            dtype: torch.tensor(indices, device=device)[self._banks[dtype].owner]
            for dtype, indices in members.items()
        }
        self._bank_of = {
            slot: (self._banks[dtype], place)
            for dtype, indices in members.items()
            for place, slot in enumerate(indices)
        }
        self._sums = None
        if self._team is not None:
            self._sums = PackedSums(
                self._team,
                [(matrix, share) for _, _, _, matrix, share in found],
                {dtype: (self._banks[dtype], indices) for dtype, indices in members.items()},
                self._mean_squares.dtype,
                device,
            )

    def _slot(
        self,
        index: int,
        parameter: Any,
        name: str,
        group: dict[str, Any],
        matrix: Matrix | None,
        share: Share,
    ) -> Slot:
        """Bind one parameter to its state, creating what is missing."""
        state = self.state[parameter]
        weight = local(parameter.detach())
        dtype = raw_dtype(parameter)
        kept: dict[str, Tensor] = {"step": self._steps[index]}
        if self._keeps_mean_square(matrix):
            kept[MEAN_SQUARE] = self._mean_squares[index]
        factors = None
        bank, place = self._bank_of.get(index, (None, 0))
        if bank is not None:
            kept |= bank.state_views(place)
            factors = factors_of(bank, place, bool(matrix and matrix.transposed))
        owns_raw = bank is not None or weight.dtype != dtype
        moments = self._moment_names(group, matrix)
        like_raw = (*(("raw",) if owns_raw else ()), *moments)
        for key in like_raw:
            kept[key] = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        for key, value in kept.items():
            if key in state:
                value.copy_(local(state[key]).to(value.device))
        work = Work(
            index=index,
            weight=weight,
            raw=kept["raw"] if owns_raw else weight,
            grad=weight,
            moments=tuple(kept[name] for name in moments),
            factors=factors,
        )
        self.state[parameter] = {**state, **as_sharded(kept, parameter, matrix)}
        kept_step = self.state[parameter]["step"]
        sharded = is_sharded(parameter)
        return Slot(parameter, name, group, matrix, share, work, kept_step, sharded, owns_raw)

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
        self._slots = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._slots = None
        # Process groups cannot be copied; a copy makes its own.
        self._process_groups = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at the next step."""
        super().add_param_group(param_group)
        self._slots = None

    # -- the model's weights ------------------------------------------------------------------

    @torch.no_grad()
    def sync_from_model_(self) -> None:
        """Take the model's weights as they are now: raw weights follow, multipliers stay.

        Where a multiplier is zero no raw weight can follow; there the multipliers start at 1.
        Moments are kept.
        """
        self._slots = None
        slots = self._bound()
        carrying = [slot for slot in self._owned if slot.work.index in self._bank_of]
        # Ranks share columns, so where one of them has a row at zero all start anew.
        divisible = all_agree(
            self._team, [can_be_divided(slot.work) for slot in carrying], self._steps.device
        )
        for slot, can_follow in zip(carrying, divisible, strict=True):
            bank, place = self._bank_of[slot.work.index]
            if slot.matrix is not None and not can_follow:
                start = 0.0 if slot.matrix.scale == "log" else 1.0
                for view in bank.views_of(bank.values, place).values():
                    view.fill_(start)
        for bank in self._banks.values():
            bank.write_factors_()
            bank.write_factors_(following=True)
        for slot in self._owned:
            start_raw(slot.work)
            write_effective(slot.work)
        self._watch.remember(slots)

    @torch.no_grad()
    def multipliers(self) -> dict[str, dict[str, Tensor]]:
        """Return the multipliers by parameter name, full tensors."""
        found = {}
        for slot in self._bound():
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
            for slot in self._bound()
        }

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the raw gradients' norm is at most `max_norm`; return it."""
        slots = self._current()
        for bank in self._banks.values():
            bank.write_factors_()
        active = self._with_gradients(slots)
        if not active:
            return torch.zeros(())
        _, norm, _ = self._gradients(active)
        clip = (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)
        for slot in active:
            grad = slot.parameter.grad
            assert grad is not None
            local(grad).mul_(clip.to(grad.dtype))
        self._let_go_of_gradients()
        return norm
