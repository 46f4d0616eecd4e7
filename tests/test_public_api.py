"""What `import learnable_multipliers as lrm` offers, name by name."""

import importlib
import subprocess
import sys

import pytest

import learnable_multipliers as lrm


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
