"""Where a run computes, in which precision, and how fast that could be."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from learnable_multipliers.pretrain.config import RuntimeConfig
from learnable_multipliers.pretrain.serialization import from_dict, to_dict

KINDS = ("cuda", "mps", "cpu")
PEAK_TFLOPS = {"H200": 790.0, "H100 80GB HBM3": 790.0}
"""What large bfloat16 matrix products reach, measured on an H200: less than the data sheet's 989.
An H100 of the SXM form has the same matrix units; the PCIe and NVL forms have fewer."""


@dataclass(frozen=True)
class Device:
    """A device and how it is used."""

    device: torch.device
    dtype: torch.dtype
    compiled: bool
    captured: bool
    """Whether forward and backward are captured as a CUDA graph."""
    name: str
    peak_tflops: float | None
    """None where it is not known: no MFU then."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context that forward passes run in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def of_rank(self, size: int) -> Device:
        """Return how one of `size` ranks uses the device.

        Several ranks reduce gradients during backward, which is then not captured.
        """
        return self if size == 1 else replace(self, captured=False)

    def synchronize(self) -> None:
        """Wait for the device, before reading a clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def peak_memory(self) -> int | None:
        """Return the most bytes ever allocated on the device; None unless it is a CUDA device."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return None


def choose_device(config: RuntimeConfig) -> Device:
    """Return the device a config asks for."""
    from_dict(RuntimeConfig, to_dict(config), "runtime")
    if config.num_threads < 0:
        raise ValueError(f"runtime.num_threads must not be negative, got {config.num_threads}")
    kind = config.device
    if kind == "auto":
        kind = "cpu"
        if torch.cuda.is_available():
            kind = "cuda"
        elif torch.backends.mps.is_available():
            kind = "mps"
    try:
        device = torch.device(kind)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"runtime.device={config.device} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    if device.type not in KINDS:
        raise ValueError(
            f"runtime.device={config.device} cannot be used: choose from {', '.join(KINDS)}"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    name = device.type
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    if config.cuda_graph == "on" and device.type != "cuda":
        raise ValueError(f"runtime.cuda_graph=on needs a CUDA device; this run is on {name}")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    known = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    return Device(
        device=device,
        dtype=getattr(torch, dtype),
        compiled=config.compile == "on" or (config.compile == "auto" and device.type == "cuda"),
        captured=device.type == "cuda" and config.cuda_graph != "off",
        name=name,
        peak_tflops=config.peak_tflops or (known if dtype == "bfloat16" else None),
    )
