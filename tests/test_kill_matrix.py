"""`lrm train` killed at file operations and at any time; the full matrix is the script itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "kill_matrix.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted as Linux does it")
def test_no_kill_loses_a_checkpoint_or_changes_a_run(tmp_path, request):
    kills = 4 if request.config.getoption("--quick") else 12
    found = tmp_path / "found.json"
    line = [sys.executable, str(SCRIPT), "--kills", str(kills), "--rank-kills", "1"]
    line += ["--out", str(found)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(found.read_text())
    assert sum(found["kills"].values()) == kills + 1
    if kills == 12:
        assert {kind: found["kills"][kind] for kind in ("save", "torn")} == {"save": 4, "torn": 1}
    # Of two ranks, one or both are killed.
    assert found["kills"].get("rank time", 0) + found["kills"].get("group time", 0) == 1
    assert found["failures"] == []
    assert found["exact"] == found["runs"] > 0
    assert found["checked"] > 0
