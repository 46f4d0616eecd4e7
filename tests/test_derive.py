"""The placement computed from symmetries: the paper's, without a name or role being read."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.presets import PRESETS
from test_symmetry import build, renamed, token_ids

Carried = dict[str, tuple[tuple[bool, ...], bool]]


def derived(model: nn.Module, rules=()) -> lrm.Plan:
    # Short position tables would be overrun by made-up inputs.
    return lrm.plan(model, "symmetry-aware", rules, derive=True, inputs=token_ids())


def carried(plan: lrm.Plan) -> Carried:
    """Which rows of each matrix carry a multiplier, and whether its columns do."""
    by_name = {}
    for entry in plan.entries:
        if entry.matrix is not None:
            one = [block.row for block in entry.matrix.blocks for _ in range(block.size)]
            by_name[entry.name] = tuple(one * entry.matrix.repeats), entry.matrix.col
    return by_name


def rows(*runs: tuple[int, bool]) -> tuple[bool, ...]:
    return tuple(carries for count, carries in runs for _ in range(count))


def appendix(inner_norm: bool) -> Carried:
    """The paper's appendix "Multipliers placement", at the sizes of symmetry_tables."""
    layer = "model.layers.0"
    everything, nothing = True, False
    return {
        "model.embed_tokens.weight": (rows((17, everything)), True),
        f"{layer}.feed_forward.gate_proj.weight": (rows((6, everything)), False),
        f"{layer}.feed_forward.up_proj.weight": (rows((6, nothing)), False),
        f"{layer}.feed_forward.down_proj.weight": (rows((8, everything)), True),
        # z, then x, B and C, then dt.
        f"{layer}.mamba.in_proj.weight": (
            rows((8, everything), (8 + 3 + 3, nothing), (2, everything)),
            False,
        ),
        f"{layer}.mamba.out_proj.weight": (rows((8, everything)), not inner_norm),
        f"{layer}.self_attn.q_proj.weight": (rows((16, everything)), False),
        f"{layer}.self_attn.k_proj.weight": (rows((8, nothing)), False),
        f"{layer}.self_attn.v_proj.weight": (rows((8, nothing)), False),
        f"{layer}.self_attn.o_proj.weight": (rows((8, everything)), True),
        "lm_head.weight": (rows((17, nothing)), False),
    }


@pytest.mark.parametrize("architecture", ["falcon-h1", "falcon-h1-inner-norm"])
def test_derives_the_placement_of_the_papers_appendix(architecture):
    plan = derived(build(architecture))
    assert carried(plan) == appendix(inner_norm="norm" in architecture)


@pytest.mark.parametrize(
    "architecture", ["falcon-h1", "falcon-h1-inner-norm", "llama", "mamba2", "gpt2", "mixtral"]
)
def test_derives_the_placement_that_roles_give(architecture):
    model = build(architecture)
    assert carried(derived(model)) == carried(lrm.plan(model, "symmetry-aware"))


@pytest.mark.parametrize("architecture", ["falcon-h1", "falcon-h1-inner-norm"])
def test_names_do_not_matter_to_the_appendix(architecture):
    model, names = renamed(build(architecture))
    by_name = {names[name]: what for name, what in carried(derived(model)).items()}
    assert by_name == appendix(inner_norm="norm" in architecture)


@pytest.mark.slow
@pytest.mark.parametrize("inner_norm", [False, True])
def test_a_large_model_gets_the_papers_placement_through_its_proxy(inner_norm):
    model = HybridLM(replace(PRESETS["tiny"], ssm_norm=inner_norm))
    plan = lrm.plan(model, "symmetry-aware", derive=True)
    assert carried(plan) == carried(lrm.plan(model, "symmetry-aware"))
    kinds = {
        "embed_tokens": "row+col",
        "gate_proj": "row",
        "up_proj": "none",
        "down_proj": "row+col",
        "in_proj": "row (ssm-z, ssm-dt)",
        "out_proj": "row" if inner_norm else "row+col",
        "q_proj": "row",
        "k_proj": "none",
        "v_proj": "none",
        "o_proj": "row+col",
        "lm_head": "none",
    }
    by_name = {e.name: e.multipliers for e in plan.entries if e.matrix is not None}
    assert len(by_name) == 2 + 2 * 9
    for name, multipliers in by_name.items():
        assert multipliers == kinds[name.split(".")[-2]], name
    assert not any("not confirmed" in said for said in plan.symmetries)
    assert len(plan.symmetries) == 1 + 2 * 5 + 1


# What remains


def remaining(plan: lrm.Plan, word: str) -> list[str]:
    return [line for line in plan.symmetries if line.endswith(f"({word})")]


