"""What every optimizer with multipliers shares: state, clipping, the order of a step.

The parameter of the model is the effective weight. The optimizer owns the raw weight and the
multipliers; a step turns the gradient into theirs (eq. 4), clips, updates, and writes the
effective weight back. Subclasses say how a raw weight is updated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers.kernels import Backend, choose_kernels
from learnable_multipliers.kernels.reference import effective_of, write_effective
from learnable_multipliers.kernels.work import Factors, Hyper, Work
from learnable_multipliers.multiplier import Matrix, multiplier
from learnable_multipliers.optim.bank import NAMES, MultiplierBank
from learnable_multipliers.optim.sharding import (
    Share,
    all_reduce_,
    as_sharded,
    is_sharded,
    local,
    share_of,
)
from learnable_multipliers.plan import matrix_from

_NORM_FLOOR = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass
class Slot:
    """One parameter, bound to the tensors the optimizer keeps for it."""

    parameter: torch.nn.Parameter
    name: str
    group: dict[str, Any]
    matrix: Matrix | None
    share: Share
    work: Work
    version: int = -1
    pointer: int = 0


class MultiplierOptimizer(Optimizer):
    """Base of the optimizers; not used by itself."""

    _slots: list[Slot] | None = None

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
            if defaults.get(name, 0) < 0:
                raise ValueError(f"{name} must not be negative, got {defaults[name]}")
        self.max_grad_norm = max_grad_norm
        self.backend: Backend = backend
        self.grad_norm: Tensor | None = None
        self._skipped: Tensor | None = None
        super().__init__(params, {"lr_scale": 1.0, "matrices": "", "kind": "", **defaults})

    # -- for subclasses -----------------------------------------------------------------------

    def _moment_names(self, group: dict[str, Any], matrix: Matrix | None) -> tuple[str, ...]:
        """Return the names of the moments kept beside a raw weight."""
        raise NotImplementedError

    def _update_(self, slots: list[Slot], hyper: Hyper, clip: Tensor) -> None:
        """Update raw weights and write effective weights."""
        raise NotImplementedError

    def _lr(self, group: dict[str, Any], matrix: Matrix | None) -> float:
        """Return the learning rate of a raw weight."""
        return float(group["lr"]) * group["lr_scale"]

    def _adamw_settings(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """Return beta1, beta2 and eps of the AdamW side."""
        return (*group["betas"], group["eps"])

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
        without_compiler()
        return loss

    def _step(self) -> None:
        slots = self._bound()
        for bank in self._banks.values():
            bank.write_factors_()
        self._refuse_outside_writes(slots)
        active = self._with_gradients(slots)
        if not active:
            return
        grads, norm = self._gradients(active)
        self.grad_norm = norm
        at_rest = all(float(group["lr"]) == 0 for group in self.param_groups)
        if at_rest and norm == 0:
            # Checkpointing tools take such a step to see the state; it must leave no trace.
            return
        if not self._is_finite(norm, grads):
            assert self._skipped is not None
            self._skipped += 1
            return
        self._steps[torch.tensor([slot.work.index for slot in active])] += 1
        clip = norm.new_ones(())
        if self.max_grad_norm is not None:
            clip = (self.max_grad_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)
        hyper = self._hyper(slots)
        self._update_multipliers_(active, grads, hyper, clip)
        for bank in self._banks.values():
            bank.write_factors_(following=True)
        self._update_(active, hyper, clip)
        self._remember(active)

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
            slot.work.grad = local(grad)
            active.append(slot)
        return active

    def _gradients(self, active: list[Slot]) -> tuple[dict[torch.dtype, Tensor], Tensor]:
        """Return the multipliers' gradients by bank, and the norm of all others."""
        classes: dict[tuple[Any, ...], list[Work]] = {}
        axes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for slot in active:
            over = slot.share.sums["norm"]
            key = tuple((id(mesh), axis) for mesh, axis in over)
            classes.setdefault(key, []).append(slot.work)
            axes[key] = over
        for bank in self._banks.values():
            # Matrices without a gradient this time must not bring sums of the last one.
            bank.out_sums.zero_()
            bank.in_sums.zero_()
        squares = {key: self._kernels.reduce(works) for key, works in classes.items()}
        grads = {dtype: bank.gradients() for dtype, bank in self._banks.items()}
        partial = [(square, axes[key]) for key, square in squares.items()]
        for slot in self._bound():
            bank, index = self._bank_of.get(slot.work.index, (None, 0))
            if bank is None or not any(slot.share.sums.values()):
                continue
            views = bank.views_of(grads[slot.work.raw.dtype], index)
            partial += [(views[name], slot.share.sums[name]) for name in views]
        if any(over for _, over in partial):
            all_reduce_(partial)
        return grads, torch.stack(list(squares.values())).sum().sqrt()

    def _is_finite(self, norm: Tensor, grads: dict[torch.dtype, Tensor]) -> bool:
        finite = norm.isfinite()
        for grad in grads.values():
            finite = finite & grad.isfinite().all()
        return bool(finite)

    def _hyper(self, slots: list[Slot]) -> Hyper:
        """Tabulate the hyper-parameters of all raw weights."""
        rows = [
            (
                self._lr(slot.group, slot.matrix),
                slot.group.get("weight_decay", 0.0),
                *self._adamw_settings(slot.group),
            )
            for slot in slots
        ]
        table = torch.tensor(rows, dtype=torch.float64).to(self._steps.device)
        lr, weight_decay, beta1, beta2, eps = table.unbind(1)
        steps = self._steps.double()
        return Hyper(
            lr=lr,
            weight_decay=weight_decay,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            bias1=1 - beta1**steps,
            bias2=1 - beta2**steps,
        )

    def _update_multipliers_(
        self, active: list[Slot], grads: dict[torch.dtype, Tensor], hyper: Hyper, clip: Tensor
    ) -> None:
        """AdamW on every multiplier, with the decay and learning rate of its own."""
        rates = [
            (
                float(slot.group["lr"]) * slot.group["multiplier_lr_scale"],
                slot.group["multiplier_weight_decay"],
            )
            for slot in self._bound()
        ]
        is_active = torch.zeros(len(self._bound()), dtype=torch.bool)
        is_active[[slot.work.index for slot in active]] = True
        table = torch.tensor(rates, dtype=torch.float64).to(self._steps.device)
        for dtype, bank in self._banks.items():
            owner = self._slot_of[dtype][bank.owner]
            lr, decay = table[owner].to(dtype).unbind(1)
            beta1, beta2 = hyper.beta1[owner].to(dtype), hyper.beta2[owner].to(dtype)
            moved = is_active.to(owner.device)[owner] & bank.trained
            grad = grads[dtype] * clip
            exp_avg = bank.exp_avg.lerp(grad, 1 - beta1)
            exp_avg_sq = bank.exp_avg_sq * beta2 + (1 - beta2) * grad * grad
            denominator = exp_avg_sq.sqrt() / hyper.bias2[owner].sqrt().to(dtype)
            denominator = denominator + hyper.eps[owner].to(dtype)
            step_size = lr / hyper.bias1[owner].to(dtype)
            values = bank.values * (1 - lr * decay) - step_size * exp_avg / denominator
            for target, new in (
                (bank.values, values),
                (bank.exp_avg, exp_avg),
                (bank.exp_avg_sq, exp_avg_sq),
            ):
                torch.where(moved, new, target, out=target)

    # -- state --------------------------------------------------------------------------------

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
        self._kernels = choose_kernels(self.backend, device)
        self._steps = torch.zeros(len(found), dtype=torch.float32, device=device)
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64)
        self._make_banks(found, device)
        self._slots = [self._slot(index, *one) for index, one in enumerate(found)]
        for bank in self._banks.values():
            bank.write_factors_()
        self._remember(self._slots)

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
        self._slot_of = {d: torch.tensor(i, device=device) for d, i in members.items()}
        self._bank_of = {
            slot: (self._banks[dtype], place)
            for dtype, indices in members.items()
            for place, slot in enumerate(indices)
        }

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
        factors = None
        bank, place = self._bank_of.get(index, (None, 0))
        if bank is not None:
            kept |= bank.state_views(place)
            factors = _factors(bank, place, bool(matrix and matrix.transposed))
        owns_raw = bank is not None or weight.dtype != dtype
        moments = self._moment_names(group, matrix)
        like_raw = (*(("raw",) if owns_raw else ()), *moments)
        for key in like_raw:
            kept[key] = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        fresh = "step" not in state
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
        if owns_raw and fresh:
            _start_raw(work, bank)
        self.state[parameter] = {**state, **as_sharded(kept, parameter, matrix)}
        return Slot(parameter, name, group, matrix, share, work)

    def _remember(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.version, slot.pointer = slot.parameter._version, local(slot.parameter).data_ptr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does; raw weights and multipliers are among it."""
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state at the precision it was saved in; torch alone would round it to bfloat16.

        The model's parameters are expected to hold the weights of the same moment.
        """
        super().load_state_dict(state_dict)
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._slots = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at the next step."""
        super().add_param_group(param_group)
        self._slots = None

    # -- the model's weights ------------------------------------------------------------------

    def _refuse_outside_writes(self, slots: list[Slot]) -> None:
        """Raise where a parameter is no longer what the last step wrote."""
        owned = [slot for slot in slots if slot.work.owns_raw]
        for slot in owned:
            parameter = slot.parameter
            here = local(parameter.detach())
            if here.data_ptr() != slot.pointer:
                slot.work.weight = here
            elif parameter._version == slot.version:
                continue
            # A swap and back (an average for evaluation) leaves the same numbers: fine.
            if not _same_numbers(slot.work):
                raise _written_outside(slot)
        self._remember(owned)
        flags = self._kernels.touched_from_outside([slot.work for slot in owned])
        if bool(flags.any()):
            raise _written_outside(owned[int(flags.nonzero()[0])])

    @torch.no_grad()
    def sync_from_model_(self) -> None:
        """Take the model's weights as they are now: raw weights follow, multipliers stay.

        Where a multiplier is zero no raw weight can follow; there the multipliers start at 1.
        Moments are kept.
        """
        slots = self._bound()
        for slot in slots:
            slot.work.weight = local(slot.parameter.detach())
            bank, place = self._bank_of.get(slot.work.index, (None, 0))
            if not slot.work.owns_raw:
                slot.work.raw = slot.work.weight
                continue
            if bank is not None and slot.matrix is not None:
                bank.write_factors_()
                if not _factors_nonzero(slot.work):
                    start = 0.0 if slot.matrix.scale == "log" else 1.0
                    for name in NAMES:
                        if name in (views := bank.state_views(place)):
                            views[name].fill_(start)
            _start_raw(slot.work, bank)
        for bank in self._banks.values():
            bank.write_factors_(following=True)
        for slot in slots:
            if slot.work.owns_raw:
                write_effective(slot.work)
        self._remember(slots)

    @torch.no_grad()
    def multipliers(self) -> dict[str, dict[str, Tensor]]:
        """Return the multipliers by parameter name, full tensors."""
        found = {}
        for slot in self._bound():
            if slot.matrix is None or not slot.matrix.carries:
                continue
            state = self.state[slot.parameter]
            found[slot.name] = {
                name: multiplier(slot.matrix, _full(state[name]).detach().clone())
                for name in NAMES
                if name in state
            }
        return found

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the raw gradients' norm is at most `max_norm`; return it."""
        slots = self._bound()
        for bank in self._banks.values():
            bank.write_factors_()
        active = self._with_gradients(slots)
        if not active:
            return torch.zeros(())
        _, norm = self._gradients(active)
        clip = (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)
        for slot in active:
            slot.work.grad.mul_(clip.to(slot.work.grad.dtype))
        return norm


def raw_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of raw weights, multipliers and moments for a parameter."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _factors(bank: MultiplierBank, place: int, transposed: bool) -> Factors:
    """Return views of the bank along a matrix's stored rows and columns."""
    out = [
        bank.out_view(f, place) for f in (bank.out_factors, bank.out_factors_next, bank.out_sums)
    ]
    into = [bank.in_view(f, place) for f in (bank.in_factors, bank.in_factors_next, bank.in_sums)]
    rows, cols = (into, out) if transposed else (out, into)
    return Factors(
        rows=rows[0],
        rows_next=rows[1],
        row_sums=rows[2],
        cols=cols[0],
        cols_next=cols[1],
        col_sums=cols[2],
    )


def _start_raw(work: Work, bank: MultiplierBank | None) -> None:
    """Set the raw weight behind the effective one, at the current multipliers."""
    work.raw.copy_(work.weight)
    if work.factors is not None and bank is not None:
        bank.write_factors_()
        f = work.factors
        stacked = work.raw.view(f.rows.shape[0], f.rows.shape[1], f.cols.shape[1])
        stacked.div_(f.rows.unsqueeze(-1)).div_(f.cols.unsqueeze(-2))


def _factors_nonzero(work: Work) -> bool:
    return work.factors is not None and bool(work.factors.rows.all() & work.factors.cols.all())


def _same_numbers(work: Work) -> bool:
    if work.factors is not None:
        work.factors.rows_next.copy_(work.factors.rows)
        work.factors.cols_next.copy_(work.factors.cols)
    return torch.equal(effective_of(work).to(work.weight.dtype), work.weight)


def _written_outside(slot: Slot) -> RuntimeError:
    return RuntimeError(
        f"{slot.name} was changed since the last step by something other than this optimizer, "
        "which would overwrite it. If the change is meant (weights loaded, averaged, edited), call "
        "opt.sync_from_model_() after it; if not, restore the weights before stepping."
    )


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]
