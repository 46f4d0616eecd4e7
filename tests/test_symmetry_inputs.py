"""Symmetries of models that take more than tokens: images, sound, and a decoder's tokens."""

import pytest
import torch
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.symmetry._model_copy import ModelCopy
from learnable_multipliers.symmetry._null_space import _change
from learnable_multipliers.symmetry._proxy import make_proxy

transformers = pytest.importorskip("transformers")

VOCABULARY = 23
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def tokens(*shape):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))


def vit(width):
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=width + 3,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config), numbers(4, 3, 8, 8)


def swin(width):
    config = transformers.SwinConfig(
        image_size=8,
        patch_size=2,
        embed_dim=width,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=2,
        mlp_ratio=1.5,
        num_labels=5,
    )
    return transformers.SwinForImageClassification(config), numbers(4, 3, 8, 8)


def wav2vec2(width):
    config = transformers.Wav2Vec2Config(
        vocab_size=9,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=width + 3,
        conv_dim=(6, 7),
        conv_stride=(4, 3),
        conv_kernel=(5, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ForCTC(config), {"input_values": numbers(2, 200)}


def t5(width):
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=width, d_kv=5, d_ff=width + 3, num_layers=1, num_heads=2
    )
    inputs = {"input_ids": tokens(4, 16), "decoder_input_ids": tokens(4, 12)}
    return transformers.T5ForConditionalGeneration(config), inputs


def clip(width):
    sizes = {
        "hidden_size": width,
        "intermediate_size": width + 3,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(
        text_config={**sizes, **_TOKENS, "max_position_embeddings": 16},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=9,
    )
    inputs = {"input_ids": tokens(6, 16), "pixel_values": numbers(6, 3, 8, 8)}
    return transformers.CLIPModel(config), inputs


def whisper(width):
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": width + 3}
    config = transformers.WhisperConfig(
        **_TOKENS,
        **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()},
        num_mel_bins=5,
        d_model=width,
        max_source_positions=8,
        max_target_positions=16,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": numbers(3, 5, 16), "decoder_input_ids": tokens(3, 12)}
    return transformers.WhisperForConditionalGeneration(config), inputs


MODELS = {
    "vit": vit,
    "swin": swin,
    "wav2vec2": wav2vec2,
    "t5": t5,
    "clip": clip,
    "whisper": whisper,
}
# Symmetries that they must have: what takes part, and how many rescalings.
EXPECTED = {
    "vit": [
        (r"rows of vit.layers.0.attention.q_proj", r"rows of vit.layers.0.attention.k_proj", 12),
        (r"rows of vit.layers.0.attention.v_proj", r"columns of vit.layers.0.attention.o_proj", 12),
        (r"vit.layernorm", r"columns of classifier", 12),
    ],
    "swin": [
        (
            r"columns of swin.encoder.layers.0.downsample.reduction",
            r"swin.encoder.layers.0.downsample.norm",
            24,
        ),
        (r"swin.layernorm", r"columns of classifier", 12),
    ],
    "wav2vec2": [
        (
            r"rows of wav2vec2.encoder.layers.0.attention.v_proj",
            r"columns of wav2vec2.encoder.layers.0.attention.out_proj",
            12,
        ),
        (
            r"wav2vec2.feature_projection.layer_norm",
            r"columns of wav2vec2.feature_projection.projection",
            7,
        ),
    ],
    "t5": [
        (
            r"encoder.final_layer_norm",
            r"columns of decoder.block.0.layer.1.EncDecAttention.k",
            12,
        ),
        (
            r"rows of encoder.block.0.layer.1.DenseReluDense.wi",
            r"columns of encoder.block.0.layer.1.DenseReluDense.wo",
            15,
        ),
    ],
    "clip": [
        (r"text_model.final_layer_norm", r"columns of text_projection", 8),
        (r"vision_model.post_layernorm", r"columns of visual_projection", 8),
    ],
    "whisper": [
        (
            r"model.encoder.layer_norm",
            r"columns of model.decoder.layers.0.encoder_attn.k_proj",
            8,
        ),
        (
            r"rows of model.decoder.layers.0.encoder_attn.v_proj",
            r"columns of model.decoder.layers.0.encoder_attn.out_proj",
            8,
        ),
    ],
}
WIDTHS = {"swin": 6, "clip": 8, "whisper": 8}


def made(family):
    torch.manual_seed(0)
    return MODELS[family](WIDTHS.get(family, 12))


def kinds(plan):
    return {
        entry.name: "+".join(sorted(entry.matrix.value_shapes(), reverse=True))
        for entry in plan.entries
        if entry.matrix is not None
    }


def rescalings(symmetries):
    """What scales against what, per channel, in words and numbers."""
    return {
        (frozenset((str(t.axis), t.power / s.terms[0].power) for t in s.terms), s.num_members)
        for s in symmetries
        if s.kind == "multiplicative"
    }


@pytest.mark.parametrize("family", MODELS)
def test_symmetries_of_any_inputs_hold_and_are_those_of_a_proxy(family):
    model, inputs = made(family)
    itself = lrm.find_symmetries(model, None, inputs, proxy=None)
    small = make_proxy(model)
    through = lrm.find_symmetries(model, None, inputs, proxy=small)
    in_float64 = ModelCopy(model, inputs)
    for symmetry in (*itself, *through):
        assert _change(in_float64, symmetry) < 1e-5, symmetry
    for one, other, count in EXPECTED[family]:
        counts = [
            s.num_members
            for s in itself
            if {one, other} <= {str(term.axis) for term in s.terms} and s.kind == "multiplicative"
        ]
        assert count in counts, (one, other, counts)
    assert rescalings(through) == rescalings(itself)


@pytest.mark.parametrize("family", MODELS)
def test_a_placement_derived_through_a_proxy_is_that_of_the_model_itself(family):
    model, inputs = made(family)
    one, other = (
        kinds(lrm.plan(model, "symmetry-aware", derive=True, inputs=inputs, proxy=proxy))
        for proxy in (None, MODELS[family](6 if family == "vit" else 4))
    )
    assert one == other
    assert {"row", "row+col"} <= set(one.values())


def test_a_large_model_is_searched_through_a_proxy_run_on_its_inputs():
    model, inputs = vit(256)
    carried = kinds(lrm.plan(model, "symmetry-aware", derive=True, inputs=inputs))
    assert carried["vit.layers.0.attention.q_proj.weight"] == "row"
    assert carried["vit.layers.0.attention.k_proj.weight"] == ""
    assert carried["vit.layers.0.attention.o_proj.weight"] == "row+col"
    assert carried["classifier.weight"] == ""


# What to do where a model cannot be run


def test_a_model_that_needs_more_than_tokens_raises_and_asks_for_inputs():
    model, _ = t5(12)
    with pytest.raises(ValueError, match="does not run on random tokens alone.*give inputs"):
        lrm.find_symmetries(model, None)
    with pytest.raises(ValueError, match="does not run on random tokens alone.*give inputs"):
        lrm.plan(model, "symmetry-aware", derive=True)


class Images(nn.Module):
    """Its inputs are as wide as the model: those of one size do not fit another."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_a_proxy_that_does_not_fit_the_inputs_raises_with_a_remedy_that_works():
    model, inputs = Images(12, 10), numbers(8, 12)
    small = Images(6, 5)
    with pytest.raises(ValueError, match=r"small Images does not run.*proxy=\(small, inputs\)"):
        lrm.find_symmetries(model, None, inputs, proxy=small)
    through = lrm.find_symmetries(model, None, inputs, proxy=(small, numbers(8, 6)))
    itself = lrm.find_symmetries(model, None, inputs, proxy=None)
    assert rescalings(through) == rescalings(itself)
    assert itself.nullity == 12


def test_special_tokens_of_a_proxy_lie_in_its_vocabulary():
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=399,
        eos_token_id=398,
    )
    small = make_proxy(transformers.LlamaForCausalLM(config))
    assert small.config.vocab_size == 13
    assert small.config.pad_token_id == 399 % 13


def test_a_model_without_finite_outputs_raises():
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        rms_norm_eps=float("nan"),
        **_TOKENS,
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="not finite at random weights"):
        lrm.find_symmetries(model, lrm.plan(model, "scalar"))
