"""Learnable multipliers: the scale of every weight matrix, learned from data."""

from learnable_multipliers import mup
from learnable_multipliers.equilibrium import (
    Diagnosis,
    diagnose,
    equilibrium_rms,
    equilibrium_rms_lion,
    equilibrium_rms_muon,
    equilibrium_rms_sgdm,
    relaxation_steps,
    row_frequency,
    simulate_brownian,
)
from learnable_multipliers.gauge import drift, rebalance_
from learnable_multipliers.initialize import initialize_
from learnable_multipliers.monitor import Health, Monitor
from learnable_multipliers.multiplier import Block, Matrix, effective, split_gradient
from learnable_multipliers.optim import (
    AdamW,
    LearnableMultipliers,
    Muon,
    clip_grad_norm_,
    multipliers,
    param_groups,
)
from learnable_multipliers.plan import Entry, Plan
from learnable_multipliers.planner import plan
from learnable_multipliers.reparametrize import merge, reparametrize
from learnable_multipliers.rules import NO_EMBEDDING, Rule
from learnable_multipliers.symmetry import Symmetries, Symmetry, find_symmetries

__all__ = [
    "NO_EMBEDDING",
    "AdamW",
    "Block",
    "Diagnosis",
    "Entry",
    "Health",
    "LearnableMultipliers",
    "Matrix",
    "Monitor",
    "Muon",
    "Plan",
    "Rule",
    "Symmetries",
    "Symmetry",
    "clip_grad_norm_",
    "diagnose",
    "drift",
    "effective",
    "equilibrium_rms",
    "equilibrium_rms_lion",
    "equilibrium_rms_muon",
    "equilibrium_rms_sgdm",
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
]
