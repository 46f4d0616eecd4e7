"""Heads, tables and adapters are read as what they are."""

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from test_roles import roles


class NormHead(nn.Module):
    """A classifier as timm's ConvNeXt, Swin and others have it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc = nn.Linear(16, 7)

    def forward(self, x):
        return self.fc(self.norm(x))


def classifier(head, name="head"):
    mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return nn.ModuleDict({"mlp": mlp, name: head})


@pytest.mark.parametrize(
    ("name", "head", "leaf"),
    [
        ("head", nn.Linear(16, 7), "head"),
        ("head", NormHead(), "head.fc"),
        ("classifier", nn.Sequential(nn.Dropout(), nn.Linear(16, 7)), "classifier.1"),
        ("heads", nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 7)), "heads.2"),
        ("fc", nn.Linear(16, 7), "fc"),
    ],
)
def test_the_last_matrix_of_a_classifier_is_a_head_and_trains_with_adamw(name, head, leaf):
    model = classifier(head, name)
    optimizer = lrm.Muon.from_model(model, lr=1e-2)
    assert roles(model)[f"{leaf}.weight"] == ("head",)
    assert not optimizer.plan[f"{leaf}.weight"].carries
    model[name](model["mlp"](torch.randn(4, 16))).square().mean().backward()
    optimizer.step()
    by_muon = {n for n, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]}
    inner = {"heads.0.weight"} if name == "heads" else set()
    assert by_muon == {"mlp.0.weight", "mlp.2.weight"} | inner


def test_heads_that_timm_names_are_heads():
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(16, 16)
            self.predict = nn.Linear(16, 7)
            self.predict_distilled = nn.Linear(16, 7)

        def get_classifier(self):
            return self.predict, self.predict_distilled

    found = roles(Distilled())
    assert found["body.weight"] == ("unknown",)
    assert found["predict.weight"] == found["predict_distilled.weight"] == ("head",)


def test_a_matrix_with_the_shape_of_a_position_table_is_no_head():
    model = nn.ModuleDict(
        {
            "pe": nn.Embedding(64, 16),
            "tok": nn.Embedding(11, 16),
            "expand": nn.Linear(16, 64, bias=False),
            "shrink": nn.Linear(64, 16, bias=False),
            "out": nn.Linear(16, 11, bias=False),
        }
    )
    assert roles(model) == {
        "pe.weight": ("position-embedding",),
        "tok.weight": ("embedding",),
        "expand.weight": ("unknown",),
        "shrink.weight": ("unknown",),
        "out.weight": ("head",),
    }


def test_a_matrix_tied_to_a_head_is_a_head():
    model = nn.ModuleDict({"tok": nn.Embedding(11, 16), "inner": nn.ModuleDict()})
    model["inner"]["aux"] = nn.Linear(16, 11, bias=False)
    model["lm_head"] = nn.Linear(16, 11, bias=False)
    model["inner"]["aux"].weight = model["lm_head"].weight
    assert roles(model)["inner.aux.weight"] == ("head",)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.randn(49, 4))
        self.attention_biases = nn.Parameter(torch.randn(4, 16))
        self.pos_bias_u = nn.Parameter(torch.randn(4, 8))
        self.bias_v = nn.Parameter(torch.randn(4, 8))
        self.rel_pos_h = nn.Parameter(torch.randn(13, 8))
        self.positional_embedding = nn.Parameter(torch.randn(77, 16))
        self.bag = nn.EmbeddingBag(11, 16)
        self.projection = nn.Parameter(torch.randn(16, 16))


def test_tables_outside_embedding_modules_are_no_hidden_matrices():
    model = Tables()
    found = roles(model)
    for name in ("relative_position_bias_table", "attention_biases", "pos_bias_u", "bias_v"):
        assert found[name] == "vector"
    for name in ("rel_pos_h", "positional_embedding"):
        assert found[name] == ("position-embedding",)
    assert found["bag.weight"] == ("embedding",)
    assert found["projection"] == ("unknown",)
    optimizer = lrm.Muon.from_model(model, lr=1e-2)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    trained = {n for n, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]}
    assert trained == {"projection"}
    for group in optimizer.param_groups:
        if "relative_position_bias_table" in group["param_names"]:
            assert group["weight_decay"] == 0


class Adapter(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.down_proj = nn.Linear(width, rank, bias=False)
        self.act = nn.ReLU()
        self.up_proj = nn.Linear(rank, width, bias=False)


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * width, width, bias=False)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_bottleneck_adapters_are_not_read_as_mlps(has_tokens):
    model = nn.ModuleDict({"adapter": Adapter(32, 4), "norm": nn.LayerNorm(32)})
    if has_tokens:
        model["tokens"] = nn.Embedding(9, 32)
    found = roles(model)
    assert found["adapter.down_proj.weight"] == found["adapter.up_proj.weight"] == ("unknown",)


def test_mlps_of_a_tower_are_read_whatever_the_width_of_the_text_model():
    tower = nn.ModuleDict({"norm2": nn.LayerNorm(16), "mlp": Mlp(16)})
    model = nn.ModuleDict({"visual": tower, "tokens": nn.Embedding(50, 32)})
    for each, prefix in ((tower, ""), (model, "visual.")):
        assert roles(each)[f"{prefix}mlp.fc1.weight"] == ("ungated-up",)
        assert roles(each)[f"{prefix}mlp.fc2.weight"] == ("down",)


class EqualLinear(nn.Module):
    """A linear layer of another library, whose weight is computed."""

    def __init__(self):
        super().__init__()
        self.u = nn.Parameter(torch.randn(16, 2))
        self.v = nn.Parameter(torch.randn(2, 16))

    @property
    def weight(self):
        return self.u @ self.v


class OddAccessors(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)

    def get_classifier(self):
        raise RuntimeError("not that kind of classifier")

    @property
    def get_output_embeddings(self):
        raise ValueError("nor this")


class SharedLayers(nn.Module):
    """One block, used three times."""

    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)
        del block.norm_first
        self.layers = nn.ModuleList([block] * 3)
        self.blocks = self.layers


class HeadOfItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"lin": nn.Linear(16, 16)})
        self.head = self.net


@pytest.mark.parametrize("model", [EqualLinear, OddAccessors, SharedLayers, HeadOfItself])
@pytest.mark.parametrize("placement", ["full", "scalar"])
def test_odd_models_are_planned(model, placement):
    made = model()
    plan = lrm.plan(made, placement)
    assert plan.num_parameters == sum(parameter.numel() for parameter in made.parameters())


def test_input_projections_of_generators_are_no_heads():
    model = nn.ModuleDict({"fc": nn.Linear(100, 64), "deconv": nn.ConvTranspose2d(4, 2, 4)})
    assert roles(model)["fc.weight"] == ("unknown",)
    assert lrm.plan(model)["fc.weight"].carries


def test_matrices_that_a_name_alone_might_take_for_tables_stay_matrices():
    class PositionalFeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(16, 16))
            self.relative_weight = nn.Parameter(torch.randn(16, 16))
            self.bias_scale = nn.Parameter(torch.randn(16, 16))
            self.position_proj = nn.Parameter(torch.randn(16, 16))
            self.pos = nn.Parameter(torch.randn(16, 16))

    assert set(roles(PositionalFeedForward()).values()) == {("unknown",)}
    table = nn.ModuleDict({"relbias": nn.Embedding(32, 4)})
    assert roles(table)["relbias.weight"] == "vector"
    assert "attention" not in lrm.plan(nn.LSTM(4, 4))["bias_ih_l0"].reason


def test_several_heads_of_one_vocabulary_are_heads():
    model = nn.ModuleDict(
        {"tok": nn.Embedding(11, 16), "ctc": nn.ModuleDict(), "dec": nn.ModuleDict()}
    )
    model["ctc"]["ctc_lo"] = nn.Linear(16, 11)
    model["dec"]["output_layer"] = nn.Linear(16, 11)
    found = roles(model)
    assert found["ctc.ctc_lo.weight"] == found["dec.output_layer.weight"] == ("head",)


def test_each_head_of_a_collection_is_a_head():
    tasks = nn.ModuleDict({"actor": nn.Linear(16, 4), "critic": nn.Linear(16, 1)})
    model = nn.ModuleDict({"body": nn.Linear(16, 16), "heads": tasks})
    found = roles(model)
    assert found["heads.actor.weight"] == found["heads.critic.weight"] == ("head",)
    attention = nn.ModuleDict({"query": nn.Linear(16, 4), "value": nn.Linear(16, 4)})
    model = nn.ModuleDict({"heads": nn.ModuleList([attention])})
    assert roles(model)["heads.0.value.weight"] == ("unknown",)
