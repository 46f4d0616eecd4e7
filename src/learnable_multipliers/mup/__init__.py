"""Width: the recipes of table 1 and Falcon-H1's forward multipliers.

`recipes` says what a recipe changes with width and what that must do to activations; `rates` turns
it into rules and `mup_*` fields; `falcon_h1` holds the published numbers.
"""

from learnable_multipliers.mup.falcon_h1 import (
    FALCON_H1_BASE,
    FalconH1Shape,
    falcon_h1_multipliers,
)
from learnable_multipliers.mup.rates import TunedRates, mup_fields, rules
from learnable_multipliers.mup.recipes import (
    RECIPES,
    Recipe,
    Scaling,
    Widths,
    scale_layer,
    scale_roles,
)

__all__ = [
    "FALCON_H1_BASE",
    "RECIPES",
    "FalconH1Shape",
    "Recipe",
    "Scaling",
    "TunedRates",
    "Widths",
    "falcon_h1_multipliers",
    "mup_fields",
    "rules",
    "scale_layer",
    "scale_roles",
]
