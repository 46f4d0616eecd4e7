"""Placements, rules and the errors a user meets."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from families import VOCABULARY, FusedBlock, HandWritten, build, token_ids
from learnable_multipliers import Rule
from learnable_multipliers._multiplier import scalar_index


def carried(plan):
    """What each logical matrix of layer 0 carries: {role: {"row", "col", "scalar"}}."""
    by_role = {}
    for entry in plan.entries:
        if entry.matrix is None or re.search(r"\.1\.", entry.name):
            continue
        for block in entry.matrix.blocks:
            parts = {"row": block.row, "col": entry.matrix.col, "scalar": block.scalar}
            by_role[block.role] = {name for name, is_carried in parts.items() if is_carried}
    return by_role


# Appendix "Multipliers placement" of the paper, block by block.
PAPER = {
    "embedding": {"row", "col"},
    "head": set(),
    "gate": {"row"},
    "up": set(),
    "down": {"row", "col"},
    "query": {"row"},
    "key": set(),
    "value": set(),
    "attention-out": {"row", "col"},
    "ssm-z": {"row"},
    "ssm-x": set(),
    "ssm-B": set(),
    "ssm-C": set(),
    "ssm-dt": {"row"},
    "ssm-out": {"row", "col"},
}


def test_symmetry_aware_falcon_h1_is_the_papers_appendix():
    assert carried(lrm.plan(build("falcon-h1"), "symmetry-aware")) == PAPER


def test_inner_norm_of_the_ssm_replaces_the_columns_of_its_output():
    expected = {**PAPER, "ssm-out": {"row"}}
    assert carried(lrm.plan(build("falcon-h1-inner-norm"), "symmetry-aware")) == expected


def test_grouped_queries_carry_the_scale_and_not_their_keys_and_values():
    by_role = carried(lrm.plan(build("llama"), "symmetry-aware"))
    assert by_role["query"] == {"row"}
    assert by_role["attention-out"] == {"row", "col"}
    assert by_role["key"] == by_role["value"] == set()


def test_full_placement_is_everything_but_the_head_and_routers():
    by_role = carried(lrm.plan(build("falcon-h1"), "full"))
    assert by_role.pop("head") == set()
    assert all(what == {"row", "col"} for what in by_role.values())
    by_role = carried(lrm.plan(build("mixtral"), "full"))
    assert by_role["router"] == set()
    assert by_role["gate"] == by_role["down"] == {"row", "col"}


def test_scalar_placement_has_one_number_per_logical_matrix():
    plan = lrm.plan(build("falcon-h1"), "scalar")
    in_proj = plan["model.layers.0.mamba.in_proj.weight"].matrix
    assert in_proj.value_shapes() == {"scalar": (5,)}
    assert plan["model.layers.0.self_attn.q_proj.weight"].matrix.value_shapes() == {"scalar": (1,)}
    assert plan["lm_head.weight"].multipliers == "none"


def test_full_placement_of_falcon_h1_half_billion_has_the_published_size():
    """808,816 multipliers beside 521,411,104 parameters, on the meta device."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        vocab_size=32784,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=36,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        mamba_d_ssm=1536,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_rms_norm=False,
    )
    with torch.device("meta"):
        plan = lrm.plan(FalconH1ForCausalLM(config), "full")
    assert plan.num_parameters == 521_411_104
    assert plan.num_multipliers == 808_816
    blocks = plan["model.layers.35.mamba.in_proj.weight"].matrix.blocks
    assert [(block.role, block.size) for block in blocks] == [
        ("ssm-z", 1536),
        ("ssm-x", 1536),
        ("ssm-B", 128),
        ("ssm-C", 128),
        ("ssm-dt", 24),
    ]


