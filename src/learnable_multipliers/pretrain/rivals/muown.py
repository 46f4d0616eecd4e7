"""Muown (arXiv 2605.10797): Muon on the directions of rows, Adam on their magnitudes.

    W = g v / |v| for each row,   u = v / |v|
    dL/dg = sum G u,   dL/dv = (g / |v|) (G - u dL/dg)

Muon (without a look ahead) trains v, Adam trains g, which alone decays. Both have the learning rate
of the matrix. Of v only the norms of its rows are kept: W and g give the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.optim._batches import lr_factor
from learnable_multipliers.pretrain.rivals.rival import Rival, adam_, orthogonalized

_SMALLEST = 1e-12
"""Norm of a row of zeros."""
_MOMENTS = ("magnitude_exp_avg", "magnitude_exp_avg_sq")


class Muown(Rival):
    """Muon that holds row norms apart."""

    def step_hidden_(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Train directions and magnitudes of rows."""
        lr, parts = group["lr"], []
        for weight in weights:
            grad, state = self.grad_and_state(weight, "momentum_buffer")
            if "magnitude" not in state:
                norm = torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp_min(_SMALLEST)
                state |= {"magnitude": norm.clone(), "direction_norm": norm}
                state |= {name: torch.zeros_like(norm) for name in _MOMENTS}
            state["step"] += 1
            v, grad_g, grad_v = split(weight, grad, state["magnitude"], state["direction_norm"])
            state["momentum_buffer"].lerp_(grad_v, 1 - group["momentum"])
            parts.append((state, v, grad_g))
        updates = orthogonalized([state["momentum_buffer"] for state, _, _ in parts])
        for weight, update, (state, v, grad_g) in zip(weights, updates, parts, strict=True):
            v = v - lr * lr_factor("match_rms_adamw", *weight.shape) * update
            m, v_g = (state[name] for name in _MOMENTS)
            step = adam_(grad_g, m, v_g, state["step"], group["betas"], group["eps"])
            state["magnitude"].sub_(step, alpha=lr).mul_(1 - lr * group["weight_decay"])
            norm = torch.linalg.vector_norm(v, dim=1, keepdim=True)
            state["direction_norm"] = norm.clamp_min(_SMALLEST)
            weight.copy_(state["magnitude"] * v / state["direction_norm"])


def split(weight: Tensor, grad: Tensor, g: Tensor, v_norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return v and the gradients of g and v from those of the weight."""
    u = weight / g
    grad_g = (grad * u).sum(1, keepdim=True)
    return u * v_norm, grad_g, (g / v_norm) * (grad - u * grad_g)
