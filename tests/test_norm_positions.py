"""Norms are read where they are: before a block, after it, or on the residual stream."""

import pytest
import torch
import transformers
from torch import nn

import learnable_multipliers as lrm
from families import VOCABULARY

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "pad_token_id": 0}
SPEECH = {
    **SMALL,
    "vocab_size": VOCABULARY,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}


def lfm2():
    kinds = ["conv", "full_attention"]
    config = transformers.Lfm2Config(**TEXT, num_key_value_heads=2, layer_types=kinds)
    return transformers.Lfm2ForCausalLM(config)


def esm():
    config = transformers.EsmConfig(**TEXT, mask_token_id=1, position_embedding_type="rotary")
    return transformers.EsmForMaskedLM(config)


def distilbert():
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4
    )
    return transformers.DistilBertForMaskedLM(config)


def wav2vec2(stable=False):
    config = transformers.Wav2Vec2Config(**SPEECH, do_stable_layer_norm=stable)
    return transformers.Wav2Vec2ForCTC(config)


def stable_wav2vec2():
    return wav2vec2(stable=True)


def beit():
    return transformers.BeitForImageClassification(transformers.BeitConfig(**IMAGE))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE))


QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
# A model, a norm in its last layer, and the matrices that might read it alone.
CASES = {
    "lfm2": (lfm2, "model.layers.1.ffn_norm", ("feed_forward.w1", "feed_forward.w3")),
    "esm": (esm, "esm.encoder.layer.1.LayerNorm", ("intermediate.dense",)),
    "beit": (beit, "beit.layers.1.layernorm_after", ("mlp.fc1",)),
    "vit": (vit, "vit.layers.1.layernorm_after", ("mlp.fc1",)),
    "distilbert": (
        distilbert,
        "distilbert.transformer.layer.1.sa_layer_norm",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    ),
    "wav2vec2": (wav2vec2, "wav2vec2.encoder.layers.1.layer_norm", QKV),
    "stable wav2vec2": (stable_wav2vec2, "wav2vec2.encoder.layers.1.layer_norm", QKV),
}
POST_NORM = {"distilbert", "wav2vec2"}


def inputs_of(model):
    generator = torch.Generator().manual_seed(0)
    if hasattr(model.config, "conv_dim"):
        return torch.randn(2, 4000, generator=generator).double()
    if hasattr(model.config, "patch_size"):
        return torch.randn(2, 3, 32, 32, generator=generator).double()
    return torch.randint(3, VOCABULARY, (2, 12), generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_a_norm_is_a_column_multiplier_where_rescaling_it_can_be_undone_in_the_columns(case):
    build, norm, leaves = CASES[case]
    model = build().double().eval()
    layer = norm.rpartition(".")[0]
    readers = [f"{layer}.{leaf}.weight" for leaf in leaves]
    found = {entry.name: entry for entry in lrm.plan(model).entries}
    assert all(found[name].carries for name in readers)
    rest = lrm.Rule(f"^(?!{layer}\\.)", "none", optional=True)
    unknown = lrm.Rule("feed_forward\\..*dense", "none", optional=True)
    plan = lrm.plan(model, "symmetry-aware", [rest, unknown])
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.2 * noise) if parameter.ndim == 1 else parameter.mul_(8)
        before = model(inputs_of(model)).logits
        factor = torch.rand(32, generator=generator).double() + 0.5
        for parameter in model.get_submodule(norm).parameters():
            parameter.mul_(factor)
        for name in readers:
            model.get_parameter(name).div_(factor)
        after = model(inputs_of(model)).logits
    changed = ((after - before).abs().max() / before.abs().max()).item()
    # Norms of transformers compute in float32; a norm that others read too changes logits by 0.4.
    assert (changed > 1e-3) == (case in POST_NORM)
    for name in readers:
        assert plan[name].matrix.col == (case in POST_NORM)
    assert any("post-norm" in words for words in plan.assumptions) == (case in POST_NORM)


