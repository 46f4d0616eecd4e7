"""What a checkpoint claims of its model is held against its tensors before anything is built."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from learnable_multipliers.pretrain.config import CheckpointConfig
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import killed_after, rewritten, small_run, trained


@pytest.fixture
def path(data, tmp_path) -> Path:
    trained(small_run(data, tmp_path / "run", steps=3))
    return tmp_path / "run" / "checkpoints" / "step-00000003"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 1 << 40}, "parameters, and 1e+15 are the most"),
        ({"hidden_size": 1 << 62, "vocab_size": 1 << 62}, ""),
        ({"hidden_size": 1 << 20}, "disagree about lm_head.weight and"),
        ({"num_layers": 1 << 40}, "num_layers must be at most 1,000"),
        ({"num_layers": 999}, "tensors for 999 layers"),
        ({"num_layers": 1}, "disagree about model.layers.1"),
        ({"num_layers": 0}, ""),
        ({"tie_embeddings": True}, "disagree about lm_head.weight"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_rejected(ask, path, changes, says):
    state = json.loads((path / "state.json").read_text())
    model, config = state["model"] | changes, state["config"]["model"] | changes
    state |= {"model": model, "config": state["config"] | {"model": config}}
    rewritten(path, "state.json", json.dumps(state).encode())
    for command in (("export", path, "out"), ("diagnose", path)):
        code, _, complaints = ask(*command)
        assert code == 1
        assert complaints.startswith(f"lrm {command[0]}: the checkpoint of step 3 ")
        assert says in complaints
    assert not Path("out").exists()


def test_weights_that_are_missing_are_named(ask, path):
    weights = load_file(path / "model.safetensors")
    norm = "model.final_layernorm.weight"
    rewritten(path, "model.safetensors", save({n: t for n, t in weights.items() if n != norm}))
    code, _, complaints = ask("export", path, "out")
    assert code == 1
    assert f"its weights and its config disagree about {norm}" in complaints


def test_a_state_without_what_is_needed_is_reported(ask, path):
    state = json.loads((path / "state.json").read_text())
    for name in ("model", "eos_token"):
        left = {key: value for key, value in state.items() if key != name}
        rewritten(path, "state.json", json.dumps(left).encode())
        code, _, complaints = ask("export", path, "out")
        assert code == 1
        assert f"state.json.{name} is None" in complaints


def test_the_model_of_a_run_is_taken(ask, data):
    config = small_run(data, Path("run"), steps=3)
    trained(replace(config, model=replace(config.model, tie_embeddings=True)))
    assert ask("export", "run", "out")[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.int8])
def test_weights_of_another_type_are_rejected(ask, path, dtype):
    weights = load_file(path / "model.safetensors")
    norm = "model.final_layernorm.weight"
    rewritten(path, "model.safetensors", save(weights | {norm: weights[norm].to(dtype)}))
    for command in (("export", path, "out"), ("diagnose", path)):
        code, _, complaints = ask(*command)
        assert code == 1
        assert norm in complaints
        assert len(complaints.splitlines()) == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_a_resume_from_tensors_of_another_type_is_rejected(data, tmp_path, file):
    config = small_run(data, tmp_path / "run", steps=3)
    killed_after(replace(config, checkpoint=CheckpointConfig(every=2)), 2)
    path = config.out / "checkpoints" / "step-00000002"
    tensors = load_file(path / f"{file}.safetensors")
    name = max(tensors)
    rewritten(path, f"{file}.safetensors", save(tensors | {name: tensors[name].bfloat16()}))
    with pytest.raises(OSError, match=f"{file}.safetensors has other shapes or types for {name}"):
        Trainer(replace(config, resume=True))
