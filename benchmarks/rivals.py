"""Our rivals against the public code of the papers, step by step on the same gradients.

    python benchmarks/rivals.py --emerging-optimizers DIR --dion DIR --pytorch-optimizer DIR \
        --megatron DIR --out results/rivals.json

A DIR holds the package of the public repository (`emerging_optimizers/`, `dion/`,
`pytorch_optimizer/`, `megatron/` of the branch feat/md-decoupling-optimizer); those that are not
given are left out. Orthogonalization is ours on both sides: coefficients differ between releases,
and the rule around it is what is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import learnable_multipliers as lrm
from learnable_multipliers.optim._batches import lr_factor
from learnable_multipliers.pretrain.rivals.adamc import AdamC
from learnable_multipliers.pretrain.rivals.cautious import Cautious
from learnable_multipliers.pretrain.rivals.hyperball import Hyperball
from learnable_multipliers.pretrain.rivals.muown import Muown
from learnable_multipliers.pretrain.rivals.normuon import NorMuon
from learnable_multipliers.pretrain.rivals.rival import orthogonalized
from learnable_multipliers.pretrain.rivals.sphere import Sphere

STEPS = 5
SHAPE = (40, 24)
"""Tall: for a wide matrix NorMuon of Emerging-Optimizers averages over columns, not rows."""
LR, DECAY, BETAS = 0.02, 0.3, (0.9, 0.95)


def main() -> None:
    """Print and write the difference of every rival from its public code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("emerging-optimizers", "dion", "pytorch-optimizer", "megatron"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not hasattr(typing, "override"):
        # Public code for Python 3.12 and later.
        typing.override = lambda method: method  # pyright: ignore
    pairs: dict[str, tuple[Any, Any]] = {}
    if options.emerging_optimizers:
        sys.path.insert(0, str(options.emerging_optimizers))
        pairs |= emerging_optimizers()
    if options.dion:
        sys.path.insert(0, str(options.dion))
        pairs |= dion()
    if options.pytorch_optimizer:
        sys.path.insert(0, str(options.pytorch_optimizer))
        pairs |= pytorch_optimizer()
    if options.megatron:
        sys.path.insert(0, str(options.megatron))
        pairs |= megatron()
    rows = {name: difference(*pair) for name, pair in pairs.items()}
    for name, found in rows.items():
        print(f"{name:55} {found:.1e}")
    if options.out:
        found = {"steps": STEPS, "torch": torch.__version__, "difference": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of two weights after some steps, over how far they moved."""
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.1
    moved = [trained(make, start) for make in (ours, theirs)]
    return ((moved[0] - moved[1]).abs().max() / (moved[0] - start).abs().max()).item()


def trained(make: Callable[[nn.Module], Any], start: Tensor) -> Tensor:
    """Return a weight after some steps on random gradients, with a rate that falls."""
    model = nn.Linear(*reversed(SHAPE), bias=False)
    model.weight.data.copy_(start)
    optimizer = make(model)
    draws = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + step)
        model.weight.grad = torch.randn(SHAPE, generator=draws)
        optimizer.step()
    return model.weight.detach().clone()


def ours(kind: type, base: str, **settings: Any) -> Callable[[nn.Module], Any]:
    """Return how one of our rivals is made for a model of one hidden matrix."""

    def make(model: nn.Module) -> Any:
        group = {"params": [*model.parameters()], "role": "hidden", "weight_decay": DECAY}
        return kind([group], kind=base, lr=LR, betas=BETAS, **settings)

    return make


def orthogonal(matrix: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the orthogonalized matrix, in place of theirs."""
    return orthogonalized(matrix[None])[0] if matrix.ndim == 2 else orthogonalized(matrix)


def emerging_optimizers() -> dict[str, tuple[Any, Any]]:
    """Return Muown, hyperball and NorMuon."""
    from emerging_optimizers.contrib.muown import Muown as Theirs
    from emerging_optimizers.orthogonalized_optimizers import muon_utils
    from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import AdaptiveMuon
    from emerging_optimizers.orthogonalized_optimizers.muon_hyperball import MuonHyperball

    muon_utils.newton_schulz = orthogonal
    factor = lr_factor("match_rms_adamw", *SHAPE)
    scaled = {"scale_mode": "spectral", "extra_scale_factor": factor / max(SHAPE) ** 0.5}

    def muown(model: nn.Module) -> Any:
        return Theirs([model.weight], LR, 0.95, DECAY, betas=BETAS, **scaled)

    def hyperball(model: nn.Module) -> Any:
        radius = model.weight.norm().item()
        settings = {"nesterov": True, "hyperball_radius": radius}
        return MuonHyperball([model.weight], LR, 0.95, 0.0, **settings, **scaled)

    def normuon(model: nn.Module) -> Any:
        settings = {"nesterov": True, "moment2_method": "normuon"}
        return AdaptiveMuon([model.weight], LR, 0.95, DECAY, **settings, **scaled)

    return {
        "Muown, Emerging-Optimizers": (ours(Muown, "muon"), muown),
        "Muon on a hyperball, Emerging-Optimizers": (ours(Hyperball, "muon"), hyperball),
        "NorMuon, Emerging-Optimizers": (ours(NorMuon, "muon"), normuon),
    }


def dion() -> dict[str, tuple[Any, Any]]:
    """Return NorMuon, and cautious decay of Muon and AdamW."""
    from dion import Muon as TheirMuon
    from dion import NorMuon as TheirNorMuon
    from dion import muon as muon_module
    from dion import normuon as normuon_module

    # They round the momentum to bfloat16, which would hide smaller differences.
    averaged = muon_module.muon_update_pre_orthogonalize._torchdynamo_orig_callable
    exact = FunctionType(averaged.__code__, {**averaged.__globals__, "torch": WithoutBfloat16()})
    for module in (muon_module, normuon_module):
        module.muon_update_pre_orthogonalize = exact
    # Their "rms_norm" is a rate times 0.2 sqrt(max(rows, columns)).
    settings = {"mu": 0.95, "betas": BETAS, "weight_decay": DECAY, "nesterov": True}
    settings |= {"adjust_lr": "rms_norm", "newton_schulz_func": orthogonal}

    def normuon(model: nn.Module) -> Any:
        return TheirNorMuon([model.weight], lr=LR, **settings)

    def cautious_muon(model: nn.Module) -> Any:
        return TheirMuon([model.weight], lr=LR, cautious_wd=True, **settings)

    def cautious_adamw(model: nn.Module) -> Any:
        group = {"params": [model.weight], "algorithm": "adamw"}
        return TheirMuon([group], lr=LR, cautious_wd=True, **settings)

    return {
        "NorMuon, dion": (ours(NorMuon, "muon"), normuon),
        "cautious Muon, dion": (ours(Cautious, "muon"), cautious_muon),
        "cautious AdamW, dion": (ours(Cautious, "adamw"), cautious_adamw),
    }


class WithoutBfloat16:
    """torch, with float32 for bfloat16."""

    def __getattr__(self, name: str) -> Any:
        return torch.float32 if name == "bfloat16" else getattr(torch, name)


def pytorch_optimizer() -> dict[str, tuple[Any, Any]]:
    """Return AdamC."""
    from pytorch_optimizer.optimizer.adamc import AdamC as Theirs

    def adamc(model: nn.Module) -> Any:
        group = {"params": [model.weight], "normalized": True}
        return Theirs([group], lr=LR, betas=BETAS, weight_decay=DECAY)

    return {"AdamC, pytorch_optimizer": (ours(AdamC, "adamw"), adamc)}


def megatron() -> dict[str, tuple[Any, Any]]:
    """Return magnitude-direction decoupling, of AdamW and of Muon."""
    from megatron.core.optimizer import md_decoupling

    def theirs(use_orthogonal: bool) -> Callable[[nn.Module], Any]:
        def make(model: nn.Module) -> Any:
            optimizer = md_decoupling.MDDecoupling(
                [model.weight],
                lr=LR,
                betas=BETAS,
                hypersphere_mode="flat",
                hypersphere_gains_mode="rowcol",
                gains_betas=BETAS,
                use_orthogonal_updates=use_orthogonal,
                pg_collection=SimpleNamespace(tp=None, expt_tp=None),
            )
            factor = lr_factor("match_rms_adamw", *SHAPE)
            optimizer._orthogonalize_tensor = lambda grad, *_: orthogonal(grad) * factor
            return optimizer

        return make

    def decoupled(base: str) -> Callable[[nn.Module], Any]:
        def make(model: nn.Module) -> Any:
            # Theirs moves weights onto a sphere of this radius when it is made.
            radius = max(SHAPE) ** 0.5
            model.weight.data.mul_(radius / model.weight.data.norm())
            plan = lrm.plan(model, "full")
            return lrm.LearnableMultipliers(
                ours(Sphere, base)(model),
                model,
                plan,
                multiplier_lr_scale=1.0,
                multiplier_weight_decay=0.0,
            )

        return make

    class Utilities:
        """Stands for a package that Muon asks for the precision of products."""

        utils = SimpleNamespace(fp32_matmul_precision=lambda _: torch.no_grad())

    md_decoupling.emerging_optimizers = Utilities
    return {
        "magnitude-direction AdamW, Megatron branch": (decoupled("adamw"), theirs(False)),
        "magnitude-direction Muon, Megatron branch": (decoupled("muon"), theirs(True)),
    }


if __name__ == "__main__":
    main()
