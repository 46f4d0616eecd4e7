"""The code of README and documents runs, top to bottom; the files they name exist."""

import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from evaluation_files import write_files
from learnable_multipliers.cli import COMMANDS, main
from learnable_multipliers.experiments.record import read_records

ROOT = Path(__file__).parent.parent


DOCUMENTS = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
# Its Python needs what its commands make: run together below.
START = ROOT / "docs" / "start.md"


# Lightning uses what torch is about to remove.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path != START],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_code_in_documents_runs(document, tmp_path, monkeypatch):
    text = document.read_text()
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(block, document.name, "exec"), namespace)
    if document == ROOT / "README.md":
        assert (tmp_path / "out" / "model.safetensors").is_file()
    if document.name == "placement.md":
        shown = re.search(r"^```\n(parameter.*?)^```", text, re.M | re.S)[1]
        table = str(namespace["lrm"].plan(namespace["model"], "symmetry-aware"))
        assert all(line in table for line in shown.splitlines())


# A few steps do in a test; the demo has a test of its own.
SHORT = "--schedule.tokens 6144 --schedule.warmup-tokens 2048 --schedule.decay-tokens 2048"


def test_readme_commands_run(tmp_path, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"^```sh\n(lrm .*?)^```", readme, re.M | re.S)[1]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert {command[1] for command in commands} == {name.split()[0] for name in COMMANDS}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))
    for _, *arguments in commands:
        if arguments[0] == "train":
            main([*arguments, *SHORT.split()])
        elif arguments[0] == "verify-resume":
            main([*arguments, "--steps", "2"])
        elif arguments[0] == "evaluate":
            write_files(Path(arguments[arguments.index("--eval-data") + 1]), 3)
            main(arguments)
        elif arguments[0] != "demo":
            main(arguments)
    assert (tmp_path / "out" / "tiny" / "model.safetensors").is_file()
    assert "<svg" in (tmp_path / "runs" / "tiny.html").read_text()
    assert "808,816 numbers beside 521,411,104 parameters" in capsys.readouterr().out


def test_start_page_leads_to_an_evaluated_and_exported_model(tmp_path, monkeypatch, capsys):
    install, *blocks = re.findall(r"^```(python|sh)\n(.*?)^```", START.read_text(), re.M | re.S)
    assert "pip install" in install[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))
    namespace = {}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, START.name, "exec"), namespace)
        elif block.startswith("lrm "):
            for line in block.splitlines():
                _, *arguments = shlex.split(line)
                main([*arguments, *(SHORT.split() if arguments[0] == "train" else ())])
        else:
            subprocess.run(["sh", "-euc", block], check=True)
    written = capsys.readouterr().out
    assert re.search(r"tiny, step 3: \d+ of \d+ matrices trapped", written)
    assert re.search(r"^sciq +cloze +0 +2 ", written, re.M)
    assert "<svg" in (tmp_path / "runs" / "tiny.html").read_text()
    prompt = namespace["prompt"]["input_ids"]
    assert namespace["tokens"][:, : prompt.shape[1]].equal(prompt)
    assert namespace["tokens"].shape[1] > prompt.shape[1]


def test_files_the_documents_name_exist():
    for document in DOCUMENTS:
        text = document.read_text()
        for name in re.findall(r"\]\(([^)#:]+)[^)]*\)", text):
            assert (document.parent / name).exists(), f"{document.name} links to {name}"
        for name in re.findall(r"`((?:tests|src|docs|benchmarks)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
        for name in re.findall(r"`((?:roles/|optim/|kernels/|pretrain/[\w/]*)?[\w]+\.py)`", text):
            assert (ROOT / "src/learnable_multipliers" / name).exists(), name


def test_the_table_of_the_benchmarks_has_every_script():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    parts = ("fuzz_", "kill_")
    for path in (ROOT / "benchmarks").glob("*.py"):
        part = path.stem.startswith(parts) and path.stem != "kill_matrix"
        assert part or f"[{path.stem}]({path.name})" in text, path.name


def test_tables_of_the_first_comparison_are_those_of_its_records():
    lines = (ROOT / "results" / "first-comparison.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    script = runpy.run_path(str(ROOT / "benchmarks" / "first_comparison.py"))
    text = (ROOT / "docs" / "first_comparison.md").read_text()
    assert script["table"]([r for r in records if r["seed"] == 0]) in text
    assert script["table_of_seeds"](records) in text


def test_gains_of_the_readme_are_those_of_the_records():
    script = runpy.run_path(str(ROOT / "benchmarks" / "gains.py"))
    table = script["table"](read_records(script["RECORDS"]))
    assert table in (ROOT / "README.md").read_text()
    evidence = " ".join((ROOT / "docs" / "evidence.md").read_text().split()).replace(" nats ", " ")
    for line in table.splitlines()[2:]:
        assert re.search(r"[\d.]+ \[.*\]", line)[0] in evidence
