"""Simulated rms over the closed form: optimizers, betas and lr * weight_decay.

    python benchmarks/brownian.py --out results/brownian.json

Each run starts at zero, goes on until 2 wd sum(lr) is 10, and is averaged over its last third; at
1e-5 it starts at the closed form and goes on for two relaxations. Sampling errors are about 0.5%.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import learnable_multipliers as lrm

WEIGHT_DECAY = 0.25
PRODUCTS = (1e-2, 1e-3, 1e-4, 1e-5)
NUMBERS = (200, 100)
MUON_SHAPES = ((8, 48, 48), (6, 32, 96), (6, 96, 32), (5, 24, 96), (4, 16, 128), (1, 256, 256))


def cases() -> list[tuple[Any, dict[str, Any], tuple[int, ...]]]:
    """Return optimizer, settings and shape of each line of the table."""
    found: list[tuple[Any, dict[str, Any], tuple[int, ...]]] = []
    for betas in ((0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.95, 0.98), (0.8, 0.95), (0.0, 0.95)):
        found.append(("adamw", {"betas": betas}, NUMBERS))
    for betas in ((0.9, 0.99), (0.95, 0.98)):
        found.append(("lion", {"betas": betas}, NUMBERS))
    for settings in ({"momentum": 0.9}, {"momentum": 0.95, "nesterov": True}, {"momentum": 0.0}):
        found.append(("sgdm", settings, NUMBERS))
    for coefficients in ("quintic", "polar-express"):
        for shape in MUON_SHAPES:
            found.append(("muon", {"coefficients": coefficients}, shape))
    return found


def ratio(
    optimizer: Any, settings: dict[str, Any], shape: tuple[int, ...], product: float
) -> dict[str, float]:
    """Simulate one cell of the table."""
    lr = product / WEIGHT_DECAY
    sides = (shape[-2], shape[-1]) if optimizer == "muon" else None
    closed = lrm.equilibrium_rms(lr, WEIGHT_DECAY, optimizer=optimizer, shape=sides, **settings)
    slow = product <= 1e-5
    steps = 200 + round((1 if slow else 5) / product)
    run = lrm.simulate_brownian(
        optimizer,
        [lr] * steps,
        WEIGHT_DECAY,
        shape,
        start_rms=closed if slow else 0.0,
        **settings,
    )
    rms = run.late_rms(steps // 3)
    found = {"closed_form": rms / closed}
    if optimizer == "muon":
        plain = lrm.equilibrium_rms(lr, WEIGHT_DECAY, optimizer="muon")
        found = {"corrected": rms / closed, "wen": rms / plain}
    return found


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", type=float, nargs="+", default=PRODUCTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for optimizer, settings, shape in cases():
        # Slow rates change nothing for Muon but the time they take.
        products = [p for p in options.products if optimizer != "muon" or p >= 1e-2]
        if optimizer in ("lion", "sgdm"):
            products = [p for p in products if p >= 1e-4]
        label = " ".join(f"{key}={value}" for key, value in settings.items())
        label += f" {'x'.join(map(str, shape[-2:]))}" if optimizer == "muon" else ""
        for product in products:
            found = ratio(optimizer, settings, shape, product)
            rounded = {key: round(value, 4) for key, value in found.items()}
            results.append({"optimizer": optimizer, "settings": label, "lr_wd": product, **rounded})
            shown = "  ".join(f"{key} {value:.3f}" for key, value in rounded.items())
            print(f"{optimizer:6} {label:42} lr*wd {product:.0e}  {shown}", flush=True)
    if options.out:
        record = {"torch": torch.__version__, "weight_decay": WEIGHT_DECAY, "ratios": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
