"""Commands that look at models and runs: words and JSON against the library's own numbers."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.checkpoint.manifest import problem
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, damage, rewritten, small_run

# -- symmetries -------------------------------------------------------------------------------


def test_symmetries_of_a_preset_are_reported_in_words(ask):
    code, text, complaints = ask("symmetries", "tiny", "--placement", "scalar")
    assert (code, complaints) == (0, "")
    model = build(PRESETS["tiny"])
    expected = lrm.find_symmetries(model, lrm.plan(model, "scalar"))
    head, _, rest = text.partition("\n\n")
    assert re.fullmatch(
        rf"tiny, the scalar placement: {len(expected)} symmetries, found in \d+\.\d s", head
    )
    assert rest == f"{expected.summary()}\n"


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_symmetries_of_a_hugging_face_folder_as_json(ask, kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        type_vocab_size=1,
    )
    config.save_pretrained("model")
    code, text, _ = ask("symmetries", "model", "--json")
    assert code == 0
    written = json.loads(text)
    assert (written["model"], written["placement"]) == ("model", "all")
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = lrm.find_symmetries(model, None)
    assert written["nullity"] == expected.nullity
    assert written["exchanges"] == expected.num_exchanges > 0
    assert [
        {(t["name"], t["axis"], t["block"]): t["power"] for t in symmetry["terms"]}
        for symmetry in written["symmetries"]
    ] == [symmetry.exponents for symmetry in expected]
    assert sum(s["members"] for s in written["symmetries"]) == expected.nullity


# -- simulate ---------------------------------------------------------------------------------

PLAIN_MUON = {"nesterov": False, "adjust_lr": "original"}
SIMULATIONS = [
    ("adamw", ["--betas", "0.8", "0.9"], {"betas": (0.8, 0.9)}),
    ("lion", [], {}),
    ("sgdm", ["--momentum", "0.8", "--nesterov", "on"], {"momentum": 0.8, "nesterov": True}),
    ("muon", ["--nesterov", "off", "--adjust-lr", "original"], PLAIN_MUON),
    ("muon", ["--coefficients", "polar-express"], {"coefficients": "polar-express"}),
]


@pytest.mark.parametrize(("optimizer", "words", "settings"), SIMULATIONS)
def test_simulate_prints_what_the_library_simulates_and_expects(ask, optimizer, words, settings):
    code, text, complaints = ask(
        *("simulate", "--optimizer", optimizer, *words, "--lr", "0.02", "--weight-decay", "0.5"),
        *("--steps", "400", "--shape", "16", "48", "--warmup", "0.25", "--decay", "0.25"),
        *("--start-rms", "0.3", "--seed", "3", "--rows", "4", "--json"),
    )
    assert (code, complaints) == (0, "")
    written = json.loads(text)
    # Warmup, constant rate, and a decay to an eighth: at the ends of each quarter.
    rates = {1: 0.02 / 100, 100: 0.02, 200: 0.02, 300: 0.02, 400: 0.02 / 8}
    assert {row["step"]: row["lr"] for row in written["steps"]} == pytest.approx(rates)
    lrs = [0.02 * min(1, t / 100) * 8 ** (-max(0, t - 300) / 100) for t in range(1, 401)]
    simulated = lrm.simulate_brownian(
        optimizer, lrs, 0.5, (16, 48), start_rms=0.3, seed=3, **settings
    )
    for row in written["steps"]:
        assert row["simulated"] == pytest.approx(simulated.rms[row["step"] - 1], rel=1e-4)
        # 768 numbers: 2.5% in rms, and what the walk itself errs by.
        assert row["expected"] == pytest.approx(row["simulated"], rel=0.15)
    if optimizer == "muon":
        settings = {"shape": (16, 48), "coefficients": "quintic", **settings}

    def balance(lr):
        return lrm.equilibrium_rms(lr, 0.5, optimizer=optimizer, **settings)

    assert written["equilibrium"] == pytest.approx(balance(0.02))
    assert written["steps"][-1]["equilibrium"] == pytest.approx(balance(0.02 / 8))
    assert written["relaxation_steps"] == lrm.relaxation_steps(0.02, 0.5) == 50


def test_simulate_prints_a_table_and_where_it_leads(ask):
    code, text, complaints = ask("simulate", "--lr", "1e-2", "--steps", "300", "--rows", "3")
    assert (code, complaints) == (0, "")
    head, *lines, blank, last = text.splitlines()
    assert head.split() == ["step", "lr", "simulated", "expected", "equilibrium"]
    assert [line.split()[0] for line in lines] == ["1", "100", "200", "300"]
    rms = lrm.simulate_brownian("adamw", [1e-2] * 300, 0.1).rms
    assert [line.split()[2] for line in lines] == [f"{rms[i]:.4g}" for i in (0, 99, 199, 299)]
    assert blank == ""
    assert last == (
        f"Equilibrium: rms {lrm.equilibrium_rms(1e-2, 0.1):.4g} at lr 0.01 and weight decay 0.1, "
        "approached by a factor e in rms^2 every 500 steps"
    )


@pytest.mark.parametrize("option", ["--lr", "--weight-decay"])
def test_without_decay_or_rate_there_is_no_equilibrium(ask, option):
    code, text, _ = ask("simulate", option, "0", "--steps", "5")
    assert code == 0
    assert "No equilibrium at" in text
    written = json.loads(ask("simulate", option, "0", "--steps", "5", "--json")[1])
    assert written["relaxation_steps"] is None


# -- diagnose ---------------------------------------------------------------------------------

VERDICTS = ("trapped", "free", "open")
FACTORS = replace(HYBRID, tie_embeddings=True, mup_key=1.7, mup_down=0.7)


def trained(data, **optimizer) -> tuple[Trainer, lrm.Diagnosis]:
    """Train a few steps in the folder `run`, and diagnose from what the trainer has at hand."""
    config = small_run(data, Path("run"), steps=12, model=FACTORS)
    trainer = Trainer(replace(config, optimizer=replace(config.optimizer, **optimizer)))
    start = lrm.diagnose(trainer.optimizer)
    lrs = []
    for _ in trainer.steps():
        lrs.append(trainer.optimizer.param_groups[0]["lr"])
    return trainer, lrm.diagnose(trainer.optimizer, lrs=lrs, start=start)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"placement": "full", "weight_decay": 40.0},
        {"placement": "symmetry-aware", "kind": "muon", "multiplier_lr_scale": 2.0},
        {"placement": "scalar", "multiplier_init": "fold"},
        {"placement": "none"},
    ],
    ids=["full", "Muon", "fold", "none"],
)
def test_diagnose_reads_from_a_run_what_its_trainer_would(ask, data, optimizer):
    trainer, expected = trained(data, **optimizer)
    code, text, complaints = ask("diagnose", "run")
    assert (code, complaints) == (0, "")
    assert text == f"{expected}\n\nrun, step 12: {expected.summary()}\n"
    code, text, complaints = ask("diagnose", "run/checkpoints/step-00000012", "--json")
    assert (code, complaints) == (0, "")
    written = json.loads(text)
    assert written["step"] == 12
    assert {key: written[key] for key in ("readings", "rows")} == expected.to_dict()
    counted = Counter((r.kind, r.verdict) for r in expected.readings)
    assert counted.total() == sum(counted[k, v] for k in written["verdicts"] for v in VERDICTS)
    for kind, verdicts in written["verdicts"].items():
        assert verdicts == {verdict: counted[kind, verdict] for verdict in VERDICTS}
    # The trainer follows the same walk, step by step.
    predicted = {r["name"]: r["predicted"] for r in written["readings"] if r["part"] == "weight"}
    followed = {
        r.name: r.predicted
        for r in trainer.monitor.health().readings
        if r.part == "weight" and r.predicted is not None
    }
    assert len(followed) >= 18
    assert {name: predicted[name] for name in followed} == followed


def test_the_summary_of_a_diagnosis_gives_the_share_of_the_trapped(data, ask):
    _, found = trained(data, weight_decay=40.0)
    counts = found.verdicts()["matrix"]
    total = sum(counts.values())
    assert counts["free"] > 0
    assert counts["open"] > 0
    assert found.summary().startswith(
        f"{counts['trapped']} of {total} matrices trapped ({counts['trapped'] / total:.0%}: "
        f"{counts['free']} free, {counts['open']} open), "
    )


def test_an_earlier_checkpoint_is_diagnosed_with_the_rates_up_to_it(ask, data):
    trained(data)
    written = json.loads(ask("diagnose", "run/checkpoints/step-00000010", "--json")[1])
    assert written["step"] == 10
    assert {reading["steps"] for reading in written["readings"]} == {10}


def test_skipped_steps_are_left_out_and_told(ask, data, monkeypatch):
    taken = 0
    step = lrm.AdamW.step

    def sometimes_bad(self, *rest):
        nonlocal taken
        taken += 1
        if taken in (4, 9):
            self.param_groups[0]["params"][0].grad.fill_(torch.inf)
        return step(self, *rest)

    monkeypatch.setattr(lrm.AdamW, "step", sometimes_bad)
    Trainer(small_run(data, Path("run"), steps=12)).train()
    code, text, complaints = ask("diagnose", "run", "--json")
    assert code == 0
    assert complaints.startswith(
        "lrm diagnose: 2 of 12 steps were skipped for non-finite gradients"
    )
    assert {reading["steps"] for reading in json.loads(text)["readings"]} == {10}


def test_a_damaged_checkpoint_is_passed_over_and_named(ask, data):
    trained(data)
    damage(Path("run/checkpoints/step-00000012/optimizer.safetensors"))
    code, text, complaints = ask("diagnose", "run", "--json")
    assert (code, json.loads(text)["step"]) == (0, 10)
    assert re.search("^lrm diagnose: .*step-00000012 cannot be used: optimizer.saf", complaints)


def test_the_error_for_no_run_names_what_diagnose_reads(ask):
    Path("empty").mkdir()
    for source in ("nowhere", "empty"):
        assert ask("diagnose", source) == (
            1,
            "",
            f"lrm diagnose: {source} is neither a run nor a checkpoint: give the folder that lrm "
            "train wrote (--out), one of those in its checkpoints folder, an output folder or "
            "checkpoint-1000 of the Hugging Face Trainer (optimizer.pt), or a folder of "
            "torch.distributed.checkpoint (.metadata)",
        )


def test_what_export_refuses_diagnose_refuses_in_the_same_words(ask, data):
    trained(data)
    Path("new/checkpoints").mkdir(parents=True)
    damaged = "run/checkpoints/step-00000012"
    damage(Path(damaged, "model.safetensors"))
    for source in ("new", damaged):
        code, out, complaints = ask("diagnose", source)
        assert (code, out) == (1, "")
        words = ask("export", source, "out")[2].removeprefix("lrm export: ")
        assert complaints == f"lrm diagnose: {words}"


def test_for_an_exported_model_its_run_is_asked_for(ask, data):
    trained(data)
    assert ask("export", "run", "exported")[0] == 0
    expected = (
        "lrm diagnose: exported has a model but no optimizer state, like an export: give the "
        "folder of the run, such as runs/tiny, or a checkpoint with optimizer state, such as the "
        "Hugging Face Trainer's checkpoint-1000 with optimizer.pt"
    )
    assert ask("diagnose", "exported") == (1, "", expected)
    # Large models lie in several files.
    path = Path("exported/model.safetensors")
    path.rename("exported/model-00001-of-00002.safetensors")
    Path("exported/multipliers.safetensors").unlink()
    assert ask("diagnose", "exported") == (1, "", expected)


def test_a_checkpoint_of_other_settings_is_rejected(ask, data):
    trained(data)
    path = Path("run/checkpoints/step-00000012")
    state = json.loads((path / "state.json").read_text())
    del state["config"]["schedule"]["tokens"]
    rewritten(path, "state.json", json.dumps(state).encode())
    assert problem(path) is None
    code, out, complaints = ask("diagnose", path)
    assert (code, out) == (1, "")
    assert "cannot be read by this release: state.json.config.schedule has no: tok" in complaints
    state["config"]["schedule"]["tokens"] = 12 * 128
    state["config"]["optimizer"]["placement"] = "scalar"
    rewritten(path, "state.json", json.dumps(state).encode())
    code, out, complaints = ask("diagnose", path)
    assert (code, out) == (1, "")
    assert "the checkpoint does not fit this run" in complaints
