"""The README's Python runs, top to bottom, in one namespace."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_code_runs(tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert (tmp_path / "out" / "model.safetensors").is_file()

    shown = re.search(r"^```\n(parameter.*?)^```", readme, re.M | re.S)[1]
    table = str(namespace["lrm"].plan(namespace["model"], "symmetry-aware"))
    for line in shown.splitlines():
        assert line in table


def test_files_the_documents_name_exist():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert len(documents) >= 4
    for document in documents:
        text = document.read_text()
        for name in re.findall(r"`((?:tests|src|docs|benchmarks)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
        for name in re.findall(r"`((?:roles/|optim/|kernels/)?[\w]+\.py)`", text):
            assert (ROOT / "src/learnable_multipliers" / name).exists(), name
