"""What is read off a model is true of its function, or not claimed."""

import re

import pytest
import torch
from torch import nn

from families import FAMILIES, MORE_FAMILIES, VOCABULARY, FusedBlock, HandWritten, build, logits
from learnable_multipliers.roles import read_roles


def readings(model):
    return {reading.name: reading for reading in read_roles(model).parameters}


def roles(model):
    return {
        name: tuple(part.role for part in reading.parts) or "vector"
        for name, reading in readings(model).items()
    }


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, "hand-written", "fused"])
def test_norms_said_to_scale_columns_do(family):
    """Scale each channel of a norm's output, undo it in the columns it feeds: nothing changes."""
    own = {"hand-written": HandWritten, "fused": FusedBlock}
    model = (own[family]() if family in own else build(family)).double()
    before = logits(model)
    fed = {}
    for reading in readings(model).values():
        if reading.column_norm:
            fed.setdefault(reading.column_norm, []).append(reading)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, matrices in fed.items():
            norm = model.get_submodule(path)
            factor = 2.0 ** torch.randint(-2, 3, norm.weight.shape, generator=generator).double()
            # Gemma and Nemotron store their weights less 1.
            offset = float(re.search("Gemma|1P", type(norm).__name__) is not None)
            norm.weight.copy_((norm.weight + offset) * factor - offset)
            if getattr(norm, "bias", None) is not None:
                norm.bias.mul_(factor)
            for reading in [*matrices, *routers_beside(model, path)]:
                dim = -1 if reading.transposed else -2
                model.get_parameter(reading.name).div_(factor.unsqueeze(dim))
    assert fed or family == "olmo", "its norms have no weights"
    # Hugging Face norms compute in float32; a wrong claim changes logits by more than 0.1.
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)


def routers_beside(model, path):
    layer = path.rpartition(".")[0]
    return [
        reading
        for reading in readings(model).values()
        if reading.parts
        and reading.parts[0].role == "router"
        and "post_attention" in path
        and reading.name.startswith(f"{layer}.")
    ]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "glm4"])
def test_sandwich_norms_are_distinguished(family):
    by_name = readings(build(family))
    layer = "model.layers.0."
    down = by_name[f"{layer}mlp.down_proj.weight"]
    after = {"glm4": "post_mlp_layernorm"}.get(family, "post_feedforward_layernorm")
    assert down.parts[0].row_norm == f"{layer}{after}"
    assert not down.column_norm
    query = next(r for n, r in by_name.items() if n.startswith(f"{layer}self_attn.q_proj.weight"))
    assert query.column_norm == f"{layer}input_layernorm"


def test_freezing_one_norm_does_not_change_what_the_others_are():
    """Llama's post_attention_layernorm feeds the MLP, whatever is trained."""
    model = build("llama")
    model.model.layers[0].input_layernorm.requires_grad_(False)
    by_name = readings(model)
    layer = "model.layers.0."
    assert by_name[f"{layer}self_attn.q_proj.weight"].column_norm == ""
    assert by_name[f"{layer}self_attn.o_proj.weight"].parts[0].row_norm == ""
    assert by_name[f"{layer}mlp.up_proj.weight"].column_norm == f"{layer}post_attention_layernorm"


@pytest.mark.parametrize("first", [False, True])
def test_post_norm_layers_are_recognized_by_their_own_word(first):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=first)
    by_name = readings(layer)
    assert [part.role for part in by_name["self_attn.in_proj_weight"].parts] == [
        "query",
        "key",
        "value",
    ]
    assert by_name["self_attn.in_proj_weight"].column_norm == ("norm1" if first else "")
    assert by_name["linear1.weight"].column_norm == ("norm2" if first else "")
    assert by_name["linear1.weight"].parts[0].role == "ungated-up"


def test_post_norm_stack_is_recognized_by_the_missing_final_norm():
    model = build("opt", do_layer_norm_before=False)
    assert not any(reading.column_norm for reading in readings(model).values())
    model = HandWritten()
    del model.norm
    model_roles = read_roles(model)
    assert not any(reading.column_norm for reading in model_roles.parameters)
    assert any("post-norm" in sentence for sentence in model_roles.assumptions)


def test_bert_has_no_column_norms():
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=24,
        is_decoder=True,
    )
    by_name = readings(BertLMHeadModel(config))
    layer = "bert.encoder.layer.0."
    assert by_name[f"{layer}intermediate.dense.weight"].parts[0].role == "ungated-up"
    assert by_name[f"{layer}attention.output.dense.weight"].parts[0].role == "attention-out"
    assert not any(r.column_norm for n, r in by_name.items() if n.startswith(layer))


def test_keys_and_values_of_cross_attention_are_not_fed_by_the_layers_norm():
    layer = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    by_name = readings(layer)
    assert by_name["self_attn.in_proj_weight"].column_norm
    assert not by_name["multihead_attn.in_proj_weight"].column_norm


def test_attention_biases_are_no_matrix():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    by_name = roles(T5ForConditionalGeneration(config))
    tables = [name for name in by_name if "relative_attention_bias" in name]
    assert tables
    assert all(by_name[name] == "vector" for name in tables)
    assert "unknown" not in {role for role in by_name.values() for role in role}