def test_rows_and_columns_belong_to_features_however_the_weight_is_stored():
    plan = lrm.plan(build("gpt2"), "full")
    matrix = plan["transformer.h.0.mlp.c_fc.weight"].matrix
    assert matrix.shape == (16, 64)
    assert matrix.value_shapes() == {"row": (64,), "col": (16,)}
    experts = lrm.plan(build("mixtral"), "full")["model.layers.0.mlp.experts.gate_up_proj"].matrix
    assert experts.value_shapes() == {"row": (4, 48), "col": (4, 16)}
    experts = lrm.plan(build("mixtral"), "scalar")["model.layers.0.mlp.experts.down_proj"].matrix
    assert experts.value_shapes() == {"scalar": (4,)}


def test_interleaved_heads_are_a_set_of_rows():
    matrix = lrm.plan(build("gpt-neox"), "symmetry-aware")[
        "gpt_neox.layers.0.attention.query_key_value.weight"
    ].matrix
    assert matrix.repeats == 4
    assert [(b.role, b.size, b.row) for b in matrix.blocks] == [
        ("query", 4, True),
        ("key", 4, False),
        ("value", 4, False),
    ]


def test_tied_embedding_gets_columns_only_with_the_reason():
    plan = lrm.plan(build("llama-tied"), "full")
    entry = plan["lm_head.weight"]
    assert entry.name == "model.embed_tokens.weight"
    assert entry.role == "tied-embedding"
    assert entry.multipliers == "col"
    assert "single logits" in entry.reason
    assert "also lm_head.weight" in str(plan)


def test_frozen_norms_leave_the_columns_to_multipliers():
    """The paper's untried variant: norm weights out, columns on every matrix behind them."""
    model = build("falcon-h1")
    for name, parameter in model.named_parameters():
        if re.search(r"layers\.\d+\.\w*norm", name):
            parameter.requires_grad_(False)
    by_role = carried(lrm.plan(model, "symmetry-aware"))
    assert by_role["gate"] == by_role["query"] == by_role["ssm-z"] == {"row", "col"}
    assert by_role["up"] == by_role["key"] == by_role["value"] == by_role["ssm-x"] == {"col"}


def test_relu_makes_the_rows_in_front_of_it_redundant():
    plan = lrm.plan(build("opt", activation_function="relu"), "symmetry-aware")
    assert carried(plan)["ungated-up"] == set()
    plan = lrm.plan(build("opt", activation_function="gelu"), "symmetry-aware")
    assert carried(plan)["ungated-up"] == {"row"}


def test_hand_written_model_is_read_by_its_groups():
    by_role = carried(lrm.plan(HandWritten(), "symmetry-aware"))
    expected = {role: what for role, what in PAPER.items() if not role.startswith("ssm")}
    assert by_role == expected


def test_fused_matrix_of_unknown_layout_is_unknown_and_never_guessed():
    model = FusedBlock()
    plan = lrm.plan(model, "full")
    assert plan["attn.qkv.weight"].role == "unknown"
    assert plan["attn.qkv.weight"].multipliers == "row+col"
    assert plan["to_tokens.weight"].role == "head"
    assert plan["mlp.0.weight"].role == "ungated-up"
    assert plan["mlp.3.weight"].role == "down"
    with pytest.raises(ValueError, match=r"needs the role of attn\.qkv\.weight .*Rule\("):
        lrm.plan(model, "symmetry-aware")


def test_rule_sets_the_split_of_a_fused_matrix():
    rules = [
        Rule(r"qkv\.weight", split={"query": 4, "key": 4, "value": 4}, repeats=4),
        Rule(r"proj\.weight", role="attention-out"),
    ]
    plan = lrm.plan(FusedBlock(), "symmetry-aware", rules)
    assert carried(plan)["query"] == {"row", "col"}  # no norm is known to feed it
    assert plan["attn.qkv.weight"].matrix.repeats == 4
    assert plan["attn.proj.weight"].multipliers == "row+col"


