"""Every family: all parameters accounted for, both forms of the model agree, merge is exact."""

import copy

import pytest
import torch

import learnable_multipliers as lrm
from families import FAMILIES, MORE_FAMILIES, FusedBlock, HandWritten, build, logits
from learnable_multipliers._multiplier import carried_rows
from learnable_multipliers.roles import QKV
from tolerance import TOLERANCE

ALL = [*FAMILIES, *MORE_FAMILIES]
PLACEMENTS = ["full", "symmetry-aware", "scalar"]
F32 = TOLERANCE[torch.float32]


def make(family, **kwargs):
    if family == "hand-written":
        return HandWritten()
    if family == "hand-written-fused":
        return FusedBlock()
    return build(family, **kwargs)


def spread_(model):
    """Move every multiplier of an explicit model far from 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".parametrizations." in name and not name.endswith(".original"):
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 2.0))


@pytest.mark.parametrize("family", [*ALL, "hand-written", "hand-written-fused"])
def test_every_parameter_is_accounted_for_once(family):
    model = make(family)
    plan = lrm.plan(model, "full")
    named = dict(model.named_parameters())
    assert [entry.name for entry in plan.entries] == list(named)
    for entry in plan.entries:
        assert entry.shape == tuple(named[entry.name].shape)
        assert entry.reason
        assert entry.vector == (entry.matrix is None)
    assert lrm.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("family", ALL)
def test_heads_have_the_rows_that_the_config_gives_them(family):
    model = make(family)
    config = model.config
    expected = getattr(config, "head_dim", None) or config.hidden_size // getattr(
        config, "num_attention_heads", 1
    )
    head_dims = {
        (block.role, block.head_dim)
        for entry in lrm.plan(model, "full").entries
        for block in (entry.matrix.blocks if entry.matrix else ())
        if block.role in QKV
    }
    if family == "deepseek-v3":
        # Rotated and other features of a head, and the rotated ones of a key that all heads share.
        rope, other, value = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        shared = {("key", rope), ("key", other), ("value", value)}
        assert head_dims == {("query", rope + other)} | shared
    elif family != "mamba2":
        assert head_dims == {(role, expected) for role in QKV}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", [*ALL, "hand-written"])
def test_explicit_model_equals_plain_model_with_effective_weights(family, placement):
    model = make(family)
    plain, keys, before = copy.deepcopy(model), list(model.state_dict()), logits(model)
    plan = lrm.plan(model, placement)

    lrm.reparametrize(model, plan)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)

    spread_(model)
    values = lrm.multipliers(model)
    assert set(values) == {entry.name for entry in plan.entries if entry.carries}
    with torch.no_grad():
        for entry in plan.entries:
            if entry.carries:
                weight = plain.get_parameter(entry.name)
                weight.copy_(lrm.effective(entry.matrix, weight, values[entry.name]))
    explicit = logits(model)
    assert not torch.allclose(explicit, before, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(explicit, logits(plain), **F32)

    merged = lrm.merge(model)
    assert merged is model
    torch.testing.assert_close(logits(merged), explicit, **F32)
    assert list(merged.state_dict()) == keys
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=0, atol=0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "falcon-h1", "mixtral", "gpt-neox"])
def test_gradients_of_the_explicit_model_follow_equation_4(family, placement):
    """Autograd through the whole model, and the split of the effective weight's gradient."""
    model = make(family, dtype=torch.float64)
    plan = lrm.plan(model, placement)
    lrm.reparametrize(model, plan)
    spread_(model)
    plain = lrm.merge(copy.deepcopy(model))
    targets = torch.randn(logits(model).shape, dtype=torch.float64)
    for side in (model, plain):
        (output(side) * targets).sum().backward()
    for entry in plan.entries:
        if not entry.carries:
            continue
        carried = dict(model.named_modules())[
            ".".join([*entry.name.split(".")[:-1], "parametrizations", entry.name.split(".")[-1]])
        ]
        raw_grad, grads = lrm.split_gradient(
            entry.matrix,
            carried.original.detach(),
            {name: value.detach() for name, value in carried[0].values().items()},
            plain.get_parameter(entry.name).grad,
        )
        torch.testing.assert_close(carried.original.grad, raw_grad, rtol=1e-9, atol=1e-12)
        for name, grad in grads.items():
            wanted = getattr(carried[0], name).grad
            if name == "row":
                grad = carried_rows(entry.matrix, grad)
            torch.testing.assert_close(wanted, grad, rtol=1e-9, atol=1e-12)


def output(model):
    from families import token_ids

    out = model(token_ids())
    return out if isinstance(out, torch.Tensor) else out.logits


def scaled(model, plan, factors):
    """Return a copy with the rows or columns of some roles multiplied, biases included."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for entry in plan.entries:
            matrix = entry.matrix
            if matrix is None:
                continue
            for block in matrix.blocks:
                row = factors.get((block.role, "row"))
                if row is not None:
                    factor = rows_of(matrix, block.role, row)
                    weight = model.get_parameter(entry.name)
                    weight.mul_(factor.unsqueeze(-2 if matrix.transposed else -1))
                    owner = model.get_submodule(entry.name.rpartition(".")[0])
                    bias = getattr(owner, "bias", None)
                    if bias is not None:
                        bias.mul_(factor)
            col = factors.get((matrix.blocks[0].role, "col"))
            if col is not None:
                model.get_parameter(entry.name).mul_(col)
    return model


def rows_of(matrix, role, factor):
    pattern = torch.cat(
        [torch.full((b.size,), factor if b.role == role else 1.0) for b in matrix.blocks]
    ).double()
    return pattern.repeat(matrix.repeats)


PAIRS = {
    "query and key": ("query", "row", "key", "row"),
    "value and attention-out": ("value", "row", "attention-out", "col"),
    "up and down": ("up", "row", "down", "col"),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("family", ALL)
def test_roles_have_the_symmetries_their_names_promise(family, pair):
    """A misread role or block layout breaks the exact rescaling that the true one allows."""
    model = make(family, dtype=torch.float64)
    plan = lrm.plan(model, "full")
    roles = {block.role for entry in plan.entries if entry.matrix for block in entry.matrix.blocks}
    first, first_axis, second, second_axis = PAIRS[pair]
    if first not in roles:
        pytest.skip(f"no {first} matrix")
    before = logits(model)
    both = logits(scaled(model, plan, {(first, first_axis): 2.0, (second, second_axis): 0.5}))
    alone = logits(scaled(model, plan, {(first, first_axis): 2.0}))
    # A norm behind the pair takes any scale away, but for its epsilon.
    normed = family in (QK_NORMED if first == "query" else NORMED_OUTPUTS)
    torch.testing.assert_close(both, before, rtol=0, atol=1e-3 if normed else 1e-9)
    assert normed == ((alone - before).abs().max() < 1e-3)


QK_NORMED = {"qwen3", "gemma3", "olmo2", "qwen3-moe"}
NORMED_OUTPUTS = {"gemma2", "gemma3", "olmo2", "glm4"}


@pytest.mark.parametrize("family", ALL)
def test_symmetry_aware_rows_follow_the_norms_that_are_there(family):
    model = make(family)
    plan = lrm.plan(model, "symmetry-aware")
    rows = {}
    for entry in plan.entries:
        for block in entry.matrix.blocks if entry.matrix else ():
            rows.setdefault(block.role, set()).add(block.row)
    assert rows.get("query", {True}) == {family not in QK_NORMED}
    for role in ("attention-out", "down"):
        assert rows.get(role, {True}) == {family not in NORMED_OUTPUTS} or role not in rows
