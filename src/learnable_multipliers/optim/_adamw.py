"""AdamW whose weights carry learnable multipliers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from learnable_multipliers.kernels._backend import Backend
from learnable_multipliers.optim._base import MultiplierOptimizer, check_fused_and_foreach


class AdamW(MultiplierOptimizer):
    """`torch.optim.AdamW` on raw weights, multipliers and everything else.

    Create it by `lrm.AdamW.from_model(model)`, or from `lrm.param_groups(model, plan)`.
    Multipliers train at `lr * multiplier_lr_scale`, so that schedulers move them too.

    Args:
        lr: 1e-3 if neither this argument nor the groups set it; likewise `weight_decay` 0.1,
            `multiplier_lr_scale` 1 and `multiplier_weight_decay` 2e-3.
        max_grad_norm: Clip by the norm of the raw weights' gradients, as part of the step.
        clip_multipliers: Include the multipliers' gradients in that norm.
        process_group: The ranks that hold replicas of these parameters, as under
            DistributedDataParallel: they agree on which steps to skip.
        backend: Kernels to run. `fused` or `foreach` is accepted as by torch, and has no effect:
            every step is fused.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        multiplier_lr_scale: float | None = None,
        multiplier_weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        clip_multipliers: bool = False,
        backend: Backend = "auto",
        process_group: Any = None,
        fused: bool | None = None,
        foreach: bool | None = None,
    ):
        check_fused_and_foreach(fused, foreach)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "multiplier_lr_scale": multiplier_lr_scale,
            "multiplier_weight_decay": multiplier_weight_decay,
        }
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            clip_multipliers=clip_multipliers,
            backend=backend,
            process_group=process_group,
        )
