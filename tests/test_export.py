"""An exported folder is the trained model: same logits, same tokens, nothing to merge."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import learnable_multipliers as lrm
from learnable_multipliers.pretrain import export as exporting
from learnable_multipliers.pretrain.checkpoint.store import CheckpointError
from learnable_multipliers.pretrain.export import export
from learnable_multipliers.pretrain.trainer.load import load_checkpoint, multipliers_of
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, LENGTH, LLAMA, small_run

transformers = pytest.importorskip("transformers")

# Far from 1, so that one in the wrong place shows.
SHARED = {
    "mup_attention_in": 0.8,
    "mup_key": 1.7,
    "mup_attention_out": 0.6,
    "mup_gate": 1.3,
    "mup_down": 0.7,
}
ENDS = {"mup_embedding": 2.5, "mup_head": 0.4}
INSIDE = {
    "mup_ssm_in": 1.25,
    "mup_z": 0.8,
    "mup_x": 0.5,
    "mup_B": 1.4,
    "mup_C": 0.7,
    "mup_dt": 0.9,
    "mup_ssm_out": 1.6,
}
MODELS = {
    "hybrid": HYBRID,
    "hybrid tied": replace(HYBRID, tie_embeddings=True),
    "hybrid mup": replace(HYBRID, ssm_norm=True, **SHARED, **ENDS, **INSIDE),
    "hybrid mup tied": replace(HYBRID, tie_embeddings=True, **SHARED, **ENDS, **INSIDE),
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tie_embeddings=True),
    "llama mup": replace(LLAMA, **SHARED, **ENDS),
    "llama mup tied": replace(LLAMA, tie_embeddings=True, **SHARED),
}
# Of logits up to 0.7. Measured: 2e-7, and 3.5e-3 with weights and arithmetic in bfloat16.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Return a function from the name of a model to a trainer that has trained it."""
    known: dict[str, Trainer] = {}

    def train(name: str, **changes: object) -> Trainer:
        if name not in known:
            out = tmp_path_factory.mktemp("runs") / "run"
            config = small_run(data, out, steps=3, model=MODELS[name.partition("/")[0]])
            optimizer = replace(config.optimizer, **changes)
            known[name] = Trainer(replace(config, optimizer=optimizer))
            known[name].train()
        return known[name]

    return train


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(tokens).logits.float()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MODELS)
def test_the_exported_model_has_the_logits_of_the_trained_one(trained, tmp_path, name, dtype):
    trainer = trained(name)
    done = export(trainer.config.out, tmp_path / "out", dtype)
    assert done.step == 3
    assert done.num_parameters == trainer.model.num_parameters
    assert done.notes == ()
    assert done.architecture.startswith("FalconH1" if "hybrid" in name else "Llama")
    tokens = trainer.data.batch(0, 2, torch.device("cpu"))[:, :LENGTH]
    with torch.no_grad():
        expected = trainer.model.eval()(tokens)
    difference = (logits_of(tmp_path / "out", tokens) - expected).abs().max().item()
    assert difference < TOLERANCE[dtype]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {getattr(torch, dtype)}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_factors_that_multipliers_took_over_are_one_in_the_export(trained, tmp_path):
    trainer = trained("hybrid mup/fold", multiplier_init="fold")
    export(trainer.config.out, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["key_multiplier"] == 1.0
    assert written["ssm_multipliers"] == [1.0] * 5
    tokens = trainer.data.batch(0, 2, torch.device("cpu"))[:, :LENGTH]
    with torch.no_grad():
        expected = trainer.model.eval()(tokens)
    torch.testing.assert_close(logits_of(tmp_path / "out", tokens), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("placement", ["full", "symmetry-aware", "scalar"])
def test_multipliers_lie_beside_the_weights(trained, tmp_path, placement, scale):
    changes = {"placement": placement, "multiplier_scale": scale}
    trainer = trained(f"hybrid/{placement} {scale}", **changes)
    export(trainer.config.out, tmp_path / "out")
    written = load_file(tmp_path / "out" / "multipliers.safetensors")
    expected = {
        f"{name}/{kind}": value
        for name, values in lrm.multipliers(trainer.optimizer).items()
        for kind, value in values.items()
    }
    assert written.keys() == expected.keys()
    assert any((value != 1).any() for value in expected.values())
    for name, value in written.items():
        assert torch.equal(value, expected[name]), name


def test_a_setting_missing_from_a_checkpoint_is_named(trained):
    trainer = trained("hybrid/full log", placement="full", multiplier_scale="log")
    checkpoint, _ = load_checkpoint(trainer.config.out)
    del checkpoint.state["config"]["optimizer"]["split"]
    with pytest.raises(CheckpointError, match=r"state\.json\.config\.optimizer has no: split"):
        multipliers_of(checkpoint)


def test_a_model_without_multipliers_has_no_file_of_them(trained, tmp_path):
    export(trained("llama/none", placement="none").config.out, tmp_path / "out")
    assert not (tmp_path / "out" / "multipliers.safetensors").exists()


def test_the_tokenizer_goes_along(trained, tmp_path):
    trainer = trained("llama")
    export(trainer.config.out, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "12 times 7 is 84, or nearly so.\n \u00e9\u4e2d  two  spaces"
    tokens = trainer.data.encode(text)
    assert tokenizer.encode(text) == tokens
    assert tokenizer.decode(tokens) == text == trainer.data.decode(tokens)
    assert tokenizer.eos_token == trainer.data.manifest.eos_token
    assert tokenizer.eos_token_id == trainer.data.eos
    for name in ("config", "generation_config"):
        written = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert written["eos_token_id"] == trainer.data.eos


def test_one_checkpoint_can_be_exported_by_itself(trained, tmp_path, monkeypatch):
    trainer = trained("llama")
    checkpoint = trainer.config.out / "checkpoints" / "step-00000003"
    export(trainer.config.out, tmp_path / "run")
    # From inside the folder: its parents are not in its name.
    monkeypatch.chdir(checkpoint)
    export(Path("."), tmp_path / "checkpoint")
    for path in (tmp_path / "run").iterdir():
        assert (tmp_path / "checkpoint" / path.name).read_bytes() == path.read_bytes()


# -- bad input --------------------------------------------------------------------------------


def test_a_folder_that_exists_is_rejected(trained, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists; choose another folder"):
        export(trained("llama").config.out, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_no_run_is_rejected(tmp_path):
    for source in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="is neither a run nor a checkpoint: give the folder"):
            export(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_checkpoints_says_so(data, tmp_path):
    Trainer(small_run(data, tmp_path / "run")).close()
    with pytest.raises(ValueError, match="holds no checkpoint yet: a run saves one when it ends"):
        export(tmp_path / "run", tmp_path / "out")


def test_a_damaged_checkpoint_is_passed_over_and_named(data, tmp_path):
    config = small_run(data, tmp_path / "run", steps=6, model=LLAMA)
    Trainer(config).train()
    kept = tmp_path / "run" / "checkpoints"
    weights = kept / "step-00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.step == 5
    assert len(done.notes) == 1
    assert re.search(r"step-00000006\b.* model.safetensors has", done.notes[0])
    with pytest.raises(CheckpointError, match="cannot be used: model.safetensors has"):
        export(kept / "step-00000006", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_without_its_run_has_no_tokenizer_and_says_so(trained, tmp_path):
    alone = tmp_path / "alone"
    shutil.copytree(trained("llama").config.out / "checkpoints" / "step-00000003", alone)
    done = export(alone, tmp_path / "out")
    assert len(done.notes) == 1
    assert "no tokenizer.json was found" in done.notes[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] is None
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (replace(HYBRID, num_heads=0), "Hugging Face has no model of this shape: it takes"),
        (replace(LLAMA, tie_embeddings=True, **ENDS), "cannot go into a tied embedding"),
    ],
    ids=["state space alone", "factor on a tied embedding"],
)
def test_what_no_published_class_can_hold_is_rejected(data, tmp_path, model, why):
    Trainer(small_run(data, tmp_path / "run", steps=3, model=model)).train()
    with pytest.raises(ValueError, match=why):
        export(tmp_path / "run", tmp_path / "deep" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_export_leaves_nothing(trained, tmp_path, monkeypatch, error):
    run = trained("llama").config.out
    saved = []

    def fail(tensors, path, *rest):
        assert Path(path).parent.is_dir()
        saved.append(path)
        if len(saved) == 2:
            raise error("no more")

    monkeypatch.setattr(exporting, "save", fail)
    with pytest.raises(error, match="no more"):
        export(run, tmp_path / "new" / "deep" / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").touch()
    saved.clear()
    with pytest.raises(error, match="no more"):
        export(run, tmp_path / "new" / "deep" / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "file"]


def test_others_may_read_what_they_may_read_of_any_new_file(trained, tmp_path):
    run = trained("llama").config.out
    plain = tmp_path / "plain"
    plain.touch()
    export(run, tmp_path / "out")
    files = [*(tmp_path / "out").iterdir(), *(run / "checkpoints").glob("*/*.safetensors")]
    assert {path.stat().st_mode for path in files} == {plain.stat().st_mode}


def test_an_export_that_cannot_be_made_is_reported_before_any_work(trained, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        export(trained("llama").config.out, tmp_path / "file" / "out")


def test_what_a_killed_export_left_is_cleared_by_the_next(trained, tmp_path):
    (tmp_path / ".out.0123abcd.partial").mkdir()
    export(trained("llama").config.out, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