def column_norm(model, name):
    """Return the norm that a plan gives as the reason for no columns."""
    words = lrm.plan(model, "symmetry-aware")[name].reason.split("; ")
    return next((w.partition(" in front")[0] for w in words if "in front scales" in w), None)


def test_norms_of_self_attention_cross_attention_and_mlp_are_those_of_their_blocks():
    layer = nn.TransformerDecoderLayer(16, 2, 32, norm_first=True)
    decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(16))
    assert column_norm(decoder, "layers.0.linear1.weight") == "norm3"
    decoder.layers[0].norm3.weight.requires_grad_(False)
    assert lrm.plan(decoder, "symmetry-aware")["layers.0.linear1.weight"].matrix.col
    config = transformers.MBartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
    )
    model = transformers.MBartForConditionalGeneration(config)
    blocks = {"self_attn.q_proj": "self_attn_layer_norm", "fc1": "final_layer_norm"}
    blocks["encoder_attn.q_proj"] = "encoder_attn_layer_norm"
    for leaf, norm in blocks.items():
        assert column_norm(model, f"model.decoder.layers.0.{leaf}.weight") == norm


def test_a_norm_of_another_width_feeds_no_matrix():
    class Mlp(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.fc1 = nn.Linear(width, 2 * width)
            self.act = nn.GELU()
            self.fc2 = nn.Linear(2 * width, width)

    class MixerBlock(nn.Module):
        """MLP-Mixer: the first MLP mixes 16 tokens, behind a norm of 32 channels."""

        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(32)
            self.mlp_tokens = Mlp(16)
            self.norm2 = nn.LayerNorm(32)
            self.mlp_channels = Mlp(32)

    model = nn.ModuleDict({"blocks": nn.ModuleList([MixerBlock()]), "norm": nn.LayerNorm(32)})
    assert column_norm(model, "blocks.0.mlp_channels.fc1.weight") == "norm2"
    assert column_norm(model, "blocks.0.mlp_tokens.fc1.weight") is None


@pytest.mark.parametrize("name", ["norm", "ln", "layer_norm", "rms", "norm_out", "encoder_norm"])
@pytest.mark.parametrize("first", [False, True])
def test_a_final_norm_is_one_wherever_it_is_created(name, first):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 16)
            if first:
                self.add_module(name, nn.RMSNorm(16))
            block = nn.TransformerEncoderLayer(16, 2, 32)
            del block.norm_first
            self.layers = nn.ModuleList([block])
            if not first:
                self.add_module(name, nn.RMSNorm(16))

    assert column_norm(Model(), "layers.0.linear1.weight") == "norm2"


@pytest.mark.parametrize("head", ["head", "lm_head", "to_logits", "classifier"])
def test_a_norm_at_the_start_of_the_head_is_final(head):
    block = nn.TransformerEncoderLayer(16, 2, 32)
    del block.norm_first
    logits = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 7))
    model = nn.ModuleDict({"layers": nn.ModuleList([block]), head: logits})
    assert column_norm(model, "layers.0.linear1.weight") == "norm2"


@pytest.mark.parametrize("of_speech", [False, True])
def test_norms_in_front_of_a_stack_of_a_speech_model_are_not_final(of_speech):
    """SEW and Data2Vec-Audio normalize features before layers, which are post-norm."""
    block = nn.TransformerEncoderLayer(16, 2, 32)
    del block.norm_first
    convolution = nn.Conv1d(16, 16, 3)
    stem = {"pos_conv_embed": convolution} if of_speech else {"conv": convolution}
    encoder = {**stem, "layer_norm": nn.LayerNorm(16), "layers": nn.ModuleList([block])}
    features = {"feature_extractor": nn.Conv1d(1, 16, 3), "layer_norm": nn.LayerNorm(16)}
    model = nn.ModuleDict({**(features if of_speech else {}), "encoder": nn.ModuleDict(encoder)})
    expected = None if of_speech else "norm2"
    assert column_norm(model, "encoder.layers.0.linear1.weight") == expected
