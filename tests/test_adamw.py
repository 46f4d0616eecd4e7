"""Both paths are one method: the optimizer path equals autograd and torch's own AdamW."""

import pytest
import torch
from paths import BETAS, DECAY, EPS, KINDS, MULTIPLIER_DECAY, compare, explicit_run, optimizer_run

import learnable_multipliers as lrm

LR = 3e-2
SCALE = 0.5


def stock(model, plan):
    groups = lrm.param_groups(
        model,
        plan,
        weight_decay=DECAY,
        lr=LR,
        multiplier_lr_scale=SCALE,
        multiplier_weight_decay=MULTIPLIER_DECAY,
    )
    return [torch.optim.AdamW(groups, betas=BETAS, eps=EPS)]


def ours(max_norm=None, backend="auto"):
    def make(model, plan):
        return lrm.AdamW(
            lrm.param_groups(model, plan, weight_decay=DECAY),
            lr=LR,
            betas=BETAS,
            eps=EPS,
            multiplier_lr_scale=SCALE,
            multiplier_weight_decay=MULTIPLIER_DECAY,
            max_grad_norm=max_norm,
            backend=backend,
        )

    return make


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("kind", [*KINDS, "blocks", "interleaved"])
def test_optimizer_path_equals_explicit_path_in_float64(kind, max_norm, micro):
    explicit = explicit_run(kind, torch.float64, stock, micro=micro, max_norm=max_norm)
    optimized = optimizer_run(kind, torch.float64, ours(max_norm), micro=micro)
    compared = compare(explicit, optimized, ("exp_avg", "exp_avg_sq"), rtol=1e-10, atol=1e-10)
    assert {"exp_avg", "exp_avg_sq"} <= compared
    assert any(name.endswith("_exp_avg") for name in compared)
