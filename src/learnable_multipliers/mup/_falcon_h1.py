"""Falcon-H1's published forward multipliers, and the width rules that lead from size to size.

The technical report (arXiv 2507.22448) tuned 12 of them at one shape; configs of four sizes are
public, and the rules here give all of their values. Learning rate and decay are the same at every
size: this is the last recipe of table 1. Its factors on learning rates and decays are not public;
`TunedRates` takes your own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class FalconH1Shape:
    """The sizes that forward multipliers depend on."""

    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    attention_size: int
    """Query heads times head_dim, not always the hidden size."""
    head_dim: int
    ssm_size: int
    """Width inside the mixer (d_ssm)."""
    ssm_state_size: int
    """States per feature (d_state)."""

    def __post_init__(self) -> None:
        for size in fields(self):
            if getattr(self, size.name) < 1:
                raise ValueError(f"{size.name} must be at least 1, got {getattr(self, size.name)}")


FALCON_H1_BASE = FalconH1Shape(
    hidden_size=1280,
    intermediate_size=3072,
    attention_size=768,
    head_dim=128,
    ssm_size=1536,
    ssm_state_size=256,
)
"""Falcon-H1-1.5B-Deep, where the multipliers were tuned."""


def falcon_h1_multipliers(shape: FalconH1Shape) -> dict[str, float]:
    """Return the forward multipliers of a shape, as the `mup_*` fields of a model config.

    Each is a power of sqrt(2) or a simple ratio at the base shape, divided by the number of
    features that the layers it stands for read. One factor stands for two layers where their
    outputs meet as a product: queries and keys, values and attention-out, up and down.
    """
    base = FALCON_H1_BASE
    hidden = base.hidden_size / shape.hidden_size
    # Attention divides by sqrt(head_dim); the root makes it head_dim, for aligned q and k.
    head = math.sqrt(base.head_dim / shape.head_dim)
    return {
        "mup_embedding": 2**2.5,
        "mup_head": 2**-5 * hidden,
        "mup_attention_in": 1.0,
        "mup_key": 1 / 2**2.5 * hidden**2 * head,
        "mup_attention_out": 2**-1 * hidden * (base.attention_size / shape.attention_size),
        "mup_ssm_in": hidden,
        "mup_z": 2**-1.5,
        "mup_x": 2**-2,
        "mup_B": 2**-2.5 * (base.ssm_state_size / shape.ssm_state_size),
        "mup_C": 2**-1,
        "mup_dt": 2**-1.5,
        "mup_ssm_out": math.sqrt(2) / 6 * (base.ssm_size / shape.ssm_size),
        "mup_gate": 2**-0.5 * hidden,
        "mup_down": 5 / 16 * hidden * (base.intermediate_size / shape.intermediate_size),
    }
