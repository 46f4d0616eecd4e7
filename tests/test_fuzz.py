"""Changed command lines and changed files; the long series is the script itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from learnable_multipliers.cli import COMMANDS

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "benchmarks" / "fuzz.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and /proc"),
]


def run(*line: object) -> subprocess.CompletedProcess:
    words = [sys.executable, *map(str, line)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)


def test_every_case_succeeds_or_is_refused_in_one_line(tmp_path, request):
    cases = 25 if request.config.getoption("--quick") else 500
    found = tmp_path / "found.json"
    done = run(SCRIPT, "--cases", cases, "--out", found)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(found.read_text())
    assert found["failures"] == []
    assert sum(found["verdicts"].values()) == cases
    assert found["files_changed"] >= cases / 2
    if cases == 500:
        assert found["commands"].keys() == COMMANDS.keys()
        assert min(found["verdicts"][kind] for kind in ("success", "refusal")) > 50


def test_bugs_of_every_class_are_found():
    done = run(TESTS / "planted_bugs.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {cause: bad for cause, (_, bad) in found.items()} == {cause: cause for cause in found}
    assert {good for good, _ in found.values()} == {"success"}
    assert len(found) == 8
