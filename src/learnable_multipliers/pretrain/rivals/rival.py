"""What all rivals share: AdamW's and Muon's updates, and a step that subclasses change.

A hidden matrix W is trained by an update U, as W <- (1 - lr wd) W - lr U. Everything else is
trained by AdamW. Rivals differ in U or in what becomes of it.

Weights of one shape are trained together, as a batch or by torch._foreach_*: one by one, a step on
a GPU would be thousands of kernels too small to keep it busy. State is kept by weight.
"""

# torch lists its _foreach functions nowhere; its own optimizers are made of them.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers.optim._batches import lr_factor, update_dtype
from learnable_multipliers.optim._newton_schulz import orthogonalize

Kind = Literal["adamw", "muon"]
State = dict[str, Any]
"""Of a weight."""


class Rival(Optimizer):
    """AdamW, or Muon with AdamW for what is not a hidden matrix, without any change yet."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        kind: Kind,
        lr: float,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        adamw_lr_scale: float = 1.0,
    ):
        """Take groups with `role`: hidden matrices, other matrices, the head, or vectors.

        Args:
            adamw_lr_scale: On the learning rate of what is not a hidden matrix.
        """
        self.kind: Kind = kind
        self.peak_lr = lr
        settings = {"betas": betas, "eps": eps, "momentum": momentum}
        settings["adamw_lr_scale"] = adamw_lr_scale
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step with the gradients at hand."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_grad = [weight for weight in group["params"] if weight.grad is not None]
            for weights in of_one_shape(with_grad):
                if group["role"] == "hidden":
                    self.step_hidden_(weights, group)
                else:
                    rest = {**group, "lr": group["lr"] * group["adamw_lr_scale"]}
                    self.apply_(weights, self.adamw_updates(weights, rest), rest)
        return loss

    def step_hidden_(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Train hidden matrices of one shape."""
        updates = self.muon_updates if self.kind == "muon" else self.adamw_updates
        self.apply_(weights, updates(weights, group), group)

    def apply_(self, weights: list[Tensor], updates: Tensor, group: dict[str, Any]) -> None:
        """Take a step along updates (weights, *shape): W <- (1 - lr wd) W - lr U."""
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(weights, updates.unbind(), alpha=group["lr"])

    def adamw_updates(self, weights: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Return m / (sqrt(v) + eps) of each gradient, both corrected for their start."""
        names = "exp_avg", "exp_avg_sq"
        grads, states = self.grads_and_states(weights, *names)
        return adam_(grads, states, names, group["betas"], group["eps"])

    def muon_updates(self, weights: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Return the orthogonalized momentum of each gradient, in AdamW's size."""
        momenta = self.nesterov_momenta(weights, group["momentum"])
        return orthogonalized(momenta) * lr_factor("match_rms_adamw", *momenta.shape[1:])

    def nesterov_momenta(self, weights: list[Tensor], momentum: float) -> Tensor:
        """Return the Nesterov momentum of each matrix."""
        grads, states = self.grads_and_states(weights, "momentum_buffer")
        buffers = each(states, "momentum_buffer")
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        return torch.stack(torch._foreach_lerp(grads, buffers, momentum))

    def grads_and_states(
        self, weights: list[Tensor], *zeros: str
    ) -> tuple[list[Tensor], list[State]]:
        """Return the gradients of weights and their states, with a step and zeros at first."""
        grads, states = [], []
        for weight in weights:
            assert weight.grad is not None
            state = self.state[weight]
            if not state:
                # On the host, so that nothing waits for it.
                state["step"] = torch.zeros(())
                state |= {name: torch.zeros_like(weight) for name in zeros}
            grads.append(weight.grad)
            states.append(state)
        return grads, states


def of_one_shape(weights: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the weights that can be one batch together: of one shape, dtype and device."""
    batches: dict[tuple[Any, ...], list[Tensor]] = {}
    for weight in weights:
        batches.setdefault((weight.shape, weight.dtype, weight.device), []).append(weight)
    return batches.values()


def each(states: Sequence[State], name: str) -> list[Tensor]:
    """Return a tensor of each state."""
    return [state[name] for state in states]


def write_(tensors: list[Tensor], batch: Tensor) -> None:
    """Copy a batch to the tensors that it was made of."""
    torch._foreach_copy_(tensors, batch.unbind())


def adam_(
    grads: list[Tensor] | tuple[Tensor, ...],
    states: Sequence[State],
    names: tuple[str, str],
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """Count a step, average gradients and their squares in place; return Adam's updates."""
    (beta1, beta2), steps = betas, each(states, "step")
    ms, vs = (each(states, name) for name in names)
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(ms, grads, 1 - beta1)
    torch._foreach_mul_(vs, beta2)
    torch._foreach_addcmul_(vs, grads, grads, 1 - beta2)
    # A weight may have missed gradients, so that each has a count of its own.
    counts = torch.stack(steps).tolist()
    sizes = torch._foreach_div(vs, [1 - beta2**count for count in counts])
    torch._foreach_sqrt_(sizes)
    torch._foreach_add_(sizes, eps)
    updates = torch._foreach_div(ms, [1 - beta1**count for count in counts])
    torch._foreach_div_(updates, sizes)
    return torch.stack(updates)


def orthogonalized(batch: Tensor) -> Tensor:
    """Return U V^T of each matrix U S V^T in a batch, by Newton-Schulz."""
    return orthogonalize(batch.to(update_dtype(batch)), "quintic").to(batch.dtype)
