"""Checkpoints of other trainers on disk: the same table as from the optimizer that wrote them."""

import io
import json
import pickle
import re
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

import learnable_multipliers as lrm
from learnable_multipliers.integrations.dcp_checkpoint import read_dcp_checkpoint
from learnable_multipliers.integrations.trainer_checkpoint import step_rates

STEPS, LR, DECAY = 300, 0.02, 1.0
"""2 wd sum(lr) is 6 with a linear decay."""
PLANTED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A Llama in the Hugging Face Trainer, on gradients that noise dominates, one not."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        signal = 0.3 if name == PLANTED else 0.0
        parameter.register_hook(lambda g, signal=signal: g + signal + 0.2 * torch.randn_like(g))
    folder = tmp_path_factory.mktemp("run")
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=LR,
        weight_decay=DECAY,
        adam_beta2=0.95,
        warmup_steps=10,
        logging_steps=1,
        save_steps=STEPS,
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    ids = torch.randint(0, 48, (2 * STEPS, 8))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    with redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer, folder


def live(trainer):
    logs = trainer.state.log_history
    lrs = [entry["learning_rate"] for entry in logs if "learning_rate" in entry]
    return lrm.diagnose(trainer.optimizer, trainer.model, lrs=lrs)


def test_noise_traps_a_llama_and_a_planted_signal_is_free(trained):
    diagnosis = live(trained[0])
    hidden = [r for r in diagnosis.readings if ".layers." in r.name and r.kind == "matrix"]
    assert len(hidden) == 14
    verdicts = {reading.name: reading.verdict for reading in hidden}
    assert verdicts.pop(PLANTED) == "free"
    assert set(verdicts.values()) == {"trapped"}
    assert (diagnosis[PLANTED].indicator or 0) > 4


def test_a_trainer_checkpoint_gives_the_table_of_the_live_optimizer(trained, ask):
    trainer, folder = trained
    expected = live(trainer)
    for source in (folder, folder / f"checkpoint-{STEPS}"):
        code, text, complaints = ask("diagnose", str(source))
        assert (code, complaints) == (0, "")
        assert text.startswith(f"{expected}\n\nLlamaForCausalLM in checkpoint-{STEPS}, step ")
        assert text.rstrip().endswith(expected.summary())
    code, text, _ = ask("diagnose", str(folder), "--json")
    written, plain = json.loads(text), json.loads(json.dumps(expected.to_dict()))
    assert written["step"] == STEPS
    for key in ("readings", "rows"):
        assert written[key] == plain[key]


def test_the_page_stands_alone_and_has_every_line(trained, ask, tmp_path):
    page = tmp_path / "page.html"
    code, _, _ = ask("diagnose", str(trained[1]), "--out", str(page))
    text = page.read_text()
    assert code == 0
    assert text.count("<svg") == 2
    assert not re.search(r"<script|<link|<img|src=|@import", text)
    assert "default-src 'none'" in text
    for cells in live(trained[0]).table()[1:]:
        assert all(cell in text for cell in cells)


def test_missing_parts_are_reported(trained, ask, tmp_path):
    folder = trained[1] / f"checkpoint-{STEPS}"

    def without(*names):
        copy = tmp_path / "-".join(names)
        copy.mkdir()
        for file in folder.iterdir():
            if file.name not in names:
                (copy / file.name).symlink_to(file)
        return ask("diagnose", str(copy))[2]

    assert "has no optimizer.pt: Trainer writes it unless save_only_model" in without(
        "optimizer.pt"
    )
    assert "has no config.json" in without("config.json")
    assert "needed are safetensors" in without("model.safetensors")
    bare = without("optimizer.pt", "trainer_state.json")
    assert "has a model but no optimizer state" in bare
    assert "--model is for folders" in ask("diagnose", str(folder), "--model", "tiny")[2]


def test_a_checkpoint_with_code_in_it_raises(trained, ask, tmp_path):
    folder = trained[1] / f"checkpoint-{STEPS}"
    for file in folder.iterdir():
        if file.name != "optimizer.pt":
            (tmp_path / file.name).symlink_to(file)
    torch.save({"state": _Code(), "param_groups": []}, tmp_path / "optimizer.pt")
    code, _, complaints = ask("diagnose", str(tmp_path))
    assert code == 1
    assert "code in it is never run" in complaints


def test_rates_between_logs_lie_on_lines():
    logged = {10: 1.0, 20: 0.5}
    rates = step_rates(logged, 22, 2.0, 0.4)
    assert len(rates) == 22
    assert rates[9] == 1.0
    assert rates[14] == pytest.approx(0.75)
    assert rates[4] == pytest.approx(1.5)
    # A warmup comes from zero.
    assert step_rates({5: 0.5, 10: 1.0}, 10, 1.0, 1.0)[:5] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5]
    )
    assert step_rates({1: 3.0, 2: 2.0, 3: 1.0}, 3, 3.0, 0.0) == [3.0, 2.0, 1.0]


# -- torch.distributed.checkpoint -----------------------------------------------------------------


class _Code:
    def __reduce__(self):
        return print, ("run",)


def saved_by_dcp(folder, flat, frozen=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95))
    for _ in range(100):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    save(state, checkpoint_id=folder, no_dist=True)
    return optimizer, model


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flat", [False, True])
def test_a_dcp_folder_gives_the_readings_of_the_live_optimizer(tmp_path, flat, ask):
    optimizer, model = saved_by_dcp(tmp_path, flat)
    expected = lrm.diagnose(optimizer, model)
    saved = read_dcp_checkpoint(tmp_path, nn.Sequential(*(m for m in model)).to("meta"))
    diagnosis = lrm.diagnose(saved.optimizer, saved.model)
    assert saved.step == 100
    # The order of a flattened state is its own.
    for reading in expected.readings:
        assert diagnosis[reading.name] == reading
    code, text, complaints = ask("diagnose", str(tmp_path), "--json")
    assert code == 0
    assert "without --model the role of each matrix is unknown" in complaints
    bare = {reading["name"]: reading for reading in json.loads(text)["readings"]}
    for reading in expected.readings:
        for key in ("measured", "predicted", "indicator", "verdict", "settling"):
            assert bare[reading.name][key] == getattr(reading, key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_folders_that_cannot_be_read_raise_with_the_reason(tmp_path, ask):
    model = nn.Linear(4, 4)
    save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "bare", no_dist=True)
    assert "has no optimizer state by parameter names" in ask("diagnose", str(tmp_path / "bare"))[2]
    saved_by_dcp(tmp_path / "other", False)
    assert "is not of this model" in ask("diagnose", str(tmp_path / "other"), "--model", "tiny")[2]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps(_Code()))
    code, out, complaints = ask("diagnose", str(tmp_path / "bad"))
    assert (code, out) == (1, "")
    assert "builtins.print has no place there" in complaints
