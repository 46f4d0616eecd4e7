"""What an installed wheel can do without this checkout and without any extra.

`make dist` runs it in an environment of its own: python -I tests/installed.py
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

# torch says so once where numpy is not installed.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402

import learnable_multipliers as lrm  # noqa: E402


def main() -> None:
    """Check where the package is, what came with it, a step, and what `lrm` says."""
    assert Path(lrm.__file__).is_relative_to(sys.prefix), lrm.__file__
    assert importlib.metadata.version("learnable-multipliers") == lrm.__version__
    assert (Path(lrm.__file__).parent / "py.typed").exists()
    for extra in ("numpy", "transformers", "rich", "tyro", "matplotlib"):
        assert importlib.util.find_spec(extra) is None, f"{extra} was installed with the core"

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).double()
    weight = model[0].weight
    before = weight.detach().clone()
    optimizer = lrm.AdamW.from_model(model, lr=1e-2, weight_decay=0.1)
    model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
    grad = weight.grad.clone()
    optimizer.step()
    # The first step of AdamW: lr times the sign of a gradient, of weight and multipliers alike.
    sign = lambda g: g / (g.abs() + 1e-8)  # noqa: E731
    raw = before * (1 - 1e-2 * 0.1) - 1e-2 * sign(grad)
    start, rate = 1 - 1e-2 * 2e-3, 1e-2
    row = start - rate * sign((before * grad).sum(1))
    col = start - rate * sign((before * grad).sum(0))
    torch.testing.assert_close(weight.detach(), row[:, None] * raw * col, rtol=1e-12, atol=0)

    said = subprocess.run(
        [Path(sys.prefix) / "bin" / "lrm", "plan", "tiny"], capture_output=True, text=True
    )
    assert said.returncode == 1, said
    assert "pip install 'learnable-multipliers[pretrain]'" in said.stderr, said.stderr
    print(f"learnable-multipliers {lrm.__version__} with torch {torch.__version__}: installed")


if __name__ == "__main__":
    main()
