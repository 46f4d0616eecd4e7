"""Forms of Newton-Schulz, timed and compared with float64: which of them should Muon take?

    python benchmarks/newton_schulz.py --out results/newton-schulz-h200.json

Forms differ in what is multiplied (X every time, or polynomials of its Gram matrix first), in
precision, and in whether a kernel computes one triangle of symmetric products. Peers are torch's
(one matrix at a time in torch.optim.Muon, here in batches) and what Muon had before: bfloat16.

Errors are relative distances in Frobenius norm from the same polynomials in float64, for matrices
of several spectra, and, with --gradients, for gradients of a model that is training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import milliseconds, without_host
from torch import Tensor

from learnable_multipliers.kernels._newton_schulz import divided_by_norm, symmetric_product
from learnable_multipliers.kernels._newton_schulz_kernels import Launch
from learnable_multipliers.kernels._newton_schulz_kernels import symmetric_product as kernel_product
from learnable_multipliers.optim._orthogonalization import (
    COEFFICIENTS,
    gram_form,
    orthogonalize,
    standard_form,
)
from learnable_multipliers.pretrain.config import OptimizerConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.trainer.build import make_optimizer

Form = Callable[[Tensor], Tensor]

POLYNOMIALS = COEFFICIENTS["quintic"]
BATCHES = {
    # The hidden matrices of `benchmarks/llama.py`, as many of each.
    "432m": {(1024, 1024): 96, (1024, 3584): 24, (3584, 1024): 48},
    # Those of 20m-llama, and of a wide model.
    "20m": {(320, 320): 32, (320, 1024): 8, (1024, 320): 16},
    "wide": {(2048, 2048): 16, (2048, 8192): 4, (8192, 2048): 8},
    "heads": {(64, 1024): 72 * 16},
}
LAUNCHES = [
    Launch(128, 64, 8, 3),
    Launch(128, 64, 8, 4),
    Launch(128, 64, 4, 3),
    Launch(128, 64, 4, 4),
    Launch(128, 128, 8, 2),
    Launch(256, 64, 8, 2),
    Launch(64, 64, 4, 4),
]


# -- forms -----------------------------------------------------------------------------------------


def as_torch(x: Tensor) -> Tensor:
    """Return what torch.optim.Muon computes, a batch at a time."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in POLYNOMIALS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def as_before(x: Tensor) -> Tensor:
    """Return what Muon computed before: bfloat16, divided at the Gram matrix."""
    wide = x.shape[-2] <= x.shape[-1]
    for step, (a, b, c) in enumerate(POLYNOMIALS):
        gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
        scale = None
        if step == 0:
            square = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float32)
            norm = square.sqrt().clamp(min=1e-7)[:, None, None]
            scale = (1 / norm).to(gram.dtype)
            gram = gram * (1 / norm**2).to(gram.dtype)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        gram.diagonal(dim1=-2, dim2=-1).add_(a)
        if scale is not None:
            gram *= scale
        x = torch.bmm(gram, x) if wide else torch.bmm(x, gram)
    return x


def form(x: Tensor, by: Any, backend: Any) -> Tensor:
    """Return a form of the library, whatever it would choose for this shape."""
    x = divided_by_norm(x, 1.0, 1e-7, backend)
    return by(x, POLYNOMIALS, partial(symmetric_product, backend=backend))


FORMS: dict[str, Form] = {
    "torch's, bfloat16": as_torch,
    "before, bfloat16": as_before,
    "standard, float16": partial(form, by=standard_form, backend="torch"),
    "standard, float16, kernel": partial(form, by=standard_form, backend="auto"),
    "gram, float16": partial(form, by=gram_form, backend="torch"),
    "gram, float16, kernel": partial(form, by=gram_form, backend="auto"),
    "ours": partial(orthogonalize, coefficients="quintic"),
}


# -- comparison ------------------------------------------------------------------------------------


