"""Learnable multipliers: the scale of every weight matrix, learned from data."""

from learnable_multipliers import mup
from learnable_multipliers._gauge import drift, rebalance_, symmetry_positions
from learnable_multipliers._initialize import initialize_
from learnable_multipliers._multiplier import Block, Matrix, effective, split_gradient
from learnable_multipliers._plan import Plan, PlanEntry
from learnable_multipliers._planner import plan
from learnable_multipliers._reparametrize import merge, reparametrize
from learnable_multipliers._rules import NO_EMBEDDING, Rule
from learnable_multipliers.equilibrium import (
    Diagnosis,
    diagnose,
    equilibrium_rms,
    relaxation_steps,
    row_frequency,
    simulate_brownian,
)
from learnable_multipliers.equilibrium._monitor import Health, Monitor
from learnable_multipliers.optim import (
    AdamW,
    LearnableMultipliers,
    Muon,
    clip_grad_norm_,
    multipliers,
    param_groups,
    unwrap,
)
from learnable_multipliers.symmetry import Symmetries, Symmetry, find_symmetries

__version__ = "0.1.0"

__all__ = [
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