def test_renamed_model_is_unknown_rather_than_misread():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 8)
            self.b = nn.Linear(8, 4)
            self.table = nn.Parameter(torch.randn(3, 4))
            self.cube = nn.Parameter(torch.randn(2, 3, 4))
            self.patches = nn.Conv2d(3, 4, 2)

    plan = lrm.plan(Odd(), "full")
    for name in ("a.weight", "b.weight", "table", "cube", "patches.weight"):
        assert plan[name].role == "unknown"
        assert not plan[name].vector
    assert plan["a.weight"].multipliers == plan["table"].multipliers == "row+col"
    assert plan["cube"].multipliers == plan["patches.weight"].multipliers == "none"


# -- rules ------------------------------------------------------------------------------------


def test_first_rule_wins():
    rules = [Rule(r"layers\.0\..*q_proj", "none"), Rule("q_proj", "scalar")]
    plan = lrm.plan(build("llama"), "full", rules)
    assert plan["model.layers.0.self_attn.q_proj.weight"].multipliers == "none"
    assert plan["model.layers.1.self_attn.q_proj.weight"].multipliers == "scalar"
    assert plan["model.layers.1.self_attn.k_proj.weight"].multipliers == "row+col"


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt-neox", "gpt2"])
def test_rule_for_a_role_reaches_blocks_of_fused_matrices(family):
    rules = [
        Rule("", "none", only="key"),
        Rule("", "row", only="query"),
        Rule("", "row", only="value"),
    ]
    by_role = carried(lrm.plan(build(family), "full", rules))
    assert by_role["key"] == set()
    assert by_role["query"] == by_role["value"] == {"row"}


def test_rules_set_scale_decay_and_learning_rate():
    rules = [
        Rule("down_proj", scale="log", weight_decay=0.2, lr_scale=0.5),
        Rule("norm", lr_scale=2),
    ]
    plan = lrm.plan(build("llama"), "full", rules)
    entry = plan["model.layers.0.mlp.down_proj.weight"]
    assert (entry.matrix.scale, entry.weight_decay, entry.lr_scale) == ("log", 0.2, 0.5)
    assert entry.multipliers == "row+col"
    assert plan["model.norm.weight"].lr_scale == 2


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
def test_numbers_of_other_libraries_count_as_numbers(number):
    rule = Rule("down_proj", init=number(2.0), lr_scale=number(0.5), weight_decay=number(0.25))
    assert rule == Rule("down_proj", init=2.0, lr_scale=0.5, weight_decay=0.25)
    plan = lrm.plan(build("llama"), "full", [rule])
    assert plan["model.layers.0.mlp.down_proj.weight"].matrix.blocks[0].init == 2.0
    assert lrm.Plan.from_json(plan.to_json()) == plan


def test_head_may_carry_rows_by_a_rule():
    plan = lrm.plan(build("llama"), "full", [Rule("lm_head", "row")])
    assert plan["lm_head.weight"].multipliers == "row"


def test_embedding_without_multipliers_is_a_named_variant():
    for family in ("llama", "llama-tied", "gpt2"):
        plan = lrm.plan(build(family), "symmetry-aware", lrm.NO_EMBEDDING)
        assert not any(entry.carries for entry in plan.entries if "embedding" in entry.role)


def test_a_reason_has_the_pattern_of_the_rule_as_it_was_written():
    plan = lrm.plan(build("llama"), "full", [Rule(r"layers\.0\.mlp", "row")])
    assert plan["model.layers.0.mlp.up_proj.weight"].reason == r"by rule 'layers\.0\.mlp'"
    with pytest.raises(ValueError, match="^" + re.escape(r"rule 'layers\.9' matches no parameter")):
        lrm.plan(build("llama"), "full", [Rule(r"layers\.9", "row")])
    # A pattern over several lines does not break the table.
    plan = lrm.plan(build("llama"), "full", [Rule("(?x) up # all\n _proj", "row")])
    assert plan["model.layers.0.mlp.up_proj.weight"].reason == r"by rule '(?x) up # all\n _proj'"


