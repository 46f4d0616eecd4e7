"""What a kernel works on: one parameter's tensors, in the layout they are stored in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What multiplies the stored rows and columns of a matrix, and the sums taken along them.

    A weight stored (in, out) has its output features along its stored columns; whoever builds
    this has turned the two already. All are (stack, rows) or (stack, cols).
    """

    rows: Tensor
    cols: Tensor
    rows_next: Tensor
    """After the multipliers' update of this step."""
    cols_next: Tensor
    row_sums: Tensor
    col_sums: Tensor


@dataclass(kw_only=True)
class Work:
    """One parameter of an optimizer step."""

    index: int
    """Its place in the table of hyper-parameters."""
    weight: Tensor
    """The parameter itself, on this rank: the effective weight."""
    raw: Tensor
    """What the optimizer trains, float32 or float64; the weight itself where nothing differs."""
    grad: Tensor
    """Gradient of the effective weight."""
    moments: tuple[Tensor, ...]
    """(exp_avg, exp_avg_sq) for AdamW, (momentum,) for Muon."""
    factors: Factors | None = None

    @property
    def owns_raw(self) -> bool:
        """Whether the raw weight is kept apart from the parameter."""
        return self.raw is not self.weight


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Hyper-parameters as the groups give them, and how far each parameter has come."""

    table: Tensor
    """Float64, a row per class of parameters: lr, decay, lr and decay of multipliers, beta1, beta2
    and eps."""
    class_of: Tensor
    """The class of each parameter."""
    steps: Tensor
    """Steps each parameter has taken, this one included."""

    @property
    def beta2(self) -> Tensor:
        """By parameter."""
        return self.table[self.class_of, 5]


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyper-parameters by parameter, float64 tensors of one length on the parameters' device."""

    lr: Tensor
    weight_decay: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    bias1: Tensor
    """1 - beta1 ** step."""
    bias2: Tensor
    """1 - beta2 ** step."""
