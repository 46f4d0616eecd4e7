"""Width: the recipes of table 1, Falcon-H1's forward multipliers, and a check by training.

`_recipes` defines how settings change with width, the expected effect on activations, the rules and
`mup_*` fields that apply a recipe, and the published numbers. `_coordinates` trains a model at
several widths and compares its measurements with a recipe.
"""

from learnable_multipliers.mup._coordinates import (
    Coordinates,
    Probe,
    Run,
    Training,
    compare,
    coordinate_check,
    exponents,
    fit_exponent,
    table,
)
from learnable_multipliers.mup._recipes import (
    FALCON_H1_BASE,
    RECIPES,
    FalconH1Shape,
    Recipe,
    Scaling,
    TunedRates,
    Widths,
    falcon_h1_multipliers,
    mup_fields,
    rules,
    scale_layer,
    scale_roles,
)

__all__ = [
    "FALCON_H1_BASE",
    "RECIPES",
    "Coordinates",
    "FalconH1Shape",
    "Probe",
    "Recipe",
    "Run",
    "Scaling",
    "Training",
    "TunedRates",
    "Widths",
    "compare",
    "coordinate_check",
    "exponents",
    "falcon_h1_multipliers",
    "fit_exponent",
    "mup_fields",
    "rules",
    "scale_layer",
    "scale_roles",
    "table",
]
