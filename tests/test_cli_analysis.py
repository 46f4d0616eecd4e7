"""Commands that look at models and runs: words and JSON against the library's own numbers."""

import json
import re

import pytest

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.models.hybrid import build
from learnable_multipliers.pretrain.models.presets import PRESETS

# -- symmetries -------------------------------------------------------------------------------


def test_symmetries_of_a_preset_are_told_in_words(ask):
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
    balance = {
        "adamw": lambda lr: lrm.equilibrium_rms(lr, 0.5, 0.8),
        "lion": lambda lr: lrm.equilibrium_rms_lion(lr, 0.5),
        "sgdm": lambda lr: lrm.equilibrium_rms_sgdm(lr, 0.5, **settings),
        "muon": lambda lr: lrm.equilibrium_rms_muon(
            lr, 0.5, shape=(16, 48), **{"coefficients": "quintic", **settings}
        ),
    }[optimizer]
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