@pytest.mark.parametrize(
    ("architecture", "norms", "exchanges"),
    [
        ("falcon-h1", ("input_layernorm", "pre_ff_layernorm"), 4),
        ("falcon-h1-inner-norm", ("input_layernorm", "pre_ff_layernorm", "mamba.norm"), 3),
        ("llama", ("input_layernorm", "post_attention_layernorm"), 3),
        ("mamba2", ("layers.0.norm", "mixer.norm"), 1),
    ],
)
def test_one_exchange_per_matrix_one_scale_per_norm_and_the_residual_remain(
    architecture, norms, exchanges
):
    plan = derived(build(architecture))
    both = [e for e in plan.entries if e.multipliers == "row+col"]
    said = remaining(plan, "exchange")
    assert len(said) == len(both) == exchanges
    for entry, line in zip(both, said, strict=True):
        name = entry.name.removesuffix(".weight")
        assert line == f"rows against columns of {name}, as a whole (exchange)"
    blocks = remaining(plan, "multiplicative")
    assert len(blocks) == len(norms)
    for norm in norms:
        assert sum(norm in line for line in blocks) == 1
    (stream,) = remaining(plan, "normalization")
    writers = [e.name for e in plan.entries if e.multipliers.startswith("row")]
    writers = [n for n in writers if any(w in n for w in ("embed", "o_proj", "down", "out_proj"))]
    assert all(f"rows of {name.removesuffix('.weight')}" in stream for name in writers)
    assert len(plan.symmetries) == exchanges + len(norms) + 1


# Where the two differ: what a norm takes away alone is no trade, so nothing stands in for it.
DIFFER = {
    "qwen3": {"q_proj": ("row", "none"), "k_proj": ("row", "none")},
    "gemma2": {"o_proj": ("row+col", "col"), "down_proj": ("row+col", "col")},
    "gemma3": {
        "q_proj": ("row", "none"),
        "k_proj": ("row", "none"),
        "o_proj": ("row+col", "col"),
        "down_proj": ("row+col", "col"),
    },
}


@pytest.mark.parametrize("architecture", DIFFER)
def test_rows_that_a_norm_reads_stay_where_roles_leave_them_to_its_weight(architecture):
    model = build(architecture)
    plan, listed = derived(model), lrm.plan(model, "symmetry-aware")
    differ = {
        e.name.split(".")[-2]: (e.multipliers, listed[e.name].multipliers)
        for e in plan.entries
        if e.multipliers != listed[e.name].multipliers
    }
    assert differ == DIFFER[architecture]
    # What is too much is listed, matrix by matrix.
    said = remaining(plan, "normalization")
    for leaf in differ:
        assert any(line.startswith("rows of model.layers.0.") and leaf in line for line in said)


# The plan as a plan


def test_rules_have_the_last_word():
    model = build("llama")
    rules = (lrm.Rule(r"up_proj\.weight$", "row"), lrm.Rule(r"q_proj\.weight$", "none"))
    plan, without = derived(model, rules), derived(model)
    layer = "model.layers.0"
    changed = {
        name: plan[name].multipliers
        for name in (entry.name for entry in plan.entries)
        if plan[name].multipliers != without[name].multipliers
    }
    assert changed == {
        f"{layer}.mlp.up_proj.weight": "row",
        f"{layer}.self_attn.q_proj.weight": "none",
    }
    # Rows of up trade with columns of down, and that is told: the rules are not forgotten.
    pair = f"rows of {layer}.mlp.up_proj against columns of {layer}.mlp.down_proj, per channel"
    assert f"{pair} (multiplicative)" in plan.symmetries


@pytest.mark.parametrize("placement", ["full", "scalar"])
def test_only_the_symmetry_aware_placement_is_derived(placement):
    with pytest.raises(ValueError, match=f"symmetry-aware placement, not '{placement}'"):
        lrm.plan(build("llama"), placement, derive=True)


@pytest.mark.parametrize("architecture", ["falcon-h1", "mixtral"])
def test_a_derived_plan_survives_json(architecture):
    plan = derived(build(architecture))
    assert lrm.Plan.from_json(plan.to_json()) == plan


def test_a_derived_plan_trains():
    model = build("falcon-h1")
    plan = derived(model)
    ids = token_ids()
    still = copy.deepcopy(model)
    optimizer = lrm.AdamW(lrm.param_groups(still, plan), lr=0.0)
    before = [parameter.detach().clone() for parameter in still.parameters()]
    still(ids, labels=ids).loss.backward()
    optimizer.step()
    for parameter, value in zip(still.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, value, rtol=1e-6, atol=1e-7)

    optimizer = lrm.AdamW(lrm.param_groups(model, plan), lr=1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
