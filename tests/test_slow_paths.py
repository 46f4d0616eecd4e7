"""Slow paths are told, each once and with its cause: exactly those that the model takes."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from learnable_multipliers.pretrain.config import RuntimeConfig
from learnable_multipliers.pretrain.model import attention, mamba, ssd
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.preflight import doctor, dry_run
from learnable_multipliers.pretrain.preflight.checks import CheckError
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer import device as devices
from learnable_multipliers.pretrain.trainer import trainer as train
from learnable_multipliers.pretrain.trainer.device import Device, choose_device
from runs import HYBRID, small_run

pytest.importorskip("triton")
GPU = Device(torch.device("cuda"), torch.bfloat16, True, True, "a GPU", None)
CPU = choose_device(RuntimeConfig(device="cpu"))
SIZED = replace(HYBRID, vocab_size=64)
# By the setting that the kernels do not serve.
MODELS = {
    "": SIZED,
    "ssm_state_size": replace(SIZED, ssm_state_size=512),
    "ssm_head_dim": replace(SIZED, ssm_head_dim=8),
    "ssm_conv_size": replace(SIZED, ssm_conv_size=3),
    "head_dim": replace(SIZED, head_dim=48),
    "head_dim ssm_state_size": replace(SIZED, head_dim=8, ssm_state_size=24),
}


def told(config, device=GPU):
    return [path.message for path in devices.performance_warnings(config, device)]


@pytest.mark.parametrize("causes", MODELS)
def test_reported_sizes_are_those_the_model_meets(causes, monkeypatch, data, tmp_path):
    """The doors to the kernels say what is in the way, as tensors come to them in a pass."""
    met = set()
    for door in (ssd, mamba, attention):

        def taken(backend, device, unsupported, door=door):
            if unsupported is not None:
                met.add(unsupported)
            return False

        monkeypatch.setattr(door, "use_triton", taken)
    with FakeTensorMode():
        HybridLM(MODELS[causes]).loss(torch.zeros(2, 33, dtype=torch.long))
    found = told(small_run(data, tmp_path / "run", model=MODELS[causes]))
    assert len(found) == len(met) == len(causes.split())
    for cause in causes.split():
        assert any(f"model.{cause} is {getattr(MODELS[causes], cause)}," in text for text in found)


@pytest.mark.parametrize("chunk", [1, 24, 256])
def test_no_chunk_is_in_the_way(chunk, data, tmp_path):
    model = replace(SIZED, ssm_chunk_size=chunk)
    assert told(small_run(data, tmp_path / "run", model=model)) == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_fast_paths_alone(name):
    assert told(RECIPES[name][1]) == []


def test_elsewhere_there_is_nothing_to_miss(data, tmp_path):
    config = small_run(data, tmp_path / "run", model=MODELS["ssm_state_size"])
    assert told(config, CPU) == []


def test_without_triton_one_line_says_so(monkeypatch):
    monkeypatch.setattr(devices, "HAS_TRITON", False)
    (text,) = told(RECIPES["falcon-h1-0.5b"][1])
    assert "pip install triton" in text


@pytest.mark.parametrize(
    ("micro", "uneven"),
    [(0, ""), (1, ""), (2, ""), (3, "4"), (4, ""), (64, "")],
)
def test_batches_that_are_not_recorded_are_named(micro, uneven, data, tmp_path):
    config = small_run(data, tmp_path / "run")
    config = replace(config, data=replace(config.data, micro_batch_sequences=micro))
    found = told(config)
    assert len(found) == bool(uneven)
    assert all(f"={micro} does not divide batches of {uneven} sequences" in t for t in found)
    assert told(config, replace(GPU, captured=False)) == []


def test_batches_of_a_ramp_are_named():
    config = RECIPES["falcon-h1-0.5b"][1]
    config = replace(config, data=replace(config.data, micro_batch_sequences=128))
    (text,) = told(config)
    # 64 is a batch of one pass; 128, 256, 384 and 512 divide.
    assert "batches of 192, 320, 448 sequences" in text


def test_a_wish_that_ranks_cannot_be_granted_is_reported(data, tmp_path):
    config = small_run(data, tmp_path / "run")
    config = replace(config, runtime=replace(config.runtime, cuda_graph="on"))
    (text,) = told(config, replace(GPU, captured=False))
    assert text.startswith("runtime.cuda_graph=on has no effect")


def test_a_run_a_dry_run_and_a_check_up_tell_it(data, tmp_path, monkeypatch):
    path = devices.PerformanceWarning("it is slow", "make it fast")
    config = small_run(data, tmp_path / "run", steps=6)
    for module in (train, dry_run, doctor):
        monkeypatch.setattr(module, "performance_warnings", lambda config, device: [path])
    records = []
    train.Trainer(config, records.append).train()
    warned = [record["text"] for record in records if record["kind"] == "warning"]
    assert warned == ["it is slow; make it fast"]
    # A run that has come to its end computes nothing.
    train.Trainer(replace(config, resume=True), records.append).train()
    assert [r for r in records if r["kind"] == "warning"][1:] == []
    assert "Slower than it could be:\n  it is slow; make it fast\n\n" in dry_run.describe(config)
    cpu = devices.choose_device(config.runtime)
    assert doctor.check_fast_paths(config, cpu) == "only CUDA devices have kernels and CUDA graphs"
    with pytest.raises(CheckError, match=path.text) as found:
        doctor.check_fast_paths(config, GPU)
    assert (found.value.verdict, found.value.advice) == ("warning", path.advice)
