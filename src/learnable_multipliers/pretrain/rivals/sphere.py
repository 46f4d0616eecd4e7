"""The direction of magnitude-direction decoupling (arXiv 2606.25971): weights of fixed norm.

    W = row W^ col,   W^ <- R N(W^ - lr U(row col G)),   row and col by Adam without decay

Row and column are learnable multipliers, so the whole method is this optimizer with the placement
full and a multiplier decay of 0; by itself it is the paper's fixed sphere without magnitudes. The
sphere is that of the whole matrix (the public code's mode "flat"), with the norm that the matrix
starts with in place of sqrt(max(rows, columns)): its mode that preserves the start, and a factor on
the learning rate. Embedding and head train with AdamW, as in the public code by default.
"""

from __future__ import annotations

from torch import Tensor

from learnable_multipliers.pretrain.rivals.hyperball import Hyperball


class Sphere(Hyperball):
    """AdamW or Muon on a sphere: as on a ball, with updates of any length."""

    def scaled(self, updates: Tensor, radii: Tensor) -> Tensor:
        """Return updates as they are."""
        return updates
