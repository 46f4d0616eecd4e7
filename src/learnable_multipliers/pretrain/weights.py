"""What the weights of a run look like: their rms, the rms noise alone would give, multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers.equilibrium import (
    BrownianState,
    Walk,
    adamw_walk,
    brownian_step,
    muon_walk,
)
from learnable_multipliers.multiplier import Matrix
from learnable_multipliers.optim import AdamW, Muon, multipliers, raw_weights
from learnable_multipliers.optim.muon import is_hidden
from learnable_multipliers.plan import Plan

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
# Their rows get gradients as often as their token occurs: one number does not predict them.
_SPARSE = {"embedding", "tied-embedding", "position-embedding"}


class Prediction:
    """The rms each matrix would have if its gradients were pure noise, as a run goes on."""

    def __init__(self, optimizer: AdamW | Muon, plan: Plan):
        self._optimizer = optimizer
        matrices = {
            entry.name: entry.matrix
            for entry in plan.entries
            if entry.matrix is not None and not _roles(entry.matrix) & _SPARSE
        }
        start = raw_weights(optimizer)
        self._settings: dict[str, tuple[float, float, Walk]] = {}
        self._states: dict[str, BrownianState] = {}
        for group in optimizer.param_groups:
            for name in group["param_names"]:
                if name in matrices and name in start:
                    self._settings[name] = self._setting(group, matrices[name])
                    self._states[name] = BrownianState(_rms(start[name]))

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

    def _setting(self, group: dict[str, Any], matrix: Matrix) -> tuple[float, float, Walk]:
        """Return the scale of the learning rate, the decay and the walk of a matrix."""
        scale, decay = float(group["lr_scale"]), float(group["weight_decay"])
        if isinstance(self._optimizer, Muon):
            if is_hidden(matrix):
                shape = (matrix.num_out, matrix.num_in)
                walk = muon_walk(
                    self._optimizer.momentum,
                    self._optimizer.nesterov,
                    adjust_lr=self._optimizer.adjust_lr,
                    shape=shape,
                )
                return scale, decay, walk
            scale *= float(group["adamw_lr_scale"])
        return scale, decay, adamw_walk(group["betas"][0])


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
