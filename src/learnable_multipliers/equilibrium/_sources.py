"""The tensors to read: those of an optimizer of this library, or of a plain one with its model.

A plain torch optimizer has no plan and no names. Names come from the model, by the identity of
parameters; roles of matrices come from a plan without multipliers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnable_multipliers._names import named_parameters
from learnable_multipliers._plan import PlanEntry
from learnable_multipliers._planner import plan
from learnable_multipliers.equilibrium._prediction import TensorWalk, TrainedTensor, trained_tensors
from learnable_multipliers.equilibrium._random_walk import RandomWalk, adamw_walk, muon_walk
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._orthogonalization import COEFFICIENTS
from learnable_multipliers.optim._sharding import full
from learnable_multipliers.optim._unwrap import innermost

_KNOWN = "torch.optim.AdamW, Adam and Muon"


class Source:
    """The tensors that an optimizer trains, whichever optimizer it is."""

    ours: MultiplierOptimizer | None
    """The optimizer if it is one of this library."""

    def __init__(self, optimizer: Optimizer, model: nn.Module | None):
        inner = innermost(optimizer)
        self.optimizer: Optimizer = inner
        self.ours = inner if isinstance(inner, MultiplierOptimizer) else None
        self._entries: dict[int, PlanEntry] = {}
        name = type(optimizer).__name__
        if self.ours is not None:
            if model is not None:
                raise ValueError(
                    f"`model` has no effect with {name}, which knows the names of its parameters: "
                    "leave it out"
                )
            return
        if model is None:
            raise TypeError(
                f"expected an optimizer of this library, got {name}; give its model, too, to read "
                "one of torch as it is (model=model), or wrap it: "
                "lrm.LearnableMultipliers(optimizer, model, plan)"
            )
        _check_known(inner)
        planned = plan(model, "none")
        self._entries = {id(p): planned[name] for name, p in named_parameters(model)}
        _check_names(inner, self._entries)

    @property
    def is_plain(self) -> bool:
        """Whether it is a torch optimizer, whose weights carry no multipliers."""
        return self.ours is None

    @property
    def lr(self) -> float:
        """Base learning rate now: that of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def counts_steps(self) -> bool:
        """Whether its state has the number of steps: that of `torch.optim.Muon` does not."""
        return not isinstance(self.optimizer, torch.optim.Muon)

    @property
    def num_skipped(self) -> int:
        """Number of skipped steps; torch optimizers are not called for those."""
        return 0 if self.ours is None else self.ours.num_skipped

    def tensors(self, steps: int = 0) -> Iterator[TrainedTensor]:
        """Yield the trained tensors; `steps` is for an optimizer that does not count them."""
        if self.ours is not None:
            yield from trained_tensors(self.ours)
            return
        for group in self.optimizer.param_groups:
            rate = float(group["lr"])
            share = rate / self.lr if rate and self.lr else 1.0
            for parameter in group["params"]:
                state, entry = self.optimizer.state.get(parameter, {}), self._entries[id(parameter)]
                read = (
                    _muon_tensor if isinstance(self.optimizer, torch.optim.Muon) else _adam_tensor
                )
                yield read(parameter, state, group, entry, share, steps)


def _adam_tensor(
    parameter: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    entry: PlanEntry,
    share: float,
    steps: int,
) -> TrainedTensor:
    """Read a parameter of torch.optim.AdamW or Adam."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    steps, value = int(state.get("step", 0)), full(parameter.detach())
    first = full(state["exp_avg"]) if steps else None
    second = full(state["exp_avg_sq"]) if steps else None
    walk: RandomWalk | None = adamw_walk(beta1)
    decay = float(group["weight_decay"])
    if decay and not group.get("decoupled_weight_decay", False):
        if first is None or second is None:
            walk = None
        else:
            # Adam's decay is part of the gradient: divided by its rms, and inside the momentum.
            first = first - (1 - beta1**steps) * decay * value
            size = (second.double() / (1 - beta2**steps)).sqrt().mean().item()
            walk, decay = (walk, decay / size) if size else (None, decay)
    return _trained(
        entry, value, walk and TensorWalk(walk, share, decay), steps, first, second, (beta1, beta2)
    )


def _muon_tensor(
    parameter: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    entry: PlanEntry,
    share: float,
    steps: int,
) -> TrainedTensor:
    """Read a parameter of torch.optim.Muon, which keeps one moment."""
    momentum, first = float(group["momentum"]), state.get("momentum_buffer")
    polynomials = (tuple(group["ns_coefficients"]),) * int(group["ns_steps"])
    walk = None
    if polynomials == COEFFICIENTS["quintic"]:
        rule = group["adjust_lr_fn"] or "original"
        walk = _stored_walk(momentum, bool(group["nesterov"]), rule, tuple(parameter.shape))
    return _trained(
        entry,
        full(parameter.detach()),
        walk and TensorWalk(walk, share, float(group["weight_decay"])),
        0 if first is None else steps,
        None if first is None else full(first),
        None,
        (momentum, 0.0),
    )


@lru_cache(maxsize=256)
def _stored_walk(momentum: float, nesterov: bool, rule: Any, shape: Any) -> RandomWalk:
    """Return the walk of a matrix that torch's Muon orthogonalizes as a whole, as stored."""
    return muon_walk(momentum, nesterov, adjust_lr=rule, shape=shape, coefficients="quintic")


def _trained(
    entry: PlanEntry,
    value: Tensor,
    walk: TensorWalk | None,
    steps: int,
    first: Tensor | None,
    second: Tensor | None,
    betas: tuple[float, float],
) -> TrainedTensor:
    return TrainedTensor(
        name=entry.name,
        part="weight",
        kind="vector" if entry.vector else "matrix",
        matrix=entry.matrix,
        value=value,
        start_rms=None,
        walk=walk,
        steps=steps,
        first=first,
        second=second,
        betas=betas,
    )


def _check_known(optimizer: Any) -> None:
    """Raise if an optimizer's state cannot be read."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.Muon):
        why = "keeps no second moment" if name == "SGD" else "is not known here"
        raise TypeError(
            f"{name} {why}, so that noise predicts nothing of its weights: {_KNOWN} can be read "
            "as they are"
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError(
            f"{name} with amsgrad=True divides by the largest second moment so far, and the rms "
            "that noise gives such weights is not known: use amsgrad=False"
        )


def _check_names(optimizer: Optimizer, entries: dict[int, PlanEntry]) -> None:
    """Raise if an optimizer trains parameters that its model does not have."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [parameter for parameter in parameters if id(parameter) not in entries]
    if foreign:
        raise ValueError(
            f"the model does not have {len(foreign)} of the {len(parameters)} parameters that the "
            f"optimizer trains, the first of shape {tuple(foreign[0].shape)}: give the model that "
            "the optimizer was made for, as it is now (a copy of it, or one moved to another "
            "device by a wrapper, has other parameters)"
        )
