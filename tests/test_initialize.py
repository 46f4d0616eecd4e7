"""Initial values: a model's own fixed multipliers folded in, and numbers."""

import pytest
import torch

import learnable_multipliers as lrm
from families import build, logits
from learnable_multipliers import Rule
from tolerance import TOLERANCE

F64 = TOLERANCE[torch.float64]
MUP = {
    "embedding_multiplier": 5.656854249492381,
    "lm_head_multiplier": 0.0390625,
    "key_multiplier": 0.39062499999999994,
    "attention_in_multiplier": 0.75,
    "attention_out_multiplier": 0.9375,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226039551587,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}
BIASES = {
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_proj_bias": True,
    "projectors_bias": True,
}
FOLD = [Rule("", init="fold")]


def mup_model(**overrides):
    return build("falcon-h1", dtype=torch.float64, **{**MUP, **overrides})


@pytest.mark.parametrize("biases", [{}, BIASES], ids=["no-bias", "bias"])
def test_fold_keeps_the_function_and_starts_multipliers_at_the_models_values(biases):
    model = mup_model(**biases)
    before = logits(model)
    raw = model.model.layers[0].self_attn.k_proj.weight.detach().clone()

    plan = lrm.initialize_(model, lrm.plan(model, "full", FOLD))
    torch.testing.assert_close(logits(model), before, rtol=1e-6, atol=1e-7)
    assert model.config.key_multiplier == 1.0
    assert model.config.mlp_multipliers == [1.0, 1.0]
    assert model.config.ssm_multipliers == [1.0] * 5
    assert model.model.layers[1].mamba.mup_vector.unique().tolist() == [1.0]
    # The head carries nothing, so its constant stays.
    assert model.config.lm_head_multiplier == MUP["lm_head_multiplier"]

    lrm.reparametrize(model, plan)
    torch.testing.assert_close(logits(model), before, rtol=1e-6, atol=1e-7)
    values = lrm.multipliers(model)
    layer = "model.layers.0."
    key = values[f"{layer}self_attn.k_proj.weight"]
    expected = MUP["key_multiplier"] * MUP["attention_in_multiplier"]
    torch.testing.assert_close(key["row"], torch.full_like(key["row"], expected), **F64)
    assert (key["col"] == 1).all()
    k_proj = model.model.layers[0].self_attn.k_proj
    torch.testing.assert_close(k_proj.parametrizations.weight.original, raw, **F64)
    in_proj = values[f"{layer}mamba.in_proj.weight"]["row"].split([32, 32, 8, 8, 4])
    for block, constant in zip(in_proj, MUP["ssm_multipliers"], strict=True):
        expected = torch.full_like(block, constant * MUP["ssm_in_multiplier"])
        torch.testing.assert_close(block, expected, **F64)


def test_folded_config_gives_the_same_model_again():
    """What is exported after folding is an ordinary Falcon-H1 without constants."""
    from transformers import FalconH1ForCausalLM

    model = mup_model()
    before = logits(model)
    lrm.initialize_(model, lrm.plan(model, "full", FOLD))
    again = FalconH1ForCausalLM(model.config).double().eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(again), before, rtol=1e-6, atol=1e-7)


def test_constants_of_matrices_without_multipliers_stay_and_the_plan_lists_them():
    model = mup_model()
    before = logits(model)
    plan = lrm.plan(model, "symmetry-aware", FOLD)
    folded = dict(plan.folds)
    assert "mlp_multipliers[0]" in folded
    assert "ssm_multipliers[0]" in folded
    assert "key_multiplier" not in folded
    assert "ssm_multipliers[1]" not in folded
    assert "key_multiplier stays fixed at 0.390625" in str(plan)
    plan = lrm.initialize_(model, plan)
    torch.testing.assert_close(logits(model), before, rtol=1e-6, atol=1e-7)
    assert model.config.key_multiplier == MUP["key_multiplier"]
    assert model.config.ssm_multipliers == [1.0, 0.25, 0.3535533905932738, 0.5, 1.0]


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_fold_works_on_either_scale_and_for_scalars(scale):
    model = mup_model()
    before = logits(model)
    plan = lrm.plan(model, "scalar", [Rule("", init="fold", scale=scale)])
    lrm.reparametrize(model, lrm.initialize_(model, plan))
    torch.testing.assert_close(logits(model), before, rtol=1e-6, atol=1e-7)
    scalars = lrm.multipliers(model)["model.layers.0.mamba.in_proj.weight"]["scalar"]
    expected = torch.tensor(MUP["ssm_multipliers"]).double() * MUP["ssm_in_multiplier"]
    torch.testing.assert_close(scalars, expected, rtol=1e-6, atol=1e-7)


def test_number_keeps_the_function_unless_a_rule_keeps_the_raw_weight():
    model = build("llama", dtype=torch.float64)
    before = logits(model)
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    plan = lrm.plan(model, "full", [Rule("up_proj", init=0.25)])
    lrm.reparametrize(model, plan)
    torch.testing.assert_close(logits(model), before, **F64)
    raw = model.model.layers[0].mlp.up_proj.parametrizations.weight.original
    torch.testing.assert_close(raw, weight / 0.25, **F64)


def test_number_that_keeps_the_raw_weight_changes_the_function_on_purpose():
    model = build("llama", dtype=torch.float64)
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    plan = lrm.plan(model, "full", [Rule("up_proj", init=0.25, init_keeps="raw")])
    with pytest.raises(ValueError, match=r"plan = lrm.initialize_\(model, plan\)"):
        lrm.reparametrize(model, plan)
    with pytest.raises(ValueError, match=r"plan = lrm.initialize_\(model, plan\)"):
        lrm.param_groups(model, plan)
    lrm.reparametrize(model, lrm.initialize_(model, plan))
    up = model.model.layers[0].mlp.up_proj
    torch.testing.assert_close(up.parametrizations.weight.original, weight, **F64)
    torch.testing.assert_close(up.weight, 0.25 * weight, **F64)


def test_folding_twice_raises():
    model = mup_model()
    plan = lrm.plan(model, "full", FOLD)
    done = lrm.initialize_(model, plan)
    with pytest.raises(ValueError, match="was it folded already"):
        lrm.initialize_(model, plan)
    weight = model.model.embed_tokens.weight.detach().clone()
    assert lrm.initialize_(model, done) == done
    torch.testing.assert_close(model.model.embed_tokens.weight.detach(), weight, rtol=0, atol=0)


def test_fold_without_fixed_multipliers_raises():
    with pytest.raises(ValueError, match="has none that are known"):
        lrm.plan(build("llama"), "full", FOLD)


def test_initial_value_needs_a_multiplier():
    with pytest.raises(ValueError, match="carries no multiplier; give the rule a kind"):
        lrm.plan(build("llama"), "full", [Rule("lm_head", init=0.5)])
