"""Statistics of weights: their rms, the rms predicted from noise alone, and multipliers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._plan import Plan
from learnable_multipliers.equilibrium import TensorReading
from learnable_multipliers.optim import AdamW, Muon, multipliers

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@torch.no_grad()
def describe_weights(
    optimizer: AdamW | Muon, plan: Plan, readings: Iterable[TensorReading]
) -> dict[str, Any]:
    """Return rms, predicted rms, roles and quantiles of the multipliers, by parameter name."""
    matrices = {entry.name: entry.matrix for entry in plan.entries if entry.matrix is not None}
    raw = [r for r in readings if r.part == "weight" and r.name in matrices]
    return {
        "raw_rms": {reading.name: reading.measured for reading in raw},
        "predicted_rms": {r.name: r.predicted for r in raw if r.predicted is not None},
        "multipliers": {
            name: {kind: _quantiles(value) for kind, value in values.items()}
            for name, values in multipliers(optimizer).items()
        },
        "roles": {
            name: "/".join(dict.fromkeys(block.role for block in matrix.blocks))
            for name, matrix in matrices.items()
        },
    }


def _quantiles(values: Tensor) -> list[float]:
    at = torch.tensor(QUANTILES, dtype=torch.float32, device=values.device)
    return torch.quantile(values.float().flatten(), at).tolist()
