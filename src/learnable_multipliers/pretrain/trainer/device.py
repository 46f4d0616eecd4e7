"""Device and precision of a run, and warnings about settings that make it slow.

Kernels and CUDA graphs do not support every shape; a run then falls back to PyTorch and warns
before it starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from learnable_multipliers._serialization import from_dict, to_dict
from learnable_multipliers.kernels._backend import HAS_TRITON
from learnable_multipliers.pretrain.config import RuntimeConfig, TrainConfig
from learnable_multipliers.pretrain.cores import check_threads
from learnable_multipliers.pretrain.model.attention import rotary_kernels_support
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.mamba import KERNEL_TAPS
from learnable_multipliers.pretrain.model.ssd import KERNEL_HEAD_DIMS, KERNEL_STATES
from learnable_multipliers.pretrain.trainer.schedule import Schedule

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
    """None if unknown; MFU is then not logged."""

    @property
    def precision(self) -> str:
        """The dtype in a word: bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled: the layers, or Triton's kernels."""
        return self.compiled or self.device.type == "cuda"

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context that forward passes run in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def for_world_size(self, size: int) -> Device:
        """Return how one of `size` ranks uses the device.

        Several ranks reduce gradients during backward, which is then not captured.
        """
        return self if size == 1 else replace(self, captured=False)

    def synchronize(self) -> None:
        """Wait for the device, before reading a clock."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def peak_memory(self) -> int | None:
        """Return the peak bytes allocated on a CUDA device, else None."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def choose_device(config: RuntimeConfig) -> Device:
    """Return the device a config asks for."""
    from_dict(RuntimeConfig, to_dict(config), "runtime")
    if config.num_threads < 0:
        raise ValueError(f"runtime.num_threads must not be negative, got {config.num_threads}")
    check_threads("runtime.num_threads", config.num_threads)
    kind = config.device
    if kind == "auto":
        kind = "mps" if torch.backends.mps.is_available() else "cpu"
        kind = "cuda" if torch.cuda.is_available() else kind
    try:
        device = torch.device(kind)
        if kind == "cuda" and "LOCAL_RANK" in os.environ:
            # One GPU per process of a node; a launcher may show a process only its own.
            count = max(1, torch.cuda.device_count())
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % count)
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
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
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


# -- slow paths --------------------------------------------------------------------------------


class PerformanceWarning(NamedTuple):
    """A part of a run that is slower than it could be."""

    text: str
    """The setting that causes it, and its cost."""
    advice: str
    """What to do."""

    @property
    def message(self) -> str:
        """Cause and advice in one sentence."""
        return f"{self.text}; {self.advice}"


def performance_warnings(config: TrainConfig, device: Device) -> list[PerformanceWarning]:
    """Return the warnings for a run; only CUDA devices have faster paths."""
    if device.device.type != "cuda":
        return []
    return [*_without_kernels(config.model), *_without_graphs(config, device)]


def _without_kernels(model: ModelConfig) -> Iterator[PerformanceWarning]:
    if not HAS_TRITON:
        yield PerformanceWarning(
            "the package triton is not installed: PyTorch computes the optimizer's step, the scan, "
            "the convolution and the rotary positions, several times slower",
            "pip install triton",
        )
        return
    served = {"ssm_head_dim": KERNEL_HEAD_DIMS, "ssm_state_size": KERNEL_STATES}
    for name, sizes in served.items() if model.has_ssm else ():
        if getattr(model, name) not in sizes:
            yield PerformanceWarning(
                f"model.{name} is {getattr(model, name)}, which the kernels of the scan do not "
                "support: falls back to PyTorch, 2.5 to 3.3 times slower and with much more memory",
                f"choose one of {', '.join(map(str, sizes))} if the shape is yours to choose",
            )
    if model.has_ssm and model.ssm_conv_size != KERNEL_TAPS:
        yield PerformanceWarning(
            f"model.ssm_conv_size is {model.ssm_conv_size}, which the kernels of the convolution "
            "do not support: falls back to PyTorch, slower and with more memory",
            f"choose {KERNEL_TAPS} if the shape is yours to choose",
        )
    if model.has_attention and not rotary_kernels_support(model.head_dim):
        yield PerformanceWarning(
            f"model.head_dim is {model.head_dim}, which the rotary kernels do not support: "
            "falls back to PyTorch, which is slower",
            "choose a power of two of at least 16 if the shape is yours to choose",
        )


def _without_graphs(config: TrainConfig, device: Device) -> Iterator[PerformanceWarning]:
    if not device.captured:
        if config.runtime.cuda_graph == "on":
            yield PerformanceWarning(
                "runtime.cuda_graph=on has no effect: ranks exchange gradients during the backward "
                "pass, which is then not captured as a CUDA graph",
                "set it to auto",
            )
        return
    micro = config.data.micro_batch_sequences
    uneven = [n for n in Schedule.of_run(config).batch_sizes if micro and n % min(micro, n)]
    if uneven:
        yield PerformanceWarning(
            f"data.micro_batch_sequences={micro} does not divide batches of "
            f"{', '.join(map(str, uneven))} sequences: their passes are not captured as CUDA "
            "graphs, and the GPU waits for Python",
            "choose a number that divides them",
        )
