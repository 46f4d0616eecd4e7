"""What `import learnable_multipliers as lrm` offers, name by name."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import learnable_multipliers as lrm

ROOT = Path(__file__).parent.parent


def test_public_names_are_these():
    assert lrm.__all__ == [
        "NO_EMBEDDING",
        "AdamW",
        "Block",
        "Diagnosis",
        "Health",
        "LearnableMultipliers",
        "Matrix",
        "Monitor",
        "Muon",
        "Plan",
        "PlanEntry",
        "Rule",
        "Symmetries",
        "Symmetry",
        "__version__",
        "clip_grad_norm_",
        "diagnose",
        "drift",
        "effective",
        "equilibrium_rms",
        "find_symmetries",
        "initialize_",
        "merge",
        "multipliers",
        "mup",
        "param_groups",
        "plan",
        "rebalance_",
        "relaxation_steps",
        "reparametrize",
        "row_frequency",
        "simulate_brownian",
        "split_gradient",
        "symmetry_positions",
        "unwrap",
    ]
    assert all(hasattr(lrm, name) for name in lrm.__all__)


def test_the_api_page_has_the_public_names_and_no_others():
    public = {f"learnable_multipliers.{name}" for name in lrm.__all__}
    public |= {f"learnable_multipliers.mup.{name}" for name in lrm.mup.__all__}
    for path in (ROOT / "src/learnable_multipliers/integrations").glob("[!_]*.py"):
        # Read, not imported: frameworks need not be there.
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = f"learnable_multipliers.integrations.{path.stem}"
                public |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}
    shown, module = [], ""
    page = (ROOT / "docs" / "api.md").read_text()
    for directive, name in re.findall(r"^\.\. ([\w:]+):: (\S+)$", page, re.M):
        if directive == "currentmodule":
            module = f"{name}."
        elif directive == "module":
            shown.append(name)
        elif directive in ("autoclass", "autofunction", "py:data"):
            shown.append(name if name.startswith("learnable_multipliers.") else module + name)
    assert sorted(shown) == sorted(public)


def test_import_needs_torch_alone():
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import learnable_multipliers\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "extra = new - set(sys.stdlib_module_names) - {'learnable_multipliers', 'torch'}\n"
        "assert not extra, extra\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("extra", ["transformers", "lightning", "torchtitan"])
def test_a_missing_framework_is_one_clear_line(extra, monkeypatch):
    name = f"learnable_multipliers.integrations.{extra}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for module in [m for m in sys.modules if m.split(".")[0] == extra]:
        monkeypatch.delitem(sys.modules, module)
    # A module that is None raises ImportError where it is imported.
    monkeypatch.setitem(sys.modules, extra, None)
    line = rf"^{extra} is not installed: pip install 'learnable-multipliers\[{extra}\]'$"
    with pytest.raises(ImportError, match=line):
        importlib.import_module(name)
