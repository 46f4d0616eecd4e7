"""Layouts of torchtitan, litgpt, nanochat and timm: what is read of them is true, or unknown."""

import pytest
import torch
from torch import nn

import layouts
import learnable_multipliers as lrm
from layouts import HEAD_DIM, HEADS, HIDDEN, KEY_HEADS, LAYOUTS, WIDTH, build, inputs
from learnable_multipliers.roles import read_roles

GROUP = HEADS // KEY_HEADS * HEAD_DIM
QUERIES, KEYS = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
GROUPED = ((("query", QUERIES), ("key", KEYS), ("value", KEYS)), 1)
BY_KEY_HEAD = ((("query", GROUP), ("key", HEAD_DIM), ("value", HEAD_DIM)), KEY_HEADS)
EQUAL = ((("query", QUERIES), ("key", QUERIES), ("value", QUERIES)), 1)


def whole(role, size):
    return (((role, size),), 1)


SEPARATE = [whole("query", QUERIES), whole("key", KEYS), whole("value", KEYS)]
OUT, DOWN = whole("attention-out", WIDTH), whole("down", WIDTH)
GATE, UP, UNGATED = (whole(role, HIDDEN) for role in ("gate", "up", "ungated-up"))
MATRICES = {
    "torchtitan": {
        "attention.qkv_linear.wqkv": BY_KEY_HEAD,
        "attention.wo": OUT,
        **{"feed_forward.w1": GATE, "feed_forward.w2": DOWN, "feed_forward.w3": UP},
    },
    "torchtitan-separate": {
        **{f"attention.qkv_linear.w{r[0][0][0][0]}": r for r in SEPARATE},
        "attention.wo": OUT,
    },
    "litgpt": {
        **{"attn.qkv": GROUPED, "attn.proj": OUT},
        **{"mlp.fc_1": GATE, "mlp.fc_2": UP, "mlp.proj": DOWN},
    },
    "litgpt-neox": {"attn.qkv": GROUPED, "mlp.fc": UNGATED, "mlp.proj": DOWN},
    "nanochat": {
        **{f"attn.c_{r[0][0][0][0]}": r for r in SEPARATE},
        **{"attn.c_proj": OUT, "mlp.c_fc": UNGATED, "mlp.c_proj": DOWN},
    },
    "timm": {"attn.qkv": EQUAL, "attn.proj": OUT, "mlp.fc1": UNGATED, "mlp.fc2": DOWN},
    "timm-swiglu": {"mlp.fc1_g": GATE, "mlp.fc1_x": UP, "mlp.fc2": DOWN},
    "timm-packed": {"mlp.fc1": ((("gate", HIDDEN), ("up", HIDDEN)), 1), "mlp.fc2": DOWN},
    "timm-glu": {"mlp.fc1": ((("up", HIDDEN), ("gate", HIDDEN)), 1), "mlp.fc2": DOWN},
}
LAYERS = {"torchtitan": "layers.0.", "timm": "blocks.0."}


def layer_of(layout):
    return LAYERS.get(layout.partition("-")[0], "transformer.h.0.")


def readings(model):
    return {reading.name: reading for reading in read_roles(model).parameters}


def blocks(reading):
    return tuple((part.role, part.size) for part in reading.parts), reading.repeats


@pytest.mark.parametrize("layout", MATRICES)
def test_blocks_and_their_order_are_read(layout):
    found = readings(build(layout))
    prefix = layer_of(layout)
    expected = MATRICES[layout]
    assert {leaf: blocks(found[f"{prefix}{leaf}.weight"]) for leaf in expected} == expected


def rows(reading, role):
    """Return which rows of a matrix have a role."""
    pattern = torch.cat([torch.full((p.size,), p.role == role) for p in reading.parts])
    return pattern.repeat(reading.repeats)


PAIRS = {
    "query and key": ("query", "rows", "key", "rows"),
    "value and attention-out": ("value", "rows", "attention-out", "columns"),
    "up and down": ("up", "rows", "down", "columns"),
}
QK_NORMED = {"torchtitan-qk-norm", "litgpt-qk-norm", "timm-norms", "nanochat", "nanochat-values"}