def test_frozen_matrix_carries_nothing():
    model = build("llama")
    model.lm_head.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    plan = lrm.plan(model, "full")
    assert plan["model.layers.0.self_attn.q_proj.weight"].multipliers == "none"
    assert plan["model.layers.0.self_attn.q_proj.weight"].reason == "frozen"


# -- errors -----------------------------------------------------------------------------------


def test_rule_that_matches_nothing_names_the_closest_parameters():
    with pytest.raises(ValueError, match=r"matches no parameter.*model\.layers\.0\.mlp\.down_proj"):
        lrm.plan(build("llama"), "full", [Rule(r"layers\.0\.mlp\.downproj", "row")])
    lrm.plan(build("llama"), "full", [Rule("nowhere", "row", optional=True)])


def test_rule_hidden_by_an_earlier_one_is_an_error():
    with pytest.raises(ValueError, match="put it before them"):
        lrm.plan(build("llama"), "full", [Rule("proj", "row"), Rule("q_proj", "none")])
    with pytest.raises(ValueError, match="nothing of role 'ssm-z'"):
        lrm.plan(build("llama"), "full", [Rule("proj", "row", only="ssm-z")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": torch.ones(1, 2)}, "`inputs` has no effect without derive=True"),
        ({"proxy": None}, "`proxy` has no effect without derive=True"),
        ({"proxy": nn.Linear(1, 1)}, "`proxy` has no effect without derive=True"),
        ({"placement": "none", "scale": "log"}, "scale='log' has no effect with the placement"),
        ({"placement": "none", "init": "fold"}, "init='fold' has no effect with the placement"),
        ({"placement": "none", "train": "multipliers"}, "train='multipliers' has no effect with"),
        ({"rules": [Rule(r"model\.norm", scale="log")]}, "which is not a matrix"),
    ],
)
def test_plan_rejects_arguments_without_effect(arguments, message):
    with pytest.raises(ValueError, match=message):
        lrm.plan(build("llama"), **arguments)


def test_unknown_placement_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown placement 'fullest'.*'symmetry-aware'"):
        lrm.plan(build("llama"), "fullest")


def test_a_rule_for_rows_of_a_tied_embedding_raises():
    for kind in ("row", "row+col"):
        with pytest.raises(ValueError, match=r"tied to the head \(lm_head.weight\)"):
            lrm.plan(build("llama-tied"), "full", [Rule("embed_tokens", kind)])


