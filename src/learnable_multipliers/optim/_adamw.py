"""AdamW whose weights carry learnable multipliers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.optim._groups import MULTIPLIER_WEIGHT_DECAY


class AdamW(MultiplierOptimizer):
    """`torch.optim.AdamW` on raw weights, multipliers and everything else.

    Takes the groups of `lrm.param_groups(model, plan)`, or plain parameters, which then carry
    nothing. Multipliers train at `lr * multiplier_lr_scale`, so that schedulers move them too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        multiplier_lr_scale: float = 1.0,
        multiplier_weight_decay: float = MULTIPLIER_WEIGHT_DECAY,
        max_grad_norm: float | None = None,
        backend: Backend = "auto",
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "multiplier_lr_scale": multiplier_lr_scale,
            "multiplier_weight_decay": multiplier_weight_decay,
        }
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, backend=backend)
