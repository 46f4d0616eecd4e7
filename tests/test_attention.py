"""Attention: one layout of the gradient that reaches it, and right gradients on a GPU."""

from dataclasses import replace

import pytest
import torch

from learnable_multipliers.pretrain.model import attention
from learnable_multipliers.pretrain.model.hybrid import build
from runs import HYBRID

FACTORS = (1.0, 4.8)


@pytest.mark.parametrize("factor", FACTORS)
def test_the_gradient_of_attention_is_contiguous_in_a_layer_of_joined_projections(
    factor, monkeypatch
):
    attend, strides = attention.F.scaled_dot_product_attention, []

    def recorded(*args, **options):
        y = attend(*args, **options)
        y.register_hook(lambda grad: strides.append(grad.transpose(1, 2).is_contiguous()))
        return y

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    model = build(replace(HYBRID, vocab_size=64, mup_attention_out=factor))
    model.loss(torch.randint(64, (2, 17)), 0.0).total.backward()
    assert strides == [True] * HYBRID.num_layers


@pytest.mark.gpu
@pytest.mark.parametrize("factors", [FACTORS, FACTORS[::-1]])
def test_models_of_other_factors_in_one_process_have_right_gradients(factors):
    # Sizes that nothing else has: torch keeps cuDNN's plans for the life of the process.
    length = 257 if factors[0] == 1.0 else 321
    tokens = torch.randint(64, (3, length), device="cuda")
    for factor in factors:
        shape = replace(
            HYBRID,
            vocab_size=64,
            num_heads=4,
            head_dim=64,
            max_length=512,
            mup_attention_out=factor,
        )
        model = build(shape, device=torch.device("cuda"))
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                model.loss(tokens, 0.0).total.backward()
            found.append([p.grad for n, p in model.named_parameters() if "q_proj" in n])
            model.zero_grad()
        for half, full in zip(*found, strict=True):
            assert (half - full).norm() < 0.05 * full.norm()
