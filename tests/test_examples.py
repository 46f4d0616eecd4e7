"""The scripts and the notebook of examples/ run as a user runs them, and show what they say."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from processes import start

EXAMPLES = Path(__file__).parent.parent / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SMALL = ("--steps", "60", "--every", "10", "--width", "64", "--length", "32")
"""Of own_loop.py: some two seconds, six checkpoints."""


def run(folder, *command):
    """Run a command in a folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(pattern, text):
    """Return the numbers that a pattern with one group finds, in order."""
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in\n{text}"
    return found


def unigram_entropy(text):
    """Return the loss of the best guess that does not look at the bytes before, in nats."""
    counts = torch.bincount(torch.frombuffer(bytearray(text), dtype=torch.uint8).long())
    share = counts[counts > 0] / len(text)
    return -(share * share.log()).sum().item()


@pytest.fixture(scope="module")
def library():
    """Return the text that the scripts learn by default."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run the loop to its end; return its folder and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, EXAMPLES / "own_loop.py", *SMALL)


def losses_of(printed):
    return dict(re.findall(r"^step (\d+): validation loss (.*)$", printed, re.M))


def test_own_loop_learns_from_context(whole, library):
    losses = losses_of(whole[1])
    assert list(losses) == ["10", "20", "30", "40", "50", "60"]
    assert float(losses["10"]) < math.log(256)
    assert float(losses["60"]) < unigram_entropy(library[len(library) * 9 // 10 :])


def test_own_loop_shows_multipliers_and_diagnosis(whole):
    printed = whole[1]
    assert "14 of 15 matrices carry multipliers" in printed
    assert "unknown" not in printed
    learned = re.findall(r"^(\S+) +row (\S+) to (\S+) +col (\S+) to (\S+)", printed, re.M)
    assert len(learned) == 14
    for name, *ends in learned:
        row_low, row_high, col_low, col_high = map(float, ends)
        assert row_low < 1 < row_high, name
        assert col_low < 1 < col_high, name
    # 60 steps are far from the 4 that forget a start, so the start counts in the prediction.
    line = re.search(r"^layers\.\*\.up_proj\.weight +2 (.*)$", printed, re.M)[1].split()
    measured, predicted, log_ratio, age = map(float, line[:4])
    assert log_ratio == pytest.approx(math.log(measured / predicted), abs=0.05)
    assert abs(log_ratio) < 0.1
    assert 0.1 < age < 4


def test_own_loop_killed_and_resumed_ends_as_uninterrupted(whole, tmp_path):
    command = [sys.executable, "-u", str(EXAMPLES / "own_loop.py"), *SMALL]
    process = start(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 10:"):
            break
    process.kill()
    process.wait()
    process.stdout.close()
    first = torch.load(tmp_path / "own_loop.pt", weights_only=True)["step"]
    assert 10 <= first < 60
    losses = losses_of(run(tmp_path, EXAMPLES / "own_loop.py", *SMALL, "--resume"))
    expected = losses_of(whole[1])
    assert losses == {step: expected[step] for step in expected if int(step) > first}
    ours, theirs = (
        torch.load(folder / "own_loop.pt", weights_only=True) for folder in (tmp_path, whole[0])
    )
    for name, weight in theirs["model"].items():
        assert torch.equal(ours["model"][name], weight), name
    for number, state in theirs["optimizer"]["state"].items():
        for part, value in state.items():
            other = ours["optimizer"]["state"][number][part]
            assert torch.equal(torch.as_tensor(other), torch.as_tensor(value)), (number, part)


@pytest.mark.slow
def test_own_loop_compiled_learns_the_same(whole, tmp_path):
    printed = run(tmp_path, EXAMPLES / "own_loop.py", *SMALL, "--compile")
    ours, theirs = losses_of(printed), losses_of(whole[1])
    assert ours.keys() == theirs.keys()
    for step, loss in theirs.items():
        assert float(ours[step]) == pytest.approx(float(loss), abs=2e-3)
    saved = [torch.load(f / "own_loop.pt", weights_only=True) for f in (tmp_path, whole[0])]
    # The compiled run saves the names of the plain model: each resumes the other.
    assert saved[0]["model"].keys() == saved[1]["model"].keys()


@pytest.mark.slow
def test_trainer_model_reloads_with_the_same_loss(tmp_path, library):
    pytest.importorskip("accelerate")
    text = tmp_path / "text.txt"
    text.write_bytes(library[:400_000])
    arguments = ("--text", text, "--out", "llama", "--steps", 60, "--width", 64, "--length", 32)
    printed = run(tmp_path, EXAMPLES / "hugging_face_trainer.py", *arguments)
    trained, reloaded = numbers(r"validation loss, \w+: +([\d.]+)", printed)
    assert trained == reloaded
    # The validation text is what comes after nine tenths of the sequences, 200 of 32 bytes.
    begin = 400_000 // 32 * 9 // 10 * 32
    assert reloaded < unigram_entropy(library[begin : begin + 200 * 32])
    low, high = re.search(r"step 60: .*multipliers ([\d.]+) to ([\d.]+)", printed).groups()
    assert float(low) < 0.97
    assert float(high) > 1.03
    # Nothing but an ordinary Llama is in the folder.
    from safetensors import safe_open

    with safe_open(tmp_path / "llama" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not any("row" in name or "col" in name or "raw" in name for name in names)
    assert "model.layers.1.mlp.down_proj.weight" in names


@pytest.mark.slow
def test_plain_run_is_diagnosed_live_and_from_disk(tmp_path):
    pytest.importorskip("transformers")
    printed = run(tmp_path, EXAMPLES / "diagnose_existing_run.py")
    closed_form = numbers(r"lead to an rms of ([\d.]+)", printed)[0]
    assert closed_form == pytest.approx(math.sqrt(4e-3 / (2 * 1.0)), rel=0.03)
    table = {
        line.split()[0]: line for line in printed.splitlines() if line.startswith(("model.", "lm_"))
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        line = table[f"model.layers.*.mlp.{name}.weight"]
        _, _, measured, predicted, *_, verdict = line.split()
        assert verdict == "trapped", line
        assert float(measured) == pytest.approx(closed_form, rel=0.2)
        assert float(predicted) == pytest.approx(closed_form, rel=0.01)
    # The loss moves these away from it.
    assert table["lm_head.weight"].endswith("free")
    assert float(table["lm_head.weight"].split()[2]) > 3 * closed_form
    # Nothing is settled before 2 wd sum(lr) = 4, which is step 500.
    shares = dict(re.findall(r"^step (\d+): .* (\d+)% of the matrices trapped", printed, re.M))
    assert [shares[step] for step in ("100", "200", "300", "400")] == ["0"] * 4
    assert int(shares["700"]) >= 100 * 6 // 16
    live = re.search(r"^\d+ of \d+ matrices trapped .*$", printed, re.M)[0]
    assert f"from diagnose_existing_run, step 700: {live}" in printed


@pytest.mark.slow
def test_torchtitan_trains_the_wrapped_configs(tmp_path, library):
    """Its own command line, data loader and tokenizer; `titan.py` makes them run on a CPU."""
    pytest.importorskip("torchtitan")
    pytest.importorskip("tensorboard")
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: i for i, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "library.txt").write_bytes(library[:50_000])
    (tmp_path / "assets").mkdir()
    tokenizer.save(str(tmp_path / "assets" / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "assets" / "tokenizer_config.json").write_text(json.dumps(names))
    script = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"],
        [Path(__file__).parent / "titan.py", "--module", "torchtitan_configs"],
        ["--config", "llama3_debugmodel", "--hf_assets_path", "assets", "--dump_folder", "out"],
        ["--dataloader.dataset_path", "text", "--metrics.enable_tensorboard"],
        ["--training.steps", "30", "--training.seq_len", "64", "--training.local_batch_size", "4"],
    )
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "PYTHONPATH", path)
        patch.setitem(ENVIRONMENT, "HF_HOME", str(tmp_path / "cache"))
        run(tmp_path, *(word for part in script for word in part))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = tmp_path.glob("out/tb/*/events*")
    found = EventAccumulator(str(events)).Reload()
    logged = {tag: [e.value for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    losses = logged["loss_metrics/global_avg_loss"]
    assert losses[0] > math.log(2048)
    assert max(losses[-3:]) < math.log(258) - 1
    # Multipliers are 1 in the first step, so that raw and effective norms are the same there, to
    # the 2e-4 of torch's float32 norm on a CPU.
    raw, effective = logged["raw_grad_norm"], logged["grad_norm"]
    assert raw[0] == pytest.approx(effective[0], rel=5e-4)
    assert raw[-1] != pytest.approx(effective[-1], rel=2e-3)
    assert logged["multipliers/smallest"][-1] < 1 < logged["multipliers/largest"][-1]


def test_torchtitan_configs_carry_the_settings_they_name():
    pytest.importorskip("torchtitan")
    code = (
        "import json, torchtitan_configs as ours\n"
        "made = {name: getattr(ours, name)() for name in ('llama3_8b', 'llama3_8b_muon')}\n"
        "print(json.dumps({name: [c.optimizer.name, c.optimizer.settings, c.training.max_norm]"
        " for name, c in made.items()}))"
    )
    printed = run(EXAMPLES, "-c", code)
    found = json.loads(printed.splitlines()[-1])
    name, settings, max_norm = found["llama3_8b"]
    assert (name, settings["lr"], settings["max_grad_norm"]) == ("AdamW", 3e-4, 1.0)
    assert math.isinf(max_norm)
    name, settings, _ = found["llama3_8b_muon"]
    assert (name, settings["lr"], settings["weight_decay"]) == ("Muon", 2e-3, 0.1)


NOTEBOOK = EXAMPLES / "equilibrium.ipynb"


def printed_by(notebook):
    """Return what the cells of a notebook printed."""
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", ())]
    return "".join("".join(out["text"]) for out in outputs if out.get("name") == "stdout")


def shown_numbers(printed):
    """Return what section 1 and 2 measured, and the counts, by name."""
    patterns = {
        "lowest ratio": r"closed form: ([\d.]+) to",
        "highest ratio": r"closed form: [\d.]+ to ([\d.]+)",
        "runs": r"to [\d.]+ in (\d+) runs",
        "plain loss": r"steps: ([\d.]+) without",
        "loss": r"without multipliers, ([\d.]+) with\n",
        "plain": r"\|: ([\d.]+) without",
        "raw": r"with them ([\d.]+) for raw",
        "effective": r"([\d.]+) for effective",
        "plain trapped": r"trapped: (\d+) of 14",
        "raw trapped": r"\n(\d+) of 14 raw",
        "smallest": r"multipliers, from (-?[\d.]+) to",
        "largest": r"multipliers, from -?[\d.]+ to ([\d.]+)",
        "directions": r"layers: (\d+) exchange",
        "products": r"(\d+) multiplicative,",
        "norms": r"(\d+) normalization\n",
        "least drift": r"\nrms ([\d.e-]+), .*up_proj against columns of .*down_proj",
        "most drift": r"\nrms ([\d.e-]+), .*up_proj against .*layernorm",
    }
    return {name: numbers(pattern, printed)[0] for name, pattern in patterns.items()}


@pytest.mark.slow
def test_notebook_shows_what_its_text_claims(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    fresh = tmp_path / NOTEBOOK.name
    shutil.copy(NOTEBOOK, fresh)
    run(tmp_path, "-m", "jupyter", "execute", "--inplace", fresh.name)
    stored, fresh = (json.loads(path.read_text()) for path in (NOTEBOOK, fresh))
    found = shown_numbers(printed_by(fresh))
    text = " ".join("".join(c["source"]) for c in stored["cells"] if c["cell_type"] == "markdown")
    text = " ".join(text.split())
    # The text of section 1.
    within = numbers(r"within (\d+)% of the closed form", text)[0] / 100
    assert "All nine runs" in text
    assert found["runs"] == 9
    assert 1 - within < found["lowest ratio"] <= found["highest ratio"] < 1 + within
    # Of section 2.
    claimed = {
        "plain": r"get[^:]* only part of the way: the median departure is about ([\d.]+\d)",
        "raw": r"with a median departure of about ([\d.]+\d)",
        "effective": r"are free: the median departure is about ([\d.]+\d)",
    }
    for name, pattern in claimed.items():
        assert found[name] == pytest.approx(numbers(pattern, text)[0], abs=0.07), name
    assert found["plain trapped"] <= 9
    assert found["raw trapped"] >= 12
    # Of section 3: a factor of two and more.
    assert found["largest"] > 2
    assert found["smallest"] < 0.5
    # Of section 4.
    counted = found["directions"] + found["products"] + found["norms"]
    assert numbers(r"along these (\d+) directions", text) == [counted]
    assert found["least drift"] < 1e-5
    assert found["most drift"] > 0.1
    # What is committed came from the same cells.
    for name, value in shown_numbers(printed_by(stored)).items():
        if name not in ("least drift", "most drift"):
            assert value == pytest.approx(found[name], rel=0.15, abs=0.1), name


def test_notebook_is_committed_whole_and_small():
    stored = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [out for cell in cells for out in cell["outputs"]]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 3
    assert not [out for out in outputs if out.get("name") == "stderr"]
    assert NOTEBOOK.stat().st_size < 1_000_000


def test_every_example_is_in_the_table():
    table = (EXAMPLES / "README.md").read_text()
    linked = set(re.findall(r"^\| \[(\S+)\]\(\1\)", table, re.M))
    assert linked == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
