"""PEFT: adapters train plainly; multipliers may be learned over a base whose raw weights stay."""

import pytest
import torch

import learnable_multipliers as lrm

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LlamaConfig, LlamaForCausalLM = transformers.LlamaConfig, transformers.LlamaForCausalLM
OptimizerFactory = pytest.importorskip(
    "learnable_multipliers.integrations.transformers"
).OptimizerFactory
ADAPTED = ("q_proj", "v_proj", "down_proj")


def adapted(**settings):
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=list(ADAPTED), **settings))


def take_steps(model, optimizer, count=4):
    for batch in torch.randint(32, (count, 4, 8), generator=torch.Generator().manual_seed(1)):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("placement", ["full", "symmetry-aware", "scalar"])
def test_adapters_carry_nothing_and_the_plan_has_the_reason(placement):
    plan = lrm.plan(adapted(use_dora=True), placement)
    entries = {entry.name: entry for entry in plan.entries}
    matrices = {n: e for n, e in entries.items() if ".lora_A." in n or ".lora_B." in n}
    assert len(matrices) == 2 * len(ADAPTED)
    assert {entry.reason for entry in matrices.values()} == {"adapter: a low-rank update"}
    assert not any(entry.carries for entry in plan.entries)
    assert {e.reason for n, e in entries.items() if "lora_" not in n} == {"frozen"}
    # What the adapted layers do is still read.
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert [block.role for block in entries[name].matrix.blocks] == ["query"]
    assert "query" in str(plan)


def test_adapters_train_as_with_torch_adamw():
    model, other = adapted(), adapted()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    take_steps(model, lrm.AdamW.from_model(model, **settings))
    trained = [p for p in other.parameters() if p.requires_grad]
    take_steps(other, torch.optim.AdamW(trained, **settings))
    for (name, parameter), expected in zip(
        model.named_parameters(), other.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-7, msg=name)


def test_multipliers_over_a_fixed_base_are_merged_on_save(tmp_path):
    model = adapted()
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "base_layer" in n}
    for name in base:
        model.get_parameter(name).requires_grad_(True)
    rules = [lrm.Rule(r"base_layer\.weight$", "row+col", train="multipliers")]
    optimizer = OptimizerFactory()(model, rules=rules, lr=1e-2, weight_decay=0.1)
    take_steps(model, optimizer)
    raw, multipliers = optimizer.raw_weights(), optimizer.multipliers()
    assert multipliers.keys() == base.keys()
    for name, before in base.items():
        assert torch.equal(raw[name], before), name
        row, col = multipliers[name]["row"], multipliers[name]["col"]
        assert (row - 1).abs().max() > 1e-2
        weight = model.get_parameter(name).detach()
        torch.testing.assert_close(weight, row[:, None] * before * col)
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    model.merge_and_unload().save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-6)


def test_multipliers_alone_leave_everything_else_fixed():
    model = adapted().merge_and_unload().requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = OptimizerFactory()(model, train="multipliers", lr=1e-2)
    take_steps(model, optimizer)
    carrying = optimizer.multipliers()
    for name, raw in optimizer.raw_weights().items():
        assert torch.equal(raw, before[name]), name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in carrying), name
