"""Noise against weight decay: closed forms, simulation, and what a run shows of it (sec. 3)."""

from learnable_multipliers.equilibrium._closed_forms import (
    SETTLED,
    equilibrium_rms,
    equilibrium_rms_lion,
    equilibrium_rms_muon,
    equilibrium_rms_sgdm,
    relaxation_steps,
)
from learnable_multipliers.equilibrium._diagnosis import Diagnosis, Reading, diagnose
from learnable_multipliers.equilibrium._indicator import noise_indicator, noise_ratio
from learnable_multipliers.equilibrium._prediction import has_sparse_rows, walk_of
from learnable_multipliers.equilibrium._random_walk import (
    BrownianState,
    Walk,
    adamw_walk,
    brownian_rms,
    brownian_step,
    lion_walk,
    mixed_walk,
    muon_walk,
    sgdm_walk,
)
from learnable_multipliers.equilibrium._simulation import Trajectory, simulate_brownian
from learnable_multipliers.equilibrium._token_rows import TokenRows, row_frequency

__all__ = [
    "SETTLED",
    "BrownianState",
    "Diagnosis",
    "Reading",
    "TokenRows",
    "Trajectory",
    "Walk",
    "adamw_walk",
    "brownian_rms",
    "brownian_step",
    "diagnose",
    "equilibrium_rms",
    "equilibrium_rms_lion",
    "equilibrium_rms_muon",
    "equilibrium_rms_sgdm",
    "has_sparse_rows",
    "lion_walk",
    "mixed_walk",
    "muon_walk",
    "noise_indicator",
    "noise_ratio",
    "relaxation_steps",
    "row_frequency",
    "sgdm_walk",
    "simulate_brownian",
    "walk_of",
]