def spectra(count: int, rows: int, cols: int) -> dict[str, Tensor]:
    """Return matrices whose singular values fall in different ways, of the size of gradients."""
    noise = torch.randn(count, rows, cols, dtype=torch.float64)
    left, _ = torch.linalg.qr(torch.randn(count, rows, rows, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(count, cols, rows, dtype=torch.float64))
    index = torch.arange(1, rows + 1, dtype=torch.float64)
    falls = {"1/k": 1 / index, "1/k^2": 1 / index**2, "an eighth": 1.0 * (index <= rows / 8)}
    made = {name: (left * values) @ right.mT for name, values in falls.items()}
    return {name: 1e-4 * x for name, x in {"noise": noise, **made}.items()}


def gradients(steps: int) -> dict[str, Tensor]:
    """Return gradients of hidden matrices of a small Llama on noise with structure."""
    torch.manual_seed(0)
    model = build(PRESETS["20m-llama"], 0, "cuda")
    optimizer, _ = make_optimizer(model, OptimizerConfig(kind="muon", placement="full", lr=4e-3))
    # Each token follows from the one before in half of the places: something to learn.
    follows = torch.randperm(1024, device="cuda")
    for step in range(steps):
        tokens = torch.randint(1024, (16, 513), device="cuda")
        known = torch.rand(tokens.shape, device="cuda") < 0.5
        for at in range(1, 513):
            tokens[:, at] = torch.where(known[:, at], follows[tokens[:, at - 1]], tokens[:, at])
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(tokens).total
        loss.backward()
        if step + 1 < steps:
            optimizer.step()
            optimizer.zero_grad()
    layer = model.model.layers[4]
    found = {
        "query": layer.self_attn.q_proj,
        "gate": layer.feed_forward.gate_proj,
        "down": layer.feed_forward.down_proj,
    }
    return {
        f"{name} of step {steps}": matrix.weight.grad[None].double().cpu()
        for name, matrix in found.items()
    }


def exact(x: Tensor) -> Tensor:
    """Return the polynomials applied to singular values in float64."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for a, b, c in POLYNOMIALS:
        values = a * values + b * values**3 + c * values**5
    return (left * values[..., None, :]) @ right


def error(of: Form, x: Tensor, expected: Tensor) -> float:
    """Return how far a form is from the exact result, relative."""
    found = of(x.to("cuda", torch.bfloat16)).cpu().double()
    return ((found - expected).norm() / expected.norm()).item()


def time_of(of: Form, batches: dict[tuple[int, int], int]) -> float:
    """Return the milliseconds of orthogonalizing matrices, captured in a graph."""
    made = [
        torch.randn(count, *shape, device="cuda", dtype=torch.bfloat16) * 1e-4
        for shape, count in batches.items()
    ]
    return milliseconds(without_host(lambda: [of(x) for x in made]), repeats=20)


def products() -> dict[str, dict[str, float]]:
    """Return the milliseconds of one Gram product, by torch and by the kernel's launches."""
    shapes = [(72, 1024, 3584), (96, 1024, 1024), (64, 512, 2048), (64, 768, 768), (16, 2048, 2048)]
    found: dict[str, dict[str, float]] = {}
    for count, size, inner in shapes:
        x = torch.randn(count, size, inner, device="cuda", dtype=torch.float16) / inner**0.5
        row = {"torch": milliseconds(without_host(partial(torch.bmm, x, x.mT)), 20)}
        for launch in LAUNCHES:
            for kind, y in {"": x, ", transposed": x.mT.contiguous().mT}.items():
                call = partial(kernel_product, y, y, None, 1.0, 0.0, 0.0, launch)
                row[f"{launch}{kind}"] = milliseconds(without_host(call), 20)
        found[f"{count} of {size} x {inner}"] = row
    return found


def main() -> None:
    """Compare, time, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradients", type=int, default=0, help="steps to train for gradients")
    parser.add_argument("--launches", action="store_true", help="also time tiles of the kernel")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    inputs = spectra(2, 1024, 3584)
    if options.gradients:
        inputs |= gradients(options.gradients)
    expected = {name: exact(x) for name, x in inputs.items()}
    result["forms"] = {}
    for name, of in FORMS.items():
        row = {
            "errors": {key: round(error(of, x, expected[key]), 5) for key, x in inputs.items()},
            "ms": {key: round(time_of(of, batches), 4) for key, batches in BATCHES.items()},
        }
        result["forms"][name] = row
        took = "  ".join(f"{key} {ms:7.3f}" for key, ms in row["ms"].items())
        print(f"{name:28} ms: {took}", flush=True)
        print(f"{'':28} errors: {row['errors']}", flush=True)
    if options.launches:
        result["products"] = products()
        for shape, row in result["products"].items():
            for name, ms in row.items():
                print(f"{shape:24} {name:44} {ms:7.4f} ms {ms / row['torch']:6.3f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
