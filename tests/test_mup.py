"""Table 1 and Falcon-H1's published numbers, from recipe to rules and model fields."""

import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers import mup
from learnable_multipliers.equilibrium import equilibrium_rms
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.roles import ROLES

DOCUMENT = Path(__file__).parent.parent / "docs" / "mup.md"

# -- table 1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lr", "weight_decay", "multiplier", "output", "relative_update"),
    [
        ("lr", -1, 0, 0, 1 / 2, -1 / 2),
        ("lr-wd", -1, 1, 0, 0, 0),
        ("multiplier", 0, 0, -1, 0, 0),
    ],
)
def test_recipes_are_the_rows_of_table_1(
    name, lr, weight_decay, multiplier, output, relative_update
):
    recipe = mup.RECIPES[name]
    assert (recipe.lr, recipe.weight_decay, recipe.multiplier) == (lr, weight_decay, multiplier)
    assert (recipe.output, recipe.relative_update) == (output, relative_update)


def test_scaling_by_hand():
    assert mup.scale_layer(mup.RECIPES["lr"], 1024, 256) == mup.Scaling(lr=0.25)
    assert mup.scale_layer(mup.RECIPES["lr-wd"], 1024, 256) == mup.Scaling(lr=0.25, weight_decay=4)
    assert mup.scale_layer(mup.RECIPES["multiplier"], 64, 256) == mup.Scaling(multiplier=4)
    assert mup.scale_layer(mup.RECIPES["none"], 64, 256) == mup.Scaling()


@pytest.mark.parametrize("name", mup.RECIPES)
def test_predicted_power_of_the_weight_is_that_of_the_equilibrium(name):
    recipe = mup.RECIPES[name]
    lr, weight_decay, widths = 1e-7, 0.1, [256, 512, 1024, 4096]
    scalings = [mup.scale_layer(recipe, width, 256) for width in widths]
    norms = [equilibrium_rms(lr * s.lr, weight_decay * s.weight_decay) for s in scalings]
    assert mup.fit_exponent(widths, norms).value == pytest.approx(recipe.weight, abs=1e-6)


def test_a_role_is_scaled_by_what_it_reads():
    width = mup.Widths(hidden=512, attention=256, mlp=2048, ssm=768)
    base = mup.Widths(hidden=256, attention=256, mlp=512, ssm=256)
    scalings = mup.scale_roles(mup.RECIPES["multiplier"], width, base)
    expected = {"head": 1 / 2, "query": 1 / 2, "gate": 1 / 2, "up": 1 / 2, "ssm-dt": 1 / 2}
    expected |= {"attention-out": 1, "down": 1 / 4, "ssm-out": 1 / 3, "embedding": 1}
    assert {role: scalings[role].multiplier for role in expected} == pytest.approx(expected)
    assert set(scalings) == set(ROLES) - {"unknown"}
    whole = mup.scale_roles(mup.RECIPES["multiplier"], 512, 256)
    assert whole["down"].multiplier == whole["ssm-out"].multiplier == 1 / 2


def test_widths_given_on_one_side_alone_raise():
    with pytest.raises(ValueError, match="`mlp` is 512 at this width and None"):
        mup.scale_roles(mup.RECIPES["lr"], mup.Widths(hidden=64, mlp=512), 32)
    with pytest.raises(ValueError, match="fan_in counts features"):
        mup.scale_layer(mup.RECIPES["lr"], 0, 32)


# -- rules and fields ------------------------------------------------------------------------


def settings_by_name(model, rules, weight_decay):
    plan = lrm.plan(model, rules=rules)
    groups = lrm.param_groups(model, plan, weight_decay=weight_decay)
    return {
        name: (group["raw_lr_scale"], group["weight_decay"])
        for group in groups
        for name, _ in group["params"]
    }


