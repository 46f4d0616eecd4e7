"""Muown (arXiv 2605.10797): Muon on the directions of rows, Adam on their magnitudes.

    W = g v / |v| for each row,   u = v / |v|
    dL/dg = sum G u,   dL/dv = (g / |v|) (G - u dL/dg)

Muon (without Nesterov momentum) trains v, Adam trains g, which alone decays. Both have the learning
rate of the matrix. Of v only the norms of its rows are kept: W and g give the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.optim._batches import lr_factor
from learnable_multipliers.pretrain.rivals.rival import Rival, adam_, each, orthogonalized, write_

_SMALLEST = 1e-12
"""Norm of a row of zeros."""
_MOMENTS = ("magnitude_exp_avg", "magnitude_exp_avg_sq")


class Muown(Rival):
    """Muon that holds row norms apart."""

    def step_hidden_(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Train directions and magnitudes of rows."""
        lr = group["lr"]
        grads, states = self.grads_and_states(weights, "momentum_buffer")
        for weight, state in zip(weights, states, strict=True):
            if "magnitude" not in state:
                norm = torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp_min(_SMALLEST)
                state |= {"magnitude": norm.clone(), "direction_norm": norm}
                state |= {name: torch.zeros_like(norm) for name in _MOMENTS}
        magnitudes, norms = each(states, "magnitude"), each(states, "direction_norm")
        lists = weights, grads, magnitudes, norms
        v, grad_g, grad_v = split(*(torch.stack(tensors) for tensors in lists))

        momenta = each(states, "momentum_buffer")
        momentum = torch.stack(momenta).lerp_(grad_v, 1 - group["momentum"])
        write_(momenta, momentum)
        v -= lr * lr_factor("match_rms_adamw", *v.shape[1:]) * orthogonalized(momentum)
        v_norm = torch.linalg.vector_norm(v, dim=2, keepdim=True).clamp_min(_SMALLEST)
        write_(norms, v_norm)

        step = adam_(grad_g.unbind(), states, _MOMENTS, group["betas"], group["eps"])
        g = torch.stack(magnitudes).sub_(step, alpha=lr).mul_(1 - lr * group["weight_decay"])
        write_(magnitudes, g)
        write_(weights, g * v / v_norm)


def split(weight: Tensor, grad: Tensor, g: Tensor, v_norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return v and the gradients of g and v from those of the weight, in batches."""
    u = weight / g
    grad_g = (grad * u).sum(2, keepdim=True)
    return u * v_norm, grad_g, (g / v_norm) * (grad - u * grad_g)
