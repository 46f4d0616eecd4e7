"""What a checkpoint claims of its model is held against its tensors before anything is built."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from runs import rewritten, small_run, trained


@pytest.fixture
def path(data, tmp_path) -> Path:
    trained(small_run(data, tmp_path / "run", steps=3))
    return tmp_path / "run" / "checkpoints" / "step-00000003"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 1 << 40}, "disagree about lm_head.weight and"),
        ({"hidden_size": 1 << 62, "vocab_size": 1 << 62}, ""),
        ({"num_layers": 1 << 40}, "tensors for 1099511627776 layers"),
        ({"num_layers": 1}, "disagree about model.layers.1"),
        ({"num_layers": 0}, ""),
        ({"tie_embeddings": True}, "disagree about lm_head.weight"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(ask, path, changes, says):
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


def test_a_state_without_what_is_needed_is_told(ask, path):
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