def test_rules_bring_learning_rates_and_decays_into_the_groups():
    scalings = mup.scale_roles(mup.RECIPES["lr-wd"], 128, 32)
    model = build(PRESETS["tiny"])
    settings = settings_by_name(model, mup.rules(scalings, weight_decay=0.1), 0.1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            assert settings[name] == (1 / 4, 0.4), name
        elif "embed" in name:
            assert settings[name] == (1.0, 0.1)
        else:
            assert settings[name] == (1.0, 0.0), name


def test_a_matrix_whose_role_a_rule_sets_is_scaled_by_it():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    scaled = mup.rules(mup.scale_roles(mup.RECIPES["lr"], 8, 2), weight_decay=0.1)
    rule = lrm.Rule(r"1\.weight", role="down", optional=True)
    settings = settings_by_name(model, [*scaled, rule], 0.1)
    assert settings["0.weight"] == (1.0, 0.1)
    assert settings["1.weight"] == (0.25, 0.1)


def test_tuned_rates_multiply_the_recipe_and_reach_vectors():
    scalings = mup.scale_roles(mup.RECIPES["lr"], 64, 32)
    tuned = mup.TunedRates(
        lr={"gate": 3.0}, weight_decay={"gate": 5.0, "embedding": 2.0}, vector_lr={r"norm": 7.0}
    )
    model = build(PRESETS["tiny"])
    settings = settings_by_name(model, mup.rules(scalings, weight_decay=0.1, tuned=tuned), 0.1)
    layer = "model.layers.0"
    assert settings[f"{layer}.feed_forward.gate_proj.weight"] == (1.5, 0.5)
    assert settings[f"{layer}.feed_forward.up_proj.weight"] == (0.5, 0.1)
    assert settings["model.embed_tokens.weight"] == (1.0, 0.2)
    assert settings[f"{layer}.input_layernorm.weight"] == (7.0, 0.0)
    assert settings[f"{layer}.mamba.A_log"] == (1.0, 0.0)
    with pytest.raises(ValueError, match="unknown role 'gates'; closest: gate"):
        mup.TunedRates(lr={"gates": 2.0})
    with pytest.raises(ValueError, match=r"weight_decay\['gate'\] is a factor above 0"):
        mup.TunedRates(weight_decay={"gate": 0.0})


def test_scaled_multipliers_are_not_dropped_silently():
    scalings = mup.scale_roles(mup.RECIPES["multiplier"], 64, 32)
    with pytest.raises(ValueError, match="multipliers='learned'"):
        mup.rules(scalings, weight_decay=0.1)
    with pytest.raises(ValueError, match="'fixed' or 'learned', got 'learn'"):
        mup.rules(scalings, weight_decay=0.1, multipliers="learn")


def uneven_scalings():
    """Each role its own factor, so that none can stand in for another."""
    names = [role for role in ROLES if role != "unknown"]
    return {role: mup.Scaling(multiplier=1 + 0.1 * place) for place, role in enumerate(names)}


def test_fields_do_what_scaled_matrices_do():
    config = PRESETS["tiny"]
    scalings = uneven_scalings()
    scaled = build(config).double()
    plan = lrm.plan(scaled)
    with torch.no_grad():
        for name, parameter in plan.resolve(scaled).items():
            entry = plan[name]
            if entry.vector or entry.matrix is None:
                continue
            sizes = [block.size for block in entry.matrix.blocks]
            for rows, block in zip(parameter.split(sizes), entry.matrix.blocks, strict=True):
                # A vocabulary by rows, any other matrix as one block or as the mixer's five.
                rows.mul_(scalings[block.role].multiplier)
    fields = build(replace(config, **mup.mup_fields(scalings))).double()
    tokens = torch.arange(60).view(2, 30)
    torch.testing.assert_close(fields(tokens), scaled(tokens), rtol=1e-10, atol=1e-12)


def test_learned_multipliers_start_where_fixed_ones_stand():
    config = replace(PRESETS["tiny"], hidden_size=64)
    scalings = mup.scale_roles(mup.RECIPES["multiplier"], 64, 128)
    fixed = build(replace(config, **mup.mup_fields(scalings))).double()
    model = build(config).double()
    rules = mup.rules(scalings, weight_decay=0.1, multipliers="learned")
    plan = lrm.initialize_(model, lrm.plan(model, rules=rules))
    tokens = torch.arange(60).view(2, 30)
    torch.testing.assert_close(model(tokens), fixed(tokens), rtol=1e-10, atol=1e-12)
    optimizer = lrm.AdamW(lrm.param_groups(model, plan))
    assert lrm.multipliers(optimizer)["lm_head.weight"]["scalar"].item() == 2.0


# -- Falcon-H1 -------------------------------------------------------------------------------

SAME = "same"
# Published values of 0.5B, 1.5B-Deep, 7B and 34B, with the digits that are public.
PUBLISHED = {
    "mup_embedding": ("5.656854249492381", "5.656854249492381", SAME, SAME),
    "mup_head": ("0.0390625", "0.03125", "0.013020833~", "0.0078125"),
    "mup_key": (
        "0.39062499999999994",
        "0.17677669529663687",
        "0.030690398488999456",
        "0.011048543456039804",
    ),
    "mup_attention_in": ("1.0", "1.0", "1.0", "1.0"),
    "mup_attention_out": ("0.9375", "0.5", "0.10416667~", "0.0375"),
    "mup_ssm_in": ("1.25", "1.0", "0.41666667~", "0.25"),
    "mup_ssm_out": (
        "0.23570226039551587",
        "0.23570226039551587",
        "0.11785113~",
        "0.08838834764831845",
    ),
    "mup_gate": (
        "0.8838834764831844",
        "0.7071067811865476",
        "0.2946278254943948",
        "0.1767766952966369",
    ),
    "mup_down": ("0.5859375", "0.3125", "0.032552083~", "0.011160714285714284"),
    "mup_z": ("0.3535533905932738", SAME, SAME, SAME),
    "mup_x": ("0.25", "0.25", "0.25", "0.25"),
    "mup_B": ("0.3535533905932738", "0.1767766952966369", "0.17677670~", "0.17677670~"),
    "mup_C": ("0.5", "0.5", "0.5", "0.5"),
    "mup_dt": ("0.3535533905932738", SAME, SAME, SAME),
}
SIZES = ("hidden_size", "intermediate_size", "attention_size", "head_dim", "ssm_size")
SHAPES = (
    (1024, 2048, 512, 64, 1536, 128),
    (1280, 3072, 768, 128, 1536, 256),
    (3072, 12288, 1536, 128, 3072, 256),
    (5120, 21504, 2560, 128, 4096, 256),
)


def falcon_h1_shape(sizes):
    return mup.FalconH1Shape(**dict(zip((*SIZES, "ssm_state_size"), sizes, strict=True)))


def test_width_rules_give_all_56_published_multipliers():
    compared = 0
    for size, sizes in enumerate(SHAPES):
        multipliers = mup.falcon_h1_multipliers(falcon_h1_shape(sizes))
        assert set(multipliers) == set(PUBLISHED)
        for name, by_size in PUBLISHED.items():
            published = by_size[size] if by_size[size] != SAME else by_size[0]
            if published.endswith("~"):
                # Rounded where it is public: half a unit of its last digit.
                number = Decimal(published[:-1])
                digits = number.as_tuple().exponent
                assert abs(Decimal(multipliers[name]) - number) <= Decimal(5).scaleb(digits - 1)
            else:
                # 3e-16 is one unit in the last place.
                assert multipliers[name] == pytest.approx(float(published), rel=3e-16, abs=0)
            compared += 1
    assert compared == 56


def test_preset_holds_the_published_numbers_to_the_last_bit():
    published = {name: float(by_size[0]) for name, by_size in PUBLISHED.items()}
    assert PRESETS["falcon-h1-0.5b"].mup_factors == published


def test_falcon_h1_is_the_multiplier_recipe_where_the_shape_grows_as_a_whole():
    base, twice = mup.FALCON_H1_BASE, replace(mup.FALCON_H1_BASE, hidden_size=2560)
    twice = replace(twice, intermediate_size=6144, attention_size=1536, ssm_size=3072)
    grown, start = (mup.falcon_h1_multipliers(shape) for shape in (twice, base))
    ours = mup.mup_fields(mup.scale_roles(mup.RECIPES["multiplier"], 2560, 1280))
    ratios = {name: grown[name] / start[name] for name in start}
    for name in ("embedding", "head", "ssm_in", "ssm_out", "gate", "down", "z", "x", "B", "C"):
        assert ratios[f"mup_{name}"] == pytest.approx(ours[f"mup_{name}"]), name
    # Ours scales what attention reads: queries, keys and values. Falcon-H1 puts the two powers of
    # queries and keys on the keys, and those of values and outputs on the output.
    into = ours["mup_attention_in"]
    assert ratios["mup_key"] == pytest.approx(into**2 * ours["mup_key"])
    assert ratios["mup_attention_out"] == pytest.approx(into * ours["mup_attention_out"])


# -- the document ----------------------------------------------------------------------------


def test_code_of_the_document_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    assert len(blocks) >= 2
    namespace = {}
    for block in blocks:
        exec(compile(block, DOCUMENT.name, "exec"), namespace)


def test_document_quotes_the_results():
    text = DOCUMENT.read_text()
    results = json.loads((DOCUMENT.parent.parent / "results" / "coordinates.json").read_text())
    for name in ("lr", "multiplier", "none", "learned"):
        runs = [
            mup.Run(**run | {"coordinates": [mup.Coordinates(**c) for c in run["coordinates"]]})
            for run in results["recipes"][name]
        ]
        # Learned multipliers are held against the recipe they should find.
        assert mup.table(runs, mup.RECIPES["multiplier" if name == "learned" else name]) in text
