"""Matrices stored in bfloat16: the numbers of float32 parameters under autocast, bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from learnable_multipliers.pretrain.config import OptimizerConfig, RuntimeConfig
from learnable_multipliers.pretrain.export import export
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer import trainer as trainers
from learnable_multipliers.pretrain.trainer.build import check_param_dtype
from learnable_multipliers.pretrain.trainer.memory import state_bytes
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, LLAMA, assert_same, killed_after, small_run, trained

SHAPES = {"hybrid": HYBRID, "llama, tied": replace(LLAMA, tie_embeddings=True)}
BFLOAT16 = RuntimeConfig(device="cpu", dtype="bfloat16", param_dtype="bfloat16", num_threads=1)


def run(data, out, shape="hybrid", micro=0, param_dtype="bfloat16", **optimizer):
    config = small_run(data, out, model=SHAPES[shape])
    data = replace(config.data, micro_batch_sequences=micro)
    return replace(
        config,
        data=data,
        optimizer=OptimizerConfig(lr=4e-3, **optimizer),
        runtime=replace(BFLOAT16, param_dtype=param_dtype),
    )


def rounded(config, device="cpu"):
    """Return a float32 model whose matrices start where bfloat16 ones do."""
    model = build(config.model, config.seed, device)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.bfloat16().float()
    return model


def losses(trainer, monkeypatch):
    found, inner = [], trainer._train_step.gradients
    monkeypatch.setattr(
        trainer._train_step, "gradients", lambda *args: found.append(inner(*args)) or found[-1]
    )
    trainer.train()
    return torch.stack(found)


@pytest.mark.parametrize("placement", ["full", "none"])
@pytest.mark.parametrize("micro", [0, 2])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_is_that_of_float32_parameters_bit_for_bit(
    data, tmp_path, monkeypatch, shape, kind, micro, placement
):
    settings = {"shape": shape, "micro": micro, "kind": kind, "placement": placement}
    stored = Trainer(run(data, tmp_path / "stored", **settings))
    monkeypatch.setattr(trainers, "build_model", rounded)
    float32 = Trainer(run(data, tmp_path / "float32", param_dtype="float32", **settings))
    assert torch.equal(losses(stored, monkeypatch), losses(float32, monkeypatch))
    expected = float32.optimizer.raw_weights()
    for name, raw in stored.optimizer.raw_weights().items():
        assert raw.dtype == torch.float32
        assert torch.equal(raw, expected[name]), name
    narrow = {n for n, p in stored.model.named_parameters() if p.dtype == torch.bfloat16}
    assert narrow == {
        f"{name}.weight"
        for name, module in stored.model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def test_a_resumed_run_equals_an_uninterrupted_one(data, tmp_path):
    whole = trained(run(data, tmp_path / "whole", micro=2))
    config = run(data, tmp_path / "parts", micro=2)
    killed_after(config, 7)
    assert_same(trained(replace(config, resume=True)), whole)


def test_another_precision_of_the_parameters_is_rejected_on_resume(data, tmp_path):
    config = run(data, tmp_path / "run")
    killed_after(config, 7)
    other = replace(config, resume=True, runtime=replace(config.runtime, param_dtype="float32"))
    with pytest.raises(ValueError, match="runtime.param_dtype: bfloat16 -> float32"):
        Trainer(other)


def test_an_export_has_the_weights_of_the_model(data, tmp_path):
    trainer = trained(run(data, tmp_path / "run"))
    export(tmp_path / "run", tmp_path / "out")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.layers.0.mamba.in_proj.weight", "model.embed_tokens.weight"):
        expected = trainer.model.get_parameter(name).detach()
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], expected.float())


@pytest.mark.parametrize("micro", [0, 2])
@pytest.mark.parametrize("placement", ["full", "none"])
def test_lasting_bytes_are_those_of_a_run(data, tmp_path, placement, micro):
    trainer = Trainer(run(data, tmp_path / "run", micro=micro, placement=placement))
    told = state_bytes(trainer.config, trainer.model, trainer.plan)
    batches = torch.zeros(2, 2, 9, dtype=torch.long).unbind()
    trainer._train_step.gradients(batches if micro else batches[:1], 4 if micro else 2)
    parameters = list(trainer.model.parameters())
    assert told["weights"] == sum(p.nbytes for p in parameters)
    assert told["gradients"] == sum(p.grad.nbytes for p in parameters)
    trainer.optimizer.step()
    raws = [state["raw"].nbytes for state in trainer.optimizer.state.values() if "raw" in state]
    assert told["raw weights"] == sum(raws)
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"dtype": "float32"}, 1, "matrix products are in float32: set runtime.dtype to bfloat16"),
        ({}, 2, "is for one process: 2 ranks would add up their gradients in bfloat16"),
    ],
)
def test_what_cannot_be_is_said(data, tmp_path, changes, ranks, message):
    config = run(data, tmp_path / "run")
    config = replace(config, runtime=replace(config.runtime, **changes))
    device = trainers.choose_device(config.runtime)
    with pytest.raises(ValueError, match=message):
        check_param_dtype(config, device, ranks)
