"""The explicit path inside everything people do with models."""

import copy

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import learnable_multipliers as lrm
from families import FusedBlock, HandWritten, build, logits, token_ids
from learnable_multipliers import Rule
from tolerance import TOLERANCE

F32 = TOLERANCE[torch.float32]


def explicit(model, placement="full", rules=()):
    lrm.reparametrize(model, lrm.plan(model, placement, rules))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".parametrizations." in f".{name}" and not name.endswith("original"):
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def loss_of(model):
    ids = token_ids()
    out = model(ids)
    out = out if isinstance(out, torch.Tensor) else out.logits
    return torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), ids.flatten())


def gradients(model):
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_module_weight_is_the_effective_weight():
    model = explicit(HandWritten())
    layer = model.layers[0].attention.wq
    carried = layer.parametrizations.weight[0]
    expected = carried.row[:, None] * layer.parametrizations.weight.original * carried.col
    torch.testing.assert_close(layer.weight, expected)
    assert carried.row.shape == (16,)
    assert carried.col.shape == (16,)
    assert isinstance(carried.row, torch.nn.Parameter)


def test_blocks_without_rows_have_no_parameters():
    model = build("falcon-h1")
    explicit(model, "symmetry-aware")
    carried = model.model.layers[0].mamba.in_proj.parametrizations.weight[0]
    assert carried.row.shape == (32 + 4,)
    row = lrm.multipliers(model)["model.layers.0.mamba.in_proj.weight"]["row"]
    assert (row[32:80] == 1).all()
    torch.testing.assert_close(torch.cat([row[:32], row[80:]]), carried.row.detach())


def test_state_dict_round_trip():
    source, target = explicit(build("falcon-h1")), explicit(build("falcon-h1"))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(logits(target), logits(source), rtol=0, atol=0)


def test_merging_a_deepcopy_leaves_the_original_training():
    model = explicit(build("llama-tied"))
    before = logits(model)
    merged = lrm.merge(copy.deepcopy(model))
    torch.testing.assert_close(logits(merged), before, **F32)
    assert not parametrize.is_parametrized(merged.lm_head)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    assert gradients(model)  # still differentiates through the multipliers
    lrm.merge(model)
    torch.testing.assert_close(logits(model), before, **F32)


