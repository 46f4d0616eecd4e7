"""Noise against weight decay: closed forms, simulation, and diagnosis of a run (sec. 3)."""

from learnable_multipliers.equilibrium._diagnosis import Diagnosis, diagnose
from learnable_multipliers.equilibrium._random_walk import (
    SETTLED,
    BrownianState,
    RandomWalk,
    adamw_walk,
    brownian_rms,
    brownian_step,
    equilibrium_rms,
    lion_walk,
    mixed_walk,
    muon_walk,
    random_walk,
    relaxation_steps,
    sgdm_walk,
)
from learnable_multipliers.equilibrium._readings import (
    TensorReading,
    noise_indicator,
    noise_ratio,
    row_frequency,
)
from learnable_multipliers.equilibrium._simulation import Trajectory, simulate_brownian

__all__ = [
    "SETTLED",
    "BrownianState",
    "Diagnosis",
    "RandomWalk",
    "TensorReading",
    "Trajectory",
    "adamw_walk",
    "brownian_rms",
    "brownian_step",
    "diagnose",
    "equilibrium_rms",
    "lion_walk",
    "mixed_walk",
    "muon_walk",
    "noise_indicator",
    "noise_ratio",
    "random_walk",
    "relaxation_steps",
    "row_frequency",
    "sgdm_walk",
    "simulate_brownian",
]
