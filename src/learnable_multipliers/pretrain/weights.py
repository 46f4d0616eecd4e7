"""What the weights of a run look like: their rms, the rms noise alone would give, multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.equilibrium import (
    BrownianState,
    Walk,
    brownian_step,
    has_sparse_rows,
    walk_of,
)
from learnable_multipliers.multiplier import Matrix
from learnable_multipliers.optim import AdamW, Muon, multipliers, raw_weights
from learnable_multipliers.optim.trained import trained_tensors
from learnable_multipliers.plan import Plan

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class Prediction:
    """The rms each matrix would have if its gradients were pure noise, as a run goes on."""

    def __init__(self, optimizer: AdamW | Muon, plan: Plan):
        matrices = {entry.name for entry in plan.entries if entry.matrix is not None}
        self._settings: dict[str, tuple[float, float, Walk]] = {}
        self._states: dict[str, BrownianState] = {}
        for tensor in trained_tensors(optimizer):
            walk = walk_of(optimizer, tensor)
            # One number does not predict an embedding, whose rows get gradients now and then.
            sparse = has_sparse_rows(tensor.matrix)
            if tensor.part == "weight" and tensor.name in matrices and walk and not sparse:
                self._settings[tensor.name] = (tensor.lr_scale, tensor.weight_decay, walk)
                self._states[tensor.name] = BrownianState(_rms(tensor.value))

    def step(self, lr: float) -> None:
        """Follow one step of the run, at its base learning rate."""
        # Matrices of one kind differ in where they started alone; few kinds, many matrices.
        self._states = {
            name: brownian_step(state, lr * scale, decay, walk)
            for name, state in self._states.items()
            for scale, decay, walk in (self._settings[name],)
        }

    @property
    def rms(self) -> dict[str, float]:
        """The rms that is expected by now, by parameter name."""
        return {name: state.rms for name, state in self._states.items()}

    def state(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps."""
        return {name: list(state) for name, state in self._states.items()}

    def load(self, saved: Mapping[str, list[float]]) -> None:
        """Go on from what a checkpoint kept."""
        if saved.keys() != self._states.keys():
            odd = sorted(saved.keys() ^ self._states.keys())
            raise ValueError(f"the predictions kept are of other matrices: {', '.join(odd[:3])}")
        for name in self._states:
            rms, heading, steps = saved[name]
            self._states[name] = BrownianState(rms, heading, int(steps))


@torch.no_grad()
def describe_weights(optimizer: AdamW | Muon, plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """Return rms, predicted rms, roles and quantiles of the multipliers, by parameter name."""
    matrices = {entry.name: entry.matrix for entry in plan.entries if entry.matrix is not None}
    return {
        "raw_rms": {
            name: _rms(raw) for name, raw in raw_weights(optimizer).items() if name in matrices
        },
        "predicted_rms": prediction.rms,
        "multipliers": {
            name: {kind: _quantiles(value) for kind, value in values.items()}
            for name, values in multipliers(optimizer).items()
        },
        "roles": {name: "/".join(sorted(_roles(m), key=_order(m))) for name, m in matrices.items()},
    }


def _roles(matrix: Matrix) -> set[str]:
    return {block.role for block in matrix.blocks}


def _order(matrix: Matrix) -> Any:
    order = [block.role for block in matrix.blocks]
    return order.index


def _rms(weight: Tensor) -> float:
    return weight.float().square().mean().sqrt().item()


def _quantiles(values: Tensor) -> list[float]:
    at = torch.tensor(QUANTILES, dtype=torch.float32, device=values.device)
    return torch.quantile(values.float().flatten(), at).tolist()