def test_tied_weight_is_one_matrix_with_one_set_of_multipliers():
    model = explicit(build("llama-tied"))
    embedding, head = model.model.embed_tokens, model.lm_head
    assert embedding.parametrizations.weight is head.parametrizations.weight
    torch.testing.assert_close(embedding.weight, head.weight, rtol=0, atol=0)
    names = [name for name, _ in model.named_parameters() if "embed_tokens" in name]
    assert len(names) == 2  # raw and col
    assert not [name for name, _ in model.named_parameters() if "lm_head" in name]
    lrm.merge(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_merge_restores_the_order_of_parameters():
    """Optimizer state is positional: weight must come before bias again."""
    model = FusedBlock()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    explicit(model)
    assert [name for name, _ in model.named_parameters()] != names
    lrm.merge(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys


def test_merge_keeps_parameter_objects_of_a_float32_model():
    model = HandWritten()
    weight = model.output.weight
    embedding = model.tok_embeddings.weight
    lrm.merge(explicit(model))
    assert model.output.weight is weight
    assert model.tok_embeddings.weight is embedding


def test_merge_of_a_plain_model_changes_nothing():
    model = HandWritten()
    before = logits(model)
    assert lrm.merge(model) is model
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


def test_bfloat16_model_keeps_float32_raw_weights_and_multipliers():
    model = build("llama-tied", dtype=torch.bfloat16)
    before = logits(model)
    lrm.reparametrize(model, lrm.plan(model, "full"))
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    layer = model.model.layers[0].mlp.up_proj
    carried = layer.parametrizations.weight
    assert layer.weight.dtype == torch.bfloat16
    assert carried.original.dtype == carried[0].row.dtype == torch.float32
    gradients(model)
    assert carried.original.grad.dtype == torch.float32
    # A step too small for bfloat16 is not lost.
    with torch.no_grad():
        carried[0].row.add_(1e-4)
    assert (carried[0].row != 1).all()
    expected = logits(model)
    lrm.merge(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["full", "symmetry-aware", "scalar"])
def test_compiled_model_gives_the_same_gradients(placement):
    # aot_eager traces forward and backward as inductor would; the C++ step is another test.
    torch._dynamo.reset()
    model = explicit(build("llama"), placement)
    expected = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss_of(compiled).backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inductor_compiles_the_explicit_model():
    torch._dynamo.reset()
    model = explicit(HandWritten(layers=1), "symmetry-aware")
    expected = gradients(model)
    model.zero_grad()
    loss_of(torch.compile(model)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_autocast_multiplies_in_float32_and_computes_in_bfloat16():
    model = explicit(HandWritten())
    merged = lrm.merge(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.layers[0].attention.wq.weight.dtype == torch.float32
        out, expected = logits(model), logits(merged)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_activation_checkpointing_gives_the_same_gradients():
    model = explicit(HandWritten())
    expected = gradients(model)
    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    actual = gradients(model)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)


def test_save_pretrained_of_an_unmerged_model_raises(tmp_path):
    from transformers import LlamaForCausalLM

    model = explicit(build("llama"))
    expected = logits(model)
    with pytest.raises(ValueError, match=r"lrm.merge\(copy.deepcopy\(model\)\)"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    lrm.merge(copy.deepcopy(model)).save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), expected, **F32)
    with pytest.raises(ValueError, match="raw weights and multipliers"):
        model.save_pretrained(tmp_path)


def test_reparametrizing_twice_raises():
    model = HandWritten()
    plan = lrm.plan(model, "full")
    lrm.reparametrize(model, plan)
    with pytest.raises(ValueError, match="carries multipliers already"):
        lrm.reparametrize(model, plan)


def test_merge_with_a_parametrization_on_top_raises():
    model = explicit(HandWritten())
    parametrize.register_parametrization(model.output, "weight", torch.nn.Identity())
    parametrize.register_parametrization(
        model.layers[0].attention.wq, "weight", torch.nn.Identity()
    )
    with pytest.raises(ValueError, match="on top of the multipliers"):
        lrm.merge(model)


def test_assignment_sets_the_effective_weight():
    model = explicit(HandWritten())
    wanted = torch.randn(16, 16)
    layer = model.layers[0].attention.wq
    layer.weight = wanted
    torch.testing.assert_close(layer.weight.detach(), wanted, **F32)
    with torch.no_grad():
        layer.parametrizations.weight[0].row[0] = 0.0
    with pytest.raises(ValueError, match="a multiplier is zero"):
        layer.weight = wanted


def test_log_scale_multiplies_by_the_exponential():
    model = HandWritten()
    rules = [Rule("", scale="log")]
    lrm.reparametrize(model, lrm.plan(model, "full", rules))
    layer = model.layers[0].attention.wq
    carried = layer.parametrizations.weight[0]
    assert (carried.row == 0).all()
    with torch.no_grad():
        carried.row.fill_(0.7)
    row = lrm.multipliers(model)["layers.0.attention.wq.weight"]["row"]
    torch.testing.assert_close(row, torch.full((16,), 0.7).exp())
    expected = row[:, None] * layer.parametrizations.weight.original
    torch.testing.assert_close(layer.weight, expected)


def test_stacked_experts_have_multipliers_of_their_own():
    model = explicit(build("mixtral"), "scalar")
    carried = model.model.layers[0].mlp.experts.parametrizations
    assert carried.gate_up_proj[0].scalar.shape == (4, 2)
    assert carried.down_proj[0].scalar.shape == (4,)


def test_reparametrizing_on_the_meta_device_gives_shapes():
    with torch.device("meta"):
        model = HandWritten()
    lrm.reparametrize(model, lrm.plan(model, "full"))
    assert model.layers[0].attention.wq.weight.is_meta
    assert list(lrm.merge(model).state_dict()) == list(HandWritten().state_dict())
