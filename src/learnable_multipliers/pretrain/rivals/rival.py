"""What all rivals share: AdamW's and Muon's updates, and a step that subclasses change.

A hidden matrix W is trained by an update U, as W <- (1 - lr wd) W - lr U. Everything else is
trained by AdamW. Rivals differ in U or in what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from learnable_multipliers.optim._batches import lr_factor, update_dtype
from learnable_multipliers.optim._newton_schulz import orthogonalize

Kind = Literal["adamw", "muon"]


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
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            if group["role"] == "hidden":
                self.step_hidden_(weights, group)
            else:
                rest = {**group, "lr": group["lr"] * group["adamw_lr_scale"]}
                self.apply_(weights, self.adamw_updates(weights, rest), rest)
        return loss

    def step_hidden_(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Train hidden matrices."""
        updates = self.muon_updates if self.kind == "muon" else self.adamw_updates
        self.apply_(weights, updates(weights, group), group)

    def apply_(
        self, weights: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]
    ) -> None:
        """Take a step along updates: W <- (1 - lr wd) W - lr U."""
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

    def adamw_updates(self, weights: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return m / (sqrt(v) + eps) of each gradient, both corrected for their start."""
        updates = []
        for weight in weights:
            grad, state = self.grad_and_state(weight, "exp_avg", "exp_avg_sq")
            state["step"] += 1
            moments = state["exp_avg"], state["exp_avg_sq"]
            updates.append(adam_(grad, *moments, state["step"], group["betas"], group["eps"]))
        return updates

    def muon_updates(self, weights: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the orthogonalized momentum of each gradient, in AdamW's size."""
        momenta = [self.nesterov_momentum(weight, group["momentum"]) for weight in weights]
        orthogonal = orthogonalized(momenta)
        return [update * lr_factor("match_rms_adamw", *update.shape) for update in orthogonal]

    def nesterov_momentum(self, weight: Tensor, momentum: float) -> Tensor:
        """Return the averaged gradient of a matrix with a look ahead."""
        grad, state = self.grad_and_state(weight, "momentum_buffer")
        return grad.lerp(state["momentum_buffer"].lerp_(grad, 1 - momentum), momentum)

    def grad_and_state(self, weight: Tensor, *zeros: str) -> tuple[Tensor, dict[str, Any]]:
        """Return the gradient of a weight and its state, with a step and zeros at first."""
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            # On the host, so that nothing waits for it.
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(weight) for name in zeros}
        return weight.grad, state


def adam_(
    grad: Tensor, m: Tensor, v: Tensor, steps: Tensor, betas: tuple[float, float], eps: float
) -> Tensor:
    """Average a gradient and its square in place; return Adam's update."""
    (beta1, beta2), step = betas, steps.item()
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)


def orthogonalized(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return U V^T of each matrix U S V^T by Newton-Schulz, those of one shape together."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    found: dict[int, Tensor] = {}
    for indices in by_shape.values():
        batch = torch.stack([matrices[index] for index in indices])
        done = orthogonalize(batch.to(update_dtype(batch)), "quintic").to(batch.dtype)
        found |= dict(zip(indices, done.unbind(), strict=True))
    return [found[index] for index in range(len(matrices))]