class Mixture(nn.Module):
    """A shared and several routed experts in front of one norm."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.Module()
        layer.input_norm = nn.RMSNorm(8)
        layer.pre_mlp_norm = nn.RMSNorm(8)
        layer.post_mlp_norm = nn.RMSNorm(8)
        layer.mlp = nn.Module()
        layer.mlp.gate = nn.Linear(8, 4, bias=False)
        layer.mlp.experts = nn.ModuleList(self.expert() for _ in range(4))
        layer.mlp.shared_expert = self.expert()
        self.layers = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(8)

    @staticmethod
    def expert():
        module = nn.Module()
        module.gate_proj = nn.Linear(8, 12, bias=False)
        module.up_proj = nn.Linear(8, 12, bias=False)
        module.down_proj = nn.Linear(12, 8, bias=False)
        return module


def test_norm_behind_a_mixture_is_no_ones_row_multiplier():
    by_name = readings(Mixture())
    assert by_name["layers.0.mlp.gate.weight"].parts[0].role == "router"
    downs = [r for n, r in by_name.items() if n.endswith("down_proj.weight")]
    assert len(downs) == 5
    assert not any(down.parts[0].row_norm for down in downs)
    up = by_name["layers.0.mlp.experts.0.up_proj.weight"]
    assert up.column_norm == "layers.0.pre_mlp_norm"


class Experts(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        into, out = ((3, 8, 12), (3, 12, 8)) if transposed else ((3, 12, 8), (3, 8, 12))
        self.w1 = nn.Parameter(torch.randn(into))
        self.w3 = nn.Parameter(torch.randn(into))
        self.w2 = nn.Parameter(torch.randn(out))


@pytest.mark.parametrize("transposed", [False, True])
def test_axes_of_hand_written_stacks_follow_from_the_models_width(transposed):
    model = nn.ModuleDict({"embed": nn.Embedding(11, 8), "experts": Experts(transposed)})
    by_name = readings(model)
    assert [by_name[f"experts.{n}"].parts[0].role for n in ("w1", "w3", "w2")] == [
        "gate",
        "up",
        "down",
    ]
    assert by_name["experts.w1"].transposed == transposed
    model = nn.ModuleDict({"experts": Experts(transposed)})
    assert readings(model)["experts.w1"].opaque


def test_nano_gpt_is_read():
    class CausalSelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn = nn.Linear(16, 48)
            self.c_proj = nn.Linear(16, 16)

    model = nn.ModuleDict({"attn": CausalSelfAttention()})
    by_name = roles(model)
    assert by_name["attn.c_attn.weight"] == ("query", "key", "value")
    assert by_name["attn.c_proj.weight"] == ("attention-out",)


class Odd(nn.Module):
    """Things that look like something else."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.position_embedding = nn.Embedding(64, 32)
        self.adapter = nn.ModuleDict({"down_proj": nn.Linear(32, 8), "up_proj": nn.Linear(8, 32)})
        self.square = nn.ModuleDict({w: nn.Linear(32, 32) for w in ("w1", "w2", "w3")})
        self.attend = nn.Sequential(nn.Linear(32, 48), nn.Softmax(-1), nn.Linear(48, 32))
        self.inner = nn.ModuleDict({"output": nn.Linear(32, 16)})
        self.widen = nn.Linear(32, 64)
        self.MoshiGatingMLP = MoshiGatingMLP()
        self.fused_norm = LayerNormLinear()


class MoshiGatingMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(32, 96)
        self.fc2 = nn.Linear(48, 32)


class LayerNormLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32))


def test_look_alikes_are_unknown():
    by_name = roles(Odd())
    matrices = [n for n in by_name if n.endswith("weight") and "embed" not in n]
    assert {name: by_name[name] for name in matrices} == dict.fromkeys(matrices, ("unknown",))
    assert by_name["position_embedding.weight"] == ("position-embedding",)


def test_linear_attention_is_not_read_as_softmax_attention():
    class DeltaAttention(nn.Module):
        def __init__(self):
            super().__init__()
            for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
                self.add_module(leaf, nn.Linear(8, 8))
            self.conv1d = nn.Conv1d(8, 8, 4, groups=8)

    by_name = roles(nn.ModuleDict({"attn": DeltaAttention()}))
    assert {by_name[f"attn.{leaf}_proj.weight"] for leaf in "qkvo"} == {("unknown",)}
    assert by_name["attn.conv1d.weight"] == "vector"


def test_more_inside_attention_is_said():
    class GatedAttention(nn.Module):
        def __init__(self):
            super().__init__()
            for leaf in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"):
                self.add_module(leaf, nn.Linear(8, 8))

    model_roles = read_roles(nn.ModuleDict({"attn": GatedAttention()}))
    assert any("holds g_proj as well" in sentence for sentence in model_roles.assumptions)


@pytest.mark.slow
def test_every_causal_model_of_transformers_can_be_planned(request):
    """All architectures at their default sizes, on the meta device; none may fail.

    A quick run takes every fourth.
    """
    import warnings

    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    import learnable_multipliers as lrm

    transformers.logging.set_verbosity_error()
    planned = 0
    stride = 4 if request.config.getoption("--quick") else 1
    for config_class, model_class in list(MODEL_FOR_CAUSAL_LM_MAPPING.items())[::stride]:
        if isinstance(model_class, tuple | list):
            model_class = model_class[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = config_class()
                for depth in ("num_hidden_layers", "n_layer", "num_layers"):
                    if re.fullmatch(r"\d+", str(getattr(config, depth, ""))):
                        setattr(config, depth, 2)
                with torch.device("meta"):
                    model = model_class(config)
            except Exception:  # some default configs do not build; that is not ours to judge
                continue
        plan = lrm.plan(model, "full")
        assert {e.name for e in plan.entries} == {name for name, _ in model.named_parameters()}
        planned += 1
    assert planned > 150 / stride