def test_multipliers_on_a_vector_raise():
    with pytest.raises(ValueError, match=r"'model.norm.weight' of shape \(16,\), which is not a"):
        lrm.plan(build("llama"), "full", [Rule(r"model\.norm", "row")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "rows"}, "unknown kind 'rows'"),
        ({"only": "quer"}, "unknown role 'quer'; closest: query"),
        ({"init": "folded"}, "a number or 'fold'"),
        ({"init_keeps": "both"}, "'function' or 'raw'"),
        ({"only": "key", "role": "up"}, "cannot set"),
        ({"role": "up", "split": {"up": 4}}, "not both"),
        ({"repeats": 3}, "repeats=3 has no effect without `split`"),
        ({"init_keeps": "raw"}, "init_keeps='raw' has no effect without a number"),
        ({"init": "fold", "init_keeps": "raw"}, "init_keeps='raw' has no effect without a number"),
        ({"kind": "none", "init": "fold"}, "init='fold' has no effect on kind 'none'"),
        ({"train": "multipliers", "lr_scale": 2.0}, "lr_scale has no effect with train="),
        ({"train": "multipliers", "weight_decay": 0.0}, "weight_decay has no effect with train="),
    ],
)
def test_rules_reject_what_they_cannot_mean(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rule("x", **arguments)


def test_blocks_cannot_disagree_about_their_shared_column():
    with pytest.raises(ValueError, match="share one column multiplier, wanted for query, value"):
        lrm.plan(build("phi3"), "full", [Rule("", "row", only="key")])


def test_blocks_cannot_disagree_about_decay():
    with pytest.raises(ValueError, match="different weight_decay"):
        lrm.plan(build("phi3"), "full", [Rule("", only="key", weight_decay=0.5)])


def test_split_must_cover_the_rows():
    with pytest.raises(ValueError, match=r"attn\.qkv\.weight: blocks .* cover 12 rows"):
        lrm.plan(FusedBlock(), "full", [Rule("qkv", split={"query": 4, "key": 4, "value": 4})])


def test_plan_for_another_model_raises():
    plan = lrm.plan(build("llama"), "full")
    with pytest.raises(ValueError, match="made for LlamaForCausalLM, does not fit GPT2LMHeadModel"):
        lrm.reparametrize(build("gpt2"), plan)
    wider = build("llama", hidden_size=32)
    with pytest.raises(ValueError, match=r"has shape \(61, 32\), planned \(61, 16\)"):
        plan.resolve(wider)


def test_flattened_parameters_raise():
    model = HandWritten()
    plan = lrm.plan(model, "full")
    model.output.weight = nn.Parameter(model.output.weight.detach().flatten())
    with pytest.raises(ValueError, match="flattened by its wrapper"):
        plan.resolve(model)


# -- a plan is data ---------------------------------------------------------------------------


def test_json_round_trip_keeps_everything():
    rules = [Rule("q_proj", "scalar", init=0.5, scale="log", lr_scale=3, weight_decay=0.0)]
    plan = lrm.plan(build("falcon-h1"), "symmetry-aware", rules)
    again = lrm.Plan.from_json(plan.to_json())
    assert again == plan
    assert str(again) == str(plan)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"entries": []}', '{"format": 1, "entries": [], "assumptions": []}']
)
def test_what_is_not_a_plan_raises(text):
    with pytest.raises(ValueError, match="not a plan"):
        lrm.Plan.from_json(text)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_plan_of_another_format_version_raises(version):
    content = json.loads(lrm.plan(HandWritten(), "full").to_json())
    assert content["format"] == 1
    content["format"] = version
    with pytest.raises(ValueError, match="not a plan of format 1.*lrm.plan"):
        lrm.Plan.from_json(json.dumps(content))


def test_plan_of_another_placement_name_raises():
    content = json.loads(lrm.plan(HandWritten(), "full").to_json())
    content["placement"] = "other"
    with pytest.raises(ValueError, match="placement is 'other', not one of full"):
        lrm.Plan.from_json(json.dumps(content))


def test_wrappers_do_not_change_a_plan():
    model = HandWritten()
    plan = lrm.plan(model, "full")
    assert lrm.plan(torch.compile(model), "full") == plan
    model.layers[0] = torch.compile(model.layers[0])
    assert (
        lrm.plan(model, "symmetry-aware").entries
        == lrm.plan(HandWritten(), "symmetry-aware").entries
    )
    assert plan.resolve(model).keys() == plan.resolve(HandWritten()).keys()


def test_table_shows_each_kind_of_layer_once():
    text = str(lrm.plan(build("falcon-h1"), "symmetry-aware"))
    assert "model.layers.{0..1}.mamba.in_proj.weight" in text
    assert "row (ssm-z, ssm-dt)" in text
    assert "13 of 20 matrices carry multipliers" in text
    assert "Assumes: norms inside a layer feed its blocks (pre-norm)" in text
    assert max(len(line) for line in text.splitlines()) < 200


# -- one multiplier for each head -------------------------------------------------------------


def test_heads_of_queries_keys_and_values_have_a_multiplier_each():
    plan = lrm.plan(build("llama"), "full", [Rule("[qkv]_proj", "per-head")])
    config = build("llama").config
    queries = plan["model.layers.0.self_attn.q_proj.weight"]
    assert queries.matrix.value_shapes() == {"scalar": (config.num_attention_heads,)}
    keys = plan["model.layers.0.self_attn.k_proj.weight"].matrix
    assert keys.num_multipliers == config.num_key_value_heads
    assert f"scalar x{config.num_attention_heads} per head" in str(plan)
    assert lrm.Plan.from_json(plan.to_json()) == plan


