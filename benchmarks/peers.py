"""Other people's kernels, from folders given on the command line: nothing of theirs is kept here.

Unpack a release into a folder and name the folder. mamba-ssm's package imports compiled extensions
when it is imported; its Triton files need none of them, so that they are imported without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def add_folders(folders: Sequence[Path]) -> None:
    """Make the packages in some folders importable."""
    sys.path += [str(folder.resolve()) for folder in folders]


def mamba_scan() -> Callable[..., Tensor]:
    """Return mamba-ssm's scan of (x, dt, A, B, C, chunk_size, D=D)."""
    for entry in sys.path:
        folder = Path(entry) / "mamba_ssm"
        if (folder / "ops/triton/ssd_combined.py").is_file():
            package = ModuleType("mamba_ssm")
            package.__path__ = [str(folder)]
            sys.modules["mamba_ssm"] = package
            module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
            return module.mamba_chunk_scan_combined
    raise ImportError("no mamba_ssm in the folders of --peers")


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu of a causal convolution, (batch, length, channels), by PyTorch's own."""
    channels, taps = weight.shape
    y = F.conv1d(x.mT, weight[:, None], bias, padding=taps - 1, groups=channels)
    return F.silu(y[..., : x.shape[1]]).mT


def put_scan_into_hugging_face(scan: Callable[..., Tensor]) -> None:
    """Let transformers' Falcon-H1 call a scan where it looks for mamba-ssm's fused operator.

    The convolution is PyTorch's: causal-conv1d is a CUDA extension, which takes a compiler.
    """
    from transformers.models.falcon_h1 import modeling_falcon_h1 as theirs

    def fused(
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,  # noqa: N803
        D: Tensor,  # noqa: N803
        chunk_size: int,
        *,
        outproj_weight: Tensor,
        outproj_bias: Tensor | None,
        headdim: int,
        ngroups: int,
        rmsnorm_weight: Tensor | None,
        **others: Any,
    ) -> Tensor:
        assert rmsnorm_weight is None, "the inner norm is not written out here"
        heads = A.shape[0]
        channels = conv1d_weight.shape[0]
        z, joined, dt = zxbcdt.split([heads * headdim, channels, heads], -1)
        joined = convolve(joined, conv1d_weight.to(joined.dtype), conv1d_bias)
        state = (channels - heads * headdim) // (2 * ngroups)
        x, B, C = joined.split([heads * headdim] + [ngroups * state] * 2, -1)  # noqa: N806
        dt = F.softplus(dt.float() + dt_bias)
        y = scan(
            x.unflatten(-1, (heads, headdim)),
            dt,
            A,
            B.unflatten(-1, (ngroups, state)),
            C.unflatten(-1, (ngroups, state)),
            chunk_size,
            D=D,
        )
        return F.linear(y.flatten(-2).to(z.dtype) * F.silu(z), outproj_weight, outproj_bias)

    # Looked up by name in the module of the model.
    theirs.mamba2_split_conv1d_scan_combined = fused


def liger_loss(z_loss: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return Liger's fused head and loss of (features, head, targets), with our z-loss."""
    module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    loss = module.LigerFusedLinearCrossEntropyLoss(lse_square_scale=z_loss)
    return lambda features, head, targets: loss(head, features, targets)


def muons(matrices: list[torch.nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """Return steps of other Muons that can be imported."""
    found: dict[str, Callable[[], Any]] = {}
    for module, name, options in (
        ("muon", "SingleDeviceMuon", {}),
        ("emerging_optimizers.orthogonalized_optimizers.muon", "Muon", {}),
        ("pytorch_optimizer", "Muon", {}),
    ):
        try:
            optimizer = getattr(importlib.import_module(module), name)
        except ImportError as error:
            print(f"{module} is left out: {error}", flush=True)
            continue
        found[f"{module}.{name}"] = optimizer(matrices, lr=1e-3, **options).step
    return found
