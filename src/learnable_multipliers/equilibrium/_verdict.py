"""Trapped or free: the criterion.

A tensor is **trapped** when its rms is the one that noise and decay alone would have given it,
though decay has long wiped out where it started, and its gradients are mostly noise. It is
**free** when its rms is another one, or its gradients are mostly signal. All else is **open**: no
prediction, or too early for one to tell anything. The paper calls matrices trapped because their
norms coincide with Brownian motion, and multipliers free because theirs do not (sec. 3); it
leaves the indicator of noise open (sec. 6). The bounds are ours.
"""

from __future__ import annotations

import math
from typing import Literal

from learnable_multipliers.equilibrium._closed_forms import SETTLED

Verdict = Literal["trapped", "free", "open"]

WITHIN = 0.2
"""|log(measured / predicted)| up to which an rms counts as that of noise. The walk errs by 0.03 for
AdamW and 0.05 for Muon; the rest is what single matrices of small runs scatter by."""
SIGNAL = 2.0
"""Indicator from which on the momentum holds more signal than noise."""
_SIGMAS = 3
"""How many times its sampling error a number must pass its bound by, so that small tensors count
as free on evidence alone."""


def verdict_of(
    log_ratio: float | None,
    error: float | None,
    settling: float | None,
    indicator: float | None,
    size: int,
) -> Verdict:
    """Return the verdict on a tensor of `size` numbers.

    Args:
        log_ratio: log(measured / predicted), and `error`, its standard deviation on noise.
        settling: 2 wd sum(lr) so far.
        indicator: Its standard deviation on noise is sqrt(2 / size).
    """
    if indicator is not None and indicator > SIGNAL + _SIGMAS * math.sqrt(2 / max(size, 1)):
        return "free"
    if log_ratio is None or error is None or settling is None:
        return "open"
    if abs(log_ratio) > WITHIN + _SIGMAS * error:
        return "free"
    return "trapped" if settling >= SETTLED else "open"
