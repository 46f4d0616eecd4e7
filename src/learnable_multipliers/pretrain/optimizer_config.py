"""The settings of the optimizer and its multipliers, and the checks among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from learnable_multipliers._multiplier import Scale
from learnable_multipliers._placement import Placement
from learnable_multipliers.optim._batches import Split
from learnable_multipliers.optim._group_checks import check_group_settings
from learnable_multipliers.pretrain.rules import parse_rules
from learnable_multipliers.roles import check_role

OptimizerKind = Literal["adamw", "muon"]
Variant = Literal["none", "cautious", "adamc", "hyperball", "sphere", "normuon", "muown"]
_LARGEST = 1e15
"""Upper bound of the settings: products of two must fit into float32."""
_ONLY: dict[Variant, str] = {"adamc": "adamw", "normuon": "muon", "muown": "muon"}
"""Variants of one kind of optimizer; the others are of either."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights and multipliers are trained."""

    kind: OptimizerKind = "adamw"
    """Optimizer of the hidden matrices. All other parameters and the multipliers use AdamW."""
    variant: Variant = "none"
    """Rival optimizer variant, for comparison (docs/rivals.md): cautious, hyperball, sphere (AdamW
    or Muon), adamc (AdamW only), normuon, muown (Muon only)."""
    placement: Placement = "full"
    """Multipliers of each matrix: none; row and column (full); row and column without redundant
    ones (symmetry-aware); one per matrix (scalar)."""
    rules: tuple[str, ...] = ()
    """Exceptions to the placement, each quoted: a regular expression for parameter names (. matches
    all) and fields of lrm.Rule, '. only=head kind=scalar' or 'up_proj kind=none'; the first match
    wins. @FILE reads rules from a file, one per line."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Weight decay of matrices (paper: 0.1); norms, biases and other vectors have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-8
    """Added to the square root of AdamW's second moment."""
    lr_factors: dict[str, float] = field(default_factory=dict)
    """Factors on the learning rate of matrices, by role: head 2 gate 0.5."""
    weight_decay_factors: dict[str, float] = field(default_factory=dict)
    """Factors on the weight decay of matrices, by role."""
    norm_scale: dict[str, float] = field(default_factory=dict)
    """Factors S on the equilibrium norm of matrices, by role: learning rate times S, decay over S
    (as in the paper's projector and MLP runs)."""
    max_grad_norm: float = 1.0
    """Maximum norm of the raw gradients, without those of the multipliers (paper: 1); 0 disables
    clipping."""
    clip_multipliers: bool = False
    """Include the multipliers' gradients in the clip norm (paper: better without)."""
    multiplier_lr_scale: float = 1.0
    """Learning rate of the multipliers, relative to that of the matrices."""
    multiplier_lr: float = 0.0
    """Peak learning rate of the multipliers; 0 uses lr times multiplier_lr_scale."""
    multiplier_weight_decay: float = 2e-3
    """Weight decay of multipliers (paper: 2e-3)."""
    multiplier_scale: Scale = "linear"
    """Parametrization: the multiplier itself (linear), or its logarithm (log), for which decay
    pulls towards 1."""
    multiplier_init: Literal["one", "fold"] = "fold"
    """Initial multipliers: fold replaces the model's fixed mup_* factors, one starts at 1 and keeps
    them."""
    momentum: float = 0.95
    """Momentum of Muon."""
    split: Split = "blocks"
    """Unit of Muon's orthogonalization: each projection (blocks), or each head of queries, keys and
    values (heads)."""
    adamw_lr_scale: float = 1.0
    """Learning rate of the other parameters, relative to that of the hidden matrices, with Muon or
    a variant."""

    @property
    def rest_lr_scale(self) -> float:
        """Learning rate of the other parameters, relative to that of the hidden matrices."""
        apart = self.kind == "muon" or self.variant != "none"
        return self.adamw_lr_scale if apart else 1.0

    @property
    def multiplier_ratio(self) -> float:
        """Learning rate of the multipliers, relative to that of the matrices."""
        return self.multiplier_lr / self.lr if self.multiplier_lr else self.multiplier_lr_scale

    def check(self) -> None:
        """Raise a ValueError for settings that cannot work."""
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optimizer.lr must be a positive number, got {self.lr:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum must lie in [0, 1), got {self.momentum:g}")
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value <= _LARGEST:
                raise ValueError(
                    f"optimizer.{name} must be a number from 0 to {_LARGEST:g}, got {value:g}"
                )
        try:
            self.check_group(max(1.0, self.rest_lr_scale), self.weight_decay)
        except ValueError as error:
            section = "optimizer.betas: " if str(error).startswith("beta") else "optimizer."
            raise ValueError(f"{section}{error}") from error
        self._check_variant()
        if self.split != "blocks" and (self.kind, self.variant) != ("muon", "none"):
            raise ValueError(
                f"optimizer.split={self.split} is for Muon: set optimizer.kind=muon, without "
                "a variant"
            )
        if self.adamw_lr_scale != self.rest_lr_scale:
            raise ValueError(
                f"optimizer.adamw_lr_scale={self.adamw_lr_scale:g} is for Muon and variants: "
                "AdamW trains everything at one rate; set optimizer.kind=muon, or factors by role "
                "with optimizer.lr_factors"
            )
        if self.multiplier_lr and self.multiplier_lr_scale != 1:
            raise ValueError(
                f"optimizer.multiplier_lr is {self.multiplier_lr:g} and "
                f"optimizer.multiplier_lr_scale {self.multiplier_lr_scale:g}: set the "
                "absolute or the relative learning rate of the multipliers, not both"
            )
        try:
            parse_rules(self.rules)
        except ValueError as error:
            raise ValueError(f"optimizer.rules: {error}") from error
        # A decay of 0 is none; the others would leave a matrix as it was drawn.
        _check_factors("weight_decay_factors", self.weight_decay_factors, 0.0)
        for name in ("lr_factors", "norm_scale"):
            _check_factors(name, getattr(self, name), 1 / _LARGEST)

    def check_group(self, raw_lr_scale: float, weight_decay: float) -> None:
        """Raise a ValueError for settings of a parameter group with which no weight can train."""
        settings = {
            "lr": self.lr,
            "raw_lr_scale": raw_lr_scale,
            "weight_decay": weight_decay,
            "multiplier_lr_scale": self.multiplier_ratio,
            "multiplier_weight_decay": self.multiplier_weight_decay,
        }
        try:
            check_group_settings(settings, *self.betas, self.eps)
        except ValueError as error:
            if not self.multiplier_lr:
                raise
            relative, absolute = "lr times multiplier_lr_scale and", "multiplier_lr times"
            raise ValueError(str(error).replace(relative, absolute)) from error

    def _check_variant(self) -> None:
        variant, kind = self.variant, self.kind
        if variant == "none":
            return
        if variant in _ONLY and kind != _ONLY[variant]:
            raise ValueError(
                f"optimizer.variant={variant} changes {_ONLY[variant]}, not {kind}: set "
                f"optimizer.kind={_ONLY[variant]}"
            )
        if variant == "muown" and (self.placement != "none" or self.rules):
            raise ValueError(
                "optimizer.variant=muown learns magnitudes of rows itself: set "
                "optimizer.placement=none and leave optimizer.rules out"
            )


def _check_factors(name: str, factors: Mapping[str, float], least: float) -> None:
    """Raise a ValueError for factors that no role of a matrix can have."""
    for role, factor in factors.items():
        try:
            check_role(role)
        except ValueError as error:
            raise ValueError(f"optimizer.{name}: {error}") from error
        if not least <= factor <= _LARGEST:
            raise ValueError(
                f"optimizer.{name}: {role} must have a number from {least:g} to {_LARGEST:g}, got "
                f"{factor:g}"
            )