def scale_(model, role, side, factor):
    """Multiply all rows or columns of a role, and the biases of rows."""
    for reading in readings(model).values():
        if not reading.parts or reading.opaque:
            continue
        weight = model.get_parameter(reading.name)
        if side == "columns":
            weight.mul_(factor if reading.parts[0].role == role else 1.0)
            continue
        factors = torch.where(rows(reading, role), factor, 1.0).to(weight)
        weight.mul_(factors[:, None])
        bias = getattr(model.get_submodule(reading.name.rpartition(".")[0]), "bias", None)
        if bias is not None:
            bias.mul_(factors)
        if role == "value" and "value_embeds" in reading.name:
            # nanochat adds this table to the values.
            weight.mul_(factor)


@torch.no_grad()
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_have_the_symmetries_their_roles_promise(layout, pair):
    """A misread block breaks the exact rescaling that the true one allows."""
    first, first_side, second, second_side = PAIRS[pair]
    model = build(layout)
    if not any(rows(r, first).any() for r in readings(model).values() if r.parts):
        pytest.skip(f"no {first} matrix")
    before = model(inputs(model))
    scale_(model, first, first_side, 2.0)
    alone = (model(inputs(model)) - before).abs().max()
    scale_(model, second, second_side, 0.5)
    both = (model(inputs(model)) - before).abs().max()
    # A norm in between takes the first scale away, but for its epsilon.
    normed = layout in QK_NORMED if first == "query" else layout == "timm-norms"
    assert (alone < 1e-3) == normed
    assert normed or both < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_said_to_scale_a_matrix_do(layout):
    """Scale a norm's channels and undo it in the columns it feeds: nothing changes."""
    model = build(layout)
    before = model(inputs(model))
    fed = {}
    for reading in readings(model).values():
        if reading.column_norm:
            fed.setdefault(reading.column_norm, []).append(reading.name)
    for path, names in fed.items():
        norm = model.get_submodule(path)
        factor = torch.rand_like(norm.weight) + 0.5
        for parameter in norm.parameters():
            parameter.mul_(factor)
        for name in names:
            model.get_parameter(name).div_(factor)
    torch.testing.assert_close(model(inputs(model)), before, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_norm_and_layer_scale_is_a_multiplier_of_some_matrix(layout):
    model = build(layout)
    found = readings(model).values()
    scaling = {r.column_norm for r in found} | {p.row_norm for r in found for p in r.parts}
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    norms = {name for name, label in classes.items() if "Norm" in label or label == "LayerScale"}
    assert scaling - {""} == norms


@torch.no_grad()
@pytest.mark.parametrize("layout", ["timm-behind", "litgpt-behind", "litgpt-sandwich"])
def test_a_norm_said_to_follow_a_matrix_scales_its_rows(layout):
    """It takes the scale of that matrix away, because it sees nothing else."""
    model = build(layout)
    before = model(inputs(model))
    followed = [r for r in readings(model).values() if any(p.row_norm for p in r.parts)]
    assert {part.role for r in followed for part in r.parts} == {"attention-out", "down"}
    for reading in followed:
        for parameter in model.get_submodule(reading.name.rpartition(".")[0]).parameters():
            parameter.mul_(3.0)
    assert (model(inputs(model)) - before).abs().max() < 1e-3


@torch.no_grad()
def test_layer_scale_scales_the_rows_of_the_matrix_in_front():
    model = build("timm-layer-scale")
    before = model(inputs(model))
    for reading in readings(model).values():
        for part in reading.parts:
            if part.row_norm:
                gamma = model.get_submodule(part.row_norm).gamma
                owner = model.get_submodule(reading.name.rpartition(".")[0])
                factor = torch.rand_like(gamma) + 0.5
                gamma.div_(factor)
                owner.weight.mul_(factor[:, None])
                owner.bias.mul_(factor)
    torch.testing.assert_close(model(inputs(model)), before, rtol=0, atol=1e-10)
    model.blocks[0].ls1.requires_grad_(False)
    found = readings(model)
    assert not found["blocks.0.attn.proj.weight"].parts[0].row_norm
    assert found["blocks.0.mlp.fc2.weight"].parts[0].row_norm == "blocks.0.ls2"


AWARE = {
    "timm-layer-scale": {"attn.proj": ("", "c"), "mlp.fc2": ("", "c")},
    "torchtitan": {"attention.qkv_linear.wqkv": ("row", "", "", ""), "attention.wo": ("row", "c")},
    "litgpt": {"attn.qkv": ("row", "", "", ""), "attn.proj": ("row", "c")},
    "timm": {"attn.qkv": ("row", "", "", ""), "attn.proj": ("row", "c")},
    "timm-norms": {"attn.qkv": ("", "", "", ""), "attn.proj": ("row", ""), "mlp.fc2": ("row", "")},
    "timm-behind": {"attn.qkv": ("row", "", "", "c"), "attn.proj": ("", "c")},
    "timm-packed": {"mlp.fc1": ("row", "", "")},
    "timm-glu": {"mlp.fc1": ("", "row", "")},
    "nanochat": {"attn.c_q": ("row", "c"), "attn.c_k": ("", "c"), "attn.c_v": ("", "c")},
    "litgpt-behind": {"attn.qkv": ("row", "", "", "c"), "mlp.proj": ("", "c")},
}


@pytest.mark.parametrize("layout", AWARE)
def test_symmetry_aware_plan_gives_rows_to_the_blocks_that_need_them(layout):
    plan = lrm.plan(build(layout), "symmetry-aware")
    matrices = {entry.name: entry.matrix for entry in plan.entries}
    for leaf, (*by_block, columns) in AWARE[layout].items():
        matrix = matrices[f"{layer_of(layout)}{leaf}.weight"]
        assert [block.row for block in matrix.blocks] == [bool(row) for row in by_block], leaf
        assert matrix.col == bool(columns), leaf


FUSED = {
    "torchtitan": ("attention.qkv_linear.wqkv.weight", "attention.wo.weight"),
    "litgpt": ("attn.qkv.weight", "attn.proj.weight"),
    "timm": ("attn.qkv.weight", "attn.proj.weight"),
}


@pytest.mark.parametrize("layout", FUSED)
def test_symmetries_of_the_function_show_the_same_blocks(layout):
    """Found from derivatives alone: rows that pair with the output's columns are values."""
    model = build(layout)
    fused, out = (layer_of(layout) + leaf for leaf in FUSED[layout])
    reading = readings(model)[fused]
    with_out = torch.zeros(reading.shape[0], dtype=torch.bool)
    with_each_other = with_out.clone()
    for symmetry in lrm.find_symmetries(model, None, inputs(model)):
        if symmetry.num_members < 2:
            continue  # of a whole matrix, not of its channels
        terms = [term for term in symmetry.terms if term.axis.name in (fused, out)]
        of_rows = [t for t in terms if t.axis.name == fused and t.axis.kind == "row"]
        of_columns = [t for t in terms if t.axis.name == out and t.axis.kind == "col"]
        if of_rows and of_columns:
            with_out |= of_rows[0].members >= 0
        elif len(of_rows) == 2:
            with_each_other |= (of_rows[0].members >= 0) | (of_rows[1].members >= 0)
    assert with_out.tolist() == rows(reading, "value").tolist()
    paired = rows(reading, "query") | rows(reading, "key")
    assert with_each_other.tolist() == paired.tolist()


# torchtitan itself


class CausalAttention(nn.Module):
    """Replaces flex attention, which needs a compiler."""

    def forward(self, q, k, v, **_):
        return layouts.attend(q, k, v).unflatten(-1, q.shape[2:])


def titan(name):
    pytest.importorskip("torchtitan")
    from torchtitan.models import llama3, qwen3

    configs = {
        "llama3": llama3._debugmodel,
        "qwen3": qwen3._debugmodel,
        "qwen3-separate": qwen3._debugmodel_non_fused_qkv,
        "qwen3-moe": qwen3._debugmodel_moe,
    }
    config = configs[name]("flex")
    config.layers = config.layers[:1]
    model = config.build()
    model.layers["0"].attention.inner_attention = CausalAttention()
    torch.manual_seed(1)
    model.init_states()
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.mul_(5.0 if parameter.ndim > 1 else 1.0)
    return model


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3-separate", "qwen3-moe"])
def test_models_of_torchtitan_have_the_symmetries_their_roles_promise(name):
    model = titan(name)
    found = {part.role for r in readings(model).values() for part in r.parts}
    known = {"query", "key", "value", "attention-out", "gate", "up", "down"}
    assert found - {"embedding", "tied-embedding", "head", "router"} == known
    tokens, positions = torch.arange(16).view(2, 8), torch.arange(8).expand(2, 8)
    before = model(tokens, positions)
    for first, first_side, second, second_side in PAIRS.values():
        scale_(model, first, first_side, 2.0)
        alone = (model(tokens, positions) - before).abs().max()
        scale_(model, second, second_side, 0.5)
        # Powers of two are exact, but for the epsilon of norms on queries and keys.
        both = (model(tokens, positions) - before).abs().max()
        normed = first == "query" and name != "llama3"
        assert both < 1e-4
        assert (alone > 1e-2) != normed


# Not enough evidence


def attention_roles(attention, leaf):
    found = readings(nn.ModuleDict({"attn": attention}))
    return [part.role for part in found[f"attn.{leaf}.weight"].parts]


def test_without_the_sizes_of_the_config_a_fused_matrix_is_unknown():
    attention = layouts.litgpt_attention()
    assert attention_roles(attention, "qkv") == ["query", "key", "value"]
    del attention.config.n_query_groups
    assert attention_roles(attention, "qkv") == ["unknown"]
    assert attention_roles(attention, "proj") == ["unknown"]
    del attention.config
    assert attention_roles(attention, "qkv") == ["unknown"]


@pytest.mark.parametrize("changes", [{"n_query_groups": 1}, {"n_head": 2, "n_query_groups": 3}])
def test_sizes_that_do_not_fit_the_shapes_are_not_believed(changes):
    """The second ones fit the rows, but not what the output projection reads."""
    attention = layouts.litgpt_attention()
    attention.config = layouts.litgpt_config(**changes)
    assert attention_roles(attention, "qkv") == ["unknown"]


def test_without_the_heads_of_a_group_wqkv_is_unknown():
    attention = layouts.GQAttention(layouts.FusedQKVLinear())
    assert attention_roles(attention, "qkv_linear.wqkv") == ["query", "key", "value"]
    attention.qkv_linear.heads_per_kv = 1
    assert attention_roles(attention, "qkv_linear.wqkv") == ["unknown"]
    del attention.qkv_linear.heads_per_kv
    assert attention_roles(attention, "qkv_linear.wqkv") == ["unknown"]
    attention.qkv_linear = layouts.QKVLinear()
    attention.qkv_linear.wv = nn.Identity()
    assert attention_roles(attention, "qkv_linear.wq") == ["unknown"]


def test_a_class_of_timms_name_defined_elsewhere_is_unknown():
    other = type("Attention", (layouts.Attention,), {"__module__": "somewhere.else"})
    assert attention_roles(layouts.Attention(), "qkv") == ["query", "key", "value"]
    assert attention_roles(other(), "qkv") == ["unknown"]
    other = type("LeanMlp", (layouts.LLaMAMLP,), {})
    found = readings(nn.ModuleDict({"mlp": other()}))
    assert {part.role for r in found.values() for part in r.parts} == {"unknown"}


def test_a_norm_that_is_no_module_is_said_and_derived():
    """nanochat's keys have scales of their own: a norm without weights is behind them."""
    model = build("nanochat")
    plan = lrm.plan(model, "symmetry-aware")
    assert any("normalizes what c_q and c_k return" in sentence for sentence in plan.assumptions)
    derived = lrm.plan(model, "symmetry-aware", derive=True, inputs=inputs(model))
    carries = {
        entry.name: [block.row for block in entry.matrix.blocks]
        for entry in derived.entries
        if entry.matrix is not None
    }
    layer = "transformer.h.0.attn."
    assert [carries[f"{layer}c_{leaf}.weight"] for leaf in "qkv"] == [[True], [True], [False]]


def test_gates_beside_the_values_are_unknown_and_said():
    model = build("nanochat-values")
    found = read_roles(model)
    assert any("holds ve_gate as well" in sentence for sentence in found.assumptions)
    assert blocks(readings(model)["transformer.h.0.attn.ve_gate.weight"])[0] == (
        ("unknown", KEY_HEADS),
    )
    with pytest.raises(ValueError, match="needs the role of transformer.h.0.attn.ve_gate"):
        lrm.plan(model, "symmetry-aware")
    lrm.plan(model, "symmetry-aware", rules=[lrm.Rule("ve_gate", "none")])
