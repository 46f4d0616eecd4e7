"""Bind the parameters of an optimizer to their state, in the form that kernels take.

A binding is made from parameter groups and state, and made again when these change. Its tensors are
those of the state: a step writes to them, and a checkpoint saves them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from learnable_multipliers._multiplier import Matrix
from learnable_multipliers._names import named_parameters
from learnable_multipliers._reparametrize import is_reparametrized
from learnable_multipliers.kernels import choose_kernels
from learnable_multipliers.kernels._backend import Backend, to_device
from learnable_multipliers.kernels._parameter import (
    ParameterSet,
    ParameterState,
    Rates,
    write_effective_,
    write_raw_,
)
from learnable_multipliers.optim._packed_multipliers import PackedMultipliers
from learnable_multipliers.optim._packed_sums import PackedSums
from learnable_multipliers.optim._sharding import (
    local,
    local_gradient,
    local_shard,
    process_group_of,
    shard_state,
)
from learnable_multipliers.optim._write_guard import WriteGuard

_MOST_SETS = 16
"""Most sets of parameters with gradients to keep, each with the kernels' tables."""
MEAN_SQUARE = "mean_sq"
"""Name in the state of an average of mean(g^2): one number instead of a second moment."""


class Binding:
    """A state for each parameter, and the packed multipliers, counts and kernels they share."""

    def __init__(
        self,
        states: list[ParameterState],
        param_groups: Sequence[dict[str, Any]],
        saved: dict[Any, dict[str, Any]],
        backend: Backend,
        process_groups: dict[tuple[int, ...], Any],
        models: Sequence[Callable[[], nn.Module | None]],
    ):
        """Bind parameters to `saved`, the optimizer's state; add to it what is missing."""
        self.states = ParameterSet(states)
        self._groups = list(param_groups)
        self._sizes = [len(group["params"]) for group in param_groups]
        self._parameters = [state.parameter for state in states]
        self._models = models
        self.device = _device_of(states)
        dtypes = {state.raw_dtype for state in states}
        self.kernels = choose_kernels(backend, self.device, dtypes)
        self.steps = torch.zeros(len(states), dtype=torch.float32, device=self.device)
        widest = torch.float64 if torch.float64 in dtypes else torch.float32
        self.mean_squares = torch.zeros(len(states), dtype=widest, device=self.device)
        self.process_group = process_group_of((s.parameter for s in states), process_groups)
        keeps_squares = any(MEAN_SQUARE in state.moment_names for state in states)
        needs_squares = keeps_squares or self.process_group is not None
        self.squares = torch.zeros_like(self.mean_squares) if needs_squares else None
        shards = [local_shard(state.parameter, state.matrix) for state in states]
        carrying: dict[torch.dtype, dict[int, Matrix]] = {}
        for state in states:
            if state.matrix is not None and state.matrix.carries:
                carrying.setdefault(state.raw_dtype, {})[state.index] = state.matrix
        self.packed = {
            dtype: PackedMultipliers(matrices, shards, dtype, self.device)
            for dtype, matrices in carrying.items()
        }
        self._sums = None
        if self.process_group is not None:
            self._sums = PackedSums(self.process_group, shards, self.packed, widest, self.device)
        new = [state for state in states if "raw" not in saved[state.parameter]]
        for state in states:
            self._set_tensors(state, saved)
        self.write_factors_()
        for state in new:
            if state.owns_raw:
                write_raw_(state)
                if state.matrix is not None and any(b.init != 1.0 for b in state.matrix.blocks):
                    # Dividing by an initial value and multiplying again may miss the last bit.
                    write_effective_(state)
        self._sets: dict[tuple[int, ...], ParameterSet] = {}
        self._classify()
        # Code that moves one tensor of a parameter moves all. Check two of them: a view of a tensor
        # that is alive here, so that no other storage can have its address, and a large one.
        self._kept = [
            tensor
            for state in states
            if not state.sharded
            for tensor in (next(iter(state.multipliers.values()), state.step), state.kept[-1])
        ]
        self._addresses = list(map(Tensor.data_ptr, self._kept))
        self.guard = WriteGuard(self.states, self.packed.values(), self.kernels)
        self._owners: list[tuple[Callable[[], nn.Module | None], str, nn.Parameter]] | None = None

    def is_current(
        self, param_groups: list[dict[str, Any]], saved: dict[Any, dict[str, Any]]
    ) -> bool:
        """Return whether it was made from these groups and this state, which have not changed."""
        held = chain.from_iterable(group["params"] for group in param_groups)
        if (
            [len(group["params"]) for group in param_groups] != self._sizes
            or not all(map(is_, param_groups, self._groups))
            or not all(map(is_, held, self._parameters))
        ):
            return False
        for state in self.states:
            kept = saved[state.parameter]
            # Our entries come first in the state, before entries that others have added.
            if len(kept) < len(state.kept) or not all(map(is_, kept.values(), state.kept)):
                return False
        # `tensor.data = tensor.data.to(device)`, as offloading code does, leaves the same objects.
        return list(map(Tensor.data_ptr, self._kept)) == self._addresses

    # -- step ---------------------------------------------------------------------------------

    def collect_gradients(self) -> ParameterSet:
        """Return the parameters that have a gradient, and set it in their states."""
        active = []
        for state in self.states:
            grad = state.parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise ValueError(f"{state.name}: sparse gradients are not supported")
            state.grad = local_gradient(state.parameter, grad) if state.sharded else grad
            active.append(state)
        if len(active) == len(self.states):
            return self.states
        # One object per set of parameters: it keeps the tables of the kernels.
        key = tuple(state.index for state in active)
        if key not in self._sets and len(self._sets) >= _MOST_SETS:
            self._sets.clear()
        return self._sets.setdefault(key, ParameterSet(active))

    def check_replaced(self) -> None:
        """Raise if the model has another parameter in place of one that is trained here."""
        if self._owners is not None and all(
            (module := owner()) is not None and module._parameters.get(leaf) is parameter
            for owner, leaf, parameter in self._owners
        ):
            return
        if any(map(is_reparametrized, self._present_models())):
            raise RuntimeError(
                "the model was given multipliers by lrm.reparametrize after this optimizer was "
                "made, which has multipliers of its own: call lrm.merge(model), or train it with "
                "an optimizer of torch on lrm.param_groups(model, plan)"
            )
        present = {
            name: parameter
            for model in self._present_models()
            for name, parameter in named_parameters(model, remove_duplicate=False)
        }
        held = {id(parameter) for parameter in present.values()}
        trained = {id(state.parameter): state.name for state in self.states}
        for state in self.states:
            if state.sharded:
                continue
            for name in state.tied_names:
                if (
                    name in present
                    and present[name].requires_grad
                    and id(present[name]) not in trained
                ):
                    raise RuntimeError(
                        f"{name} is no longer tied to {state.name} as it was when the optimizer "
                        "was made, and is not trained: untie weights before that"
                    )
            if id(state.parameter) in held:
                continue
            other = trained.get(id(present.get(state.name)))
            if other is not None:
                raise RuntimeError(
                    f"{state.name} was tied to {other} after the optimizer was made, and their "
                    "multipliers are those of two matrices: tie weights before that"
                )
            # Under its name, or in a module that replaced its own: `head.0.weight`, `head.weight`.
            owner = state.name.rpartition(".")[0] + "."
            new = [n for n, p in present.items() if p.requires_grad and id(p) not in trained]
            if any(name == state.name or name.startswith(owner) for name in new):
                raise RuntimeError(
                    f"{state.name} was replaced in the model after the optimizer was made, and is "
                    "not trained: call fully_shard, resize_token_embeddings and the like first, "
                    "then make the optimizer"
                )
        self._owners = self._find_owners()

    def _find_owners(self) -> list[tuple[Callable[[], nn.Module | None], str, nn.Parameter]]:
        """Return the modules that hold parameters, except sharded ones, which FSDP2 swaps."""
        trained = {id(state.parameter) for state in self.states if not state.sharded}
        return [
            (weakref.ref(module), leaf, parameter)
            for model in self._present_models()
            for module in model.modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in trained
        ]

    def _present_models(self) -> list[nn.Module]:
        return [model for each in self._models if (model := each()) is not None]

    def release_gradients(self) -> None:
        """Drop references to gradients after the step that used them."""
        for state in self.states:
            state.grad = None

    def gradients(
        self, active: ParameterSet, clip_multipliers: bool
    ) -> tuple[dict[torch.dtype, Tensor], Tensor, Tensor]:
        """Return the multipliers' gradients by dtype, the clip norm, and whether all is finite.

        The norm is over all other gradients, and over these with `clip_multipliers`. If parameters
        are distributed over ranks, the results are the same on all ranks.
        """
        if len(active) < len(self.states):
            # Matrices without a gradient in this step must not keep the sums of the last one.
            for packed in self.packed.values():
                packed.out_sums.zero_()
                packed.in_sums.zero_()
            if self.squares is not None:
                self.squares.zero_()
        square = self.kernels.reduce(active, self.squares)
        grads = {dtype: packed.gradients() for dtype, packed in self.packed.items()}
        if self._sums is not None:
            assert self.squares is not None
            square, finite = self._sums.all_reduce_(grads, self.squares, clip_multipliers)
            norm = square.sqrt()
            return grads, norm, finite & norm.isfinite()
        if clip_multipliers:
            for grad in grads.values():
                square = square + grad.square().sum()
        norm = square.sqrt()
        finite = norm.isfinite()
        for grad in grads.values():
            finite = finite & grad.isfinite().all()
        return grads, norm, finite

    def has_gradient(self, active: ParameterSet) -> Tensor:
        """Return 1 for each parameter with a gradient, 0 for the others."""
        if len(active) == len(self.states):
            return torch.ones_like(self.steps)
        mask = torch.zeros(len(self.states))
        mask[active.indices] = 1.0
        return to_device(mask, self.device)

    def set_rates(self, rows: list[Rates]) -> None:
        """Set `rates`: a row of hyper-parameters for each of the `classes`."""
        if rows != self._last_rows:
            # Sent to the device only if a scheduler has changed something.
            self._last_rows = rows
            self.rates = to_device(torch.tensor(rows, dtype=torch.float64), self.device)

    def write_factors_(self) -> None:
        """Compute the factors of this step and the next from the current multipliers."""
        for packed in self.packed.values():
            packed.write_factors_()
            packed.write_factors_(following=True)

    # -- construction -------------------------------------------------------------------------

    def _set_tensors(self, state: ParameterState, saved: dict[Any, dict[str, Any]]) -> None:
        """Set the tensors of one parameter from the saved state; create those that are missing."""
        kept: dict[str, Tensor] = {"step": self.steps[state.index]}
        if MEAN_SQUARE in state.moment_names:
            kept[MEAN_SQUARE] = self.mean_squares[state.index]
        if state.carries:
            packed = self.packed[state.raw_dtype]
            state.multipliers = packed.state_views(state.index)
            state.factors, state.next_factors, state.sums = packed.feature_views(state.index)
            kept |= state.multipliers
        owns_raw = state.carries or state.weight.dtype != state.raw_dtype
        own = [name for name in state.moment_names if name != MEAN_SQUARE]
        for key in ("raw", *own) if owns_raw else own:
            kept[key] = torch.zeros_like(
                state.weight, dtype=state.raw_dtype, memory_format=torch.contiguous_format
            )
        existing = dict(saved[state.parameter])
        if not owns_raw:
            # Saved under a plan with multipliers here; now the parameter itself is trained.
            existing.pop("raw", None)
        for key, value in kept.items():
            if key in existing:
                value.copy_(local(existing[key]).to(value.device))
        state.owns_raw = owns_raw
        state.raw = kept["raw"] if owns_raw else state.weight
        state.moments = tuple(kept[name] for name in own)
        sharded = shard_state(kept, state.parameter, state.matrix)
        state.step = sharded["step"]
        state.kept = tuple(sharded.values())
        others = {key: value for key, value in existing.items() if key not in sharded}
        saved[state.parameter] = {**sharded, **others}

    def _classify(self) -> None:
        """Group parameters that share all hyper-parameters: few classes for any model."""
        classes: dict[tuple[Any, ...], int] = {}
        self.classes: list[ParameterState] = []
        """One parameter of each class."""
        class_of = []
        for state in self.states:
            key = (id(state.group), state.moment_names)
            if key not in classes:
                classes[key] = len(classes)
                self.classes.append(state)
            class_of.append(classes[key])
        self.class_of = torch.tensor(class_of, device=self.device)
        self._last_rows: list[Rates] = []


def _device_of(states: list[ParameterState]) -> torch.device:
    devices = {state.weight.device for state in states}
    if len(devices) > 1:
        raise ValueError(f"parameters lie on several devices: {sorted(map(str, devices))}")
    device = devices.pop()
    if device.type == "meta":
        raise ValueError(
            "the parameters are on the meta device: give the model its weights (to_empty, "
            "load_state_dict(..., assign=True)), then make the optimizer"
        )
    return device