def test_interleaved_heads_have_a_multiplier_each():
    model = build("gpt-neox")
    rules = [Rule("query_key_value", "per-head", only="key"), Rule("query_key_value", "none")]
    matrix = lrm.plan(model, "full", rules)[
        "gpt_neox.layers.0.attention.query_key_value.weight"
    ].matrix
    heads = model.config.num_attention_heads
    size = model.config.hidden_size // heads
    # Query, key and value of one head after the other.
    expected = [
        head if part == 1 else -1 for head in range(heads) for part in range(3) for _ in range(size)
    ]
    assert scalar_index(matrix).tolist() == expected


def test_what_has_no_heads_cannot_have_a_multiplier_for_each():
    with pytest.raises(ValueError, match=r"up_proj.* \(up\) cannot .* heads are those of query"):
        lrm.plan(build("llama"), "full", [Rule("up_proj", "per-head")])
    with pytest.raises(ValueError, match="its role is unknown; set role or split to show"):
        lrm.plan(FusedBlock(), "full", [Rule("qkv", "per-head")])
    rule = Rule("qkv", "per-head", split={"query": 16, "key": 16, "value": 16}, head_dim=4)
    entry = lrm.plan(FusedBlock(), "full", [rule])["attn.qkv.weight"]
    assert entry.multipliers == "scalar x12 per head"
    untold = Rule("qkv", "per-head", split={"query": 16, "key": 16, "value": 16})
    with pytest.raises(ValueError, match=r'lrm.Rule\(r"attn.*", "per-head", head_dim=64\)'):
        lrm.plan(FusedBlock(), "full", [untold])


@pytest.mark.parametrize("optimizer", [lrm.AdamW, lrm.Muon])
def test_a_rule_makes_a_matrix_a_vector_without_multipliers_or_decay_under_adamw(optimizer):
    model = HandWritten()
    name = "layers.0.feed_forward.w2.weight"
    rules = [Rule(r"layers\.0\.feed_forward\.w2", role="vector", lr_scale=0.5)]
    made = optimizer.from_model(model, rules=rules, lr=1e-2, weight_decay=0.1)
    assert (made.plan[name].role, made.plan[name].carries) == ("vector", False)
    assert lrm.Plan.from_json(made.plan.to_json()) == made.plan
    group = next(group for group in made.param_groups if name in group["param_names"])
    assert (group["weight_decay"], group["raw_lr_scale"]) == (0.0, 0.5)
    parameter = model.get_parameter(name)
    reference = torch.nn.Parameter(parameter.detach().clone())
    torch_optimizer = torch.optim.AdamW([reference], lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(3):
        model(token_ids()).square().mean().backward()
        reference.grad = parameter.grad.clone()
        made.step()
        torch_optimizer.step()
        made.zero_grad()
    torch.testing.assert_close(parameter, reference)
    for setting in ({"kind": "row"}, {"head_dim": 8}, {"transposed": True}, {"init": 2.0}):
        with pytest.raises(ValueError, match="role='vector' takes no kind"):
            Rule("w2", role="vector", **setting)
    with pytest.raises(ValueError, match="unknown role 'vector'"):
        Rule("w2", "none", only="vector")


def test_keys_and_queries_before_norms_without_weights_both_carry_rows():
    """Then no scale of a row of K undoes one of Q: `derive` finds the same placement."""
    from transformers import NanoChatConfig, NanoChatForCausalLM

    config = NanoChatConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = NanoChatForCausalLM(config)
    listed = lrm.plan(model, "symmetry-aware")
    derived = lrm.plan(model, "symmetry-aware", derive=True)
    for leaf in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{leaf}.weight"
        assert listed[name].multipliers == derived[name].multipliers
        assert "row" in listed[name].multipliers or leaf == "v_proj"
    assert any("norms without a trained weight" in words for words in listed.assumptions)
