"""The language model against transformers' own classes, and its own laws."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.model import hugging_face
from learnable_multipliers.pretrain.model.attention import rotary_table
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.model.presets import PRESETS

FACTORS = {
    "mup_embedding": 5.7,
    "mup_head": 0.04,
    "mup_attention_in": 1.1,
    "mup_key": 0.4,
    "mup_attention_out": 0.9,
    "mup_ssm_in": 1.25,
    "mup_z": 0.35,
    "mup_x": 0.25,
    "mup_B": 0.36,
    "mup_C": 0.5,
    "mup_dt": 0.37,
    "mup_ssm_out": 0.24,
    "mup_gate": 0.88,
    "mup_down": 0.59,
}
LLAMA_FACTORS = {name: 1.0 if "ssm" in name else value for name, value in FACTORS.items()}
HYBRID, LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
SHAPES = {
    "hybrid": replace(HYBRID, **FACTORS),
    "hybrid tied": replace(HYBRID, **FACTORS, tie_embeddings=True),
    "hybrid, inner norm, groups": replace(
        HYBRID, **FACTORS, ssm_norm=True, ssm_groups=2, rope_theta=1e11
    ),
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tie_embeddings=True, num_kv_heads=4),
    "llama with factors": replace(LLAMA, **LLAMA_FACTORS),
}


def loud(model: HybridLM) -> HybridLM:
    """Make every parameter matter: at their usual start most of a model is nearly linear."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
            else:
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def theirs(config: ModelConfig) -> transformers.PreTrainedModel:
    settings = hugging_face.to_config(config)
    kind, name = settings.pop("model_type"), settings.pop("architectures")[0]
    config_class = {"llama": "LlamaConfig", "falcon_h1": "FalconH1Config"}[kind]
    made = getattr(transformers, config_class)(**settings)
    return getattr(transformers, name)(made).eval()


def some_tokens(config: ModelConfig, length: int = 150) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers(shape):
    config = SHAPES[shape]
    ours = loud(build(config))
    peer = theirs(config)
    missing, unexpected = peer.load_state_dict(hugging_face.to_state_dict(ours), strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"] if config.tie_embeddings else [])
    tokens = some_tokens(config)
    with torch.no_grad():
        expected = peer(tokens).logits
        torch.testing.assert_close(
            ours(tokens), expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item()
        )


@pytest.mark.parametrize("chunk", [24, 256])
def test_a_chunk_size_is_exported_as_it_was_asked_for(chunk):
    config = replace(SHAPES["hybrid"], ssm_chunk_size=chunk)
    assert hugging_face.to_config(config)["mamba_chunk_size"] == chunk


def test_presets_have_their_sizes():
    sizes = {}
    for name, config in PRESETS.items():
        with torch.device("meta"):
            sizes[name] = HybridLM(config).num_parameters
    assert sizes["falcon-h1-0.5b"] == 521_411_104
    # The sizes in their names, as published.
    assert sizes["falcon-h1-1.5b"] == pytest.approx(1.55e9, rel=0.005)
    assert sizes["falcon-h1-3b"] == pytest.approx(3.15e9, rel=0.005)
    assert sizes["90m"] == pytest.approx(90e6, rel=0.05)
    assert sizes["20m"] == pytest.approx(20e6, rel=0.1)
    assert sizes["20m-llama"] == pytest.approx(sizes["20m"], rel=0.05)
    assert sizes["llama-0.5b"] == pytest.approx(sizes["falcon-h1-0.5b"], rel=0.05)


def test_roles_are_those_of_transformers_model():
    with torch.device("meta"):
        ours = lrm.plan(HybridLM(PRESETS["tiny"]), "symmetry-aware")
    peer = lrm.plan(theirs(PRESETS["tiny"]), "symmetry-aware")
    assert {e.name: e.matrix for e in ours.entries} == {e.name: e.matrix for e in peer.entries}


def test_folding_the_factors_leaves_the_logits_alone():
    config = replace(HYBRID, **FACTORS)
    model = loud(build(config)).double()
    tokens = some_tokens(config)
    with torch.no_grad():
        before = model(tokens)
        lrm.initialize_(model, lrm.plan(model, "full", [lrm.Rule("", init="fold")]))
        torch.testing.assert_close(model(tokens), before, rtol=1e-9, atol=1e-9)
    # The head carries no multiplier, so its factor stays.
    kept = {name: value for name, value in model.config.mup_factors.items() if value != 1.0}
    assert kept == {"mup_head": 0.04}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_loss_is_cross_entropy_and_z_loss(dtype):
    model = loud(build(LLAMA)).to(dtype)
    tokens = some_tokens(LLAMA)
    with torch.no_grad():
        losses = model.loss(tokens, z_loss=0.01)
        logits = model(tokens[:, :-1]).double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    penalty = 0.01 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(losses.cross_entropy.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses.total.double(), expected + penalty, rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", [HYBRID, LLAMA, replace(HYBRID, num_heads=0)])
def test_no_token_sees_the_future(config):
    model = loud(build(config)).double()
    tokens = some_tokens(config)
    changed = tokens.clone()
    changed[:, 70:] = (changed[:, 70:] + 1) % config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens)[:, :70], model(changed)[:, :70], rtol=1e-12, atol=1e-12
        )


def test_a_model_of_state_space_mixers_alone_trains_every_parameter():
    config = replace(HYBRID, num_heads=0, intermediate_size=0)
    model = build(config)
    model.loss(some_tokens(config)).total.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert not any("self_attn" in name or "feed_forward" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="no model of this shape"):
        hugging_face.to_config(config)


def test_the_gradient_of_joined_projections_is_joined_once():
    class Joined(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.cat.default:
                widths.append(out.shape[-1])
            return out

    widths = []
    layer = build(HYBRID).model.layers[0]
    mamba, attention = sum(layer.mamba.input_sizes), layer.self_attn.input_size
    h = torch.randn(1, 8, HYBRID.hidden_size, requires_grad=True)
    y = layer(h, rotary_table(8, HYBRID.head_dim, 1e4, h.device))
    with Joined():
        y.sum().backward()
    assert widths.count(mamba + attention) == 1
    assert mamba not in widths


def test_frozen_norms_stay_at_one_but_the_last():
    model = build(replace(HYBRID, freeze_norms=True))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 2 * HYBRID.num_layers
    assert all("layernorm" in name and "final" not in name for name in frozen)
    assert all(model.get_parameter(name).eq(1).all() for name in frozen)
    model = build(replace(HYBRID, freeze_norms=True, ssm_norm=True))
    inner = [p for name, p in model.named_parameters() if "mamba.norm" in name]
    assert len(inner) == HYBRID.num_layers
    assert not any(p.requires_grad for p in inner)


def test_the_same_seed_gives_the_same_weights():
    first, second, other = build(HYBRID, 3), build(HYBRID, 3), build(HYBRID, 4)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "4 query heads cannot share 3 key heads"),
        ({"head_dim": 33}, "rotary embeddings rotate pairs"),
        ({"ssm_head_dim": 50}, "cannot be cut into heads of 50"),
        ({"ssm_groups": 4}, "cannot be shared out to 4 groups"),
        ({"num_heads": 0, "ssm_size": 0}, "needs attention or a state-space mixer"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(replace(HYBRID, **changes))


def test_a_llama_that_transformers_would_refuse_is_refused_at_once():
    config = replace(LLAMA, num_heads=6, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"hidden_size \(128\) that num_heads \(6\) divides"):
        hugging_face.to_config(config)
