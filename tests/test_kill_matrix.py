"""`lrm train` killed at file operations and at any time; the full matrix is the script itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "kill_matrix.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_kill_loses_a_checkpoint_or_changes_a_run(tmp_path, request):
    kills = 4 if request.config.getoption("--quick") else 12
    found = tmp_path / "found.json"
    line = [sys.executable, str(SCRIPT), "--kills", str(kills), "--out", str(found)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(found.read_text())
    assert sum(found["kills"].values()) == kills
    if kills == 12:
        assert {kind: found["kills"][kind] for kind in ("save", "torn")} == {"save": 4, "torn": 1}
    assert found["failures"] == []
    assert found["exact"] == found["runs"] > 0
    assert found["checked"] > 0
