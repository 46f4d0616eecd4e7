"""The scale symmetries of a model: rescalings of its parameters that leave its outputs alone.

With theta the logs of all scales a model can learn, they are the null space of
d(outputs)/d(theta). It is computed, not looked up: nothing in here knows an architecture or the
name of a parameter.
"""

from learnable_multipliers.symmetry._axes import Axis
from learnable_multipliers.symmetry._proxy import find_symmetries
from learnable_multipliers.symmetry._symmetry import Symmetries, Symmetry, Term

__all__ = ["Axis", "Symmetries", "Symmetry", "Term", "find_symmetries"]
