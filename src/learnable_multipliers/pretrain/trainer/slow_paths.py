"""Settings that make a run on a GPU slower than it could be, and what to do about them.

Kernels and CUDA graphs do not serve every shape; PyTorch then does the work, slower. Runs warn
about that before they start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from learnable_multipliers.kernels._backend import HAS_TRITON
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.attention import kernels_take
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.mamba import KERNEL_TAPS
from learnable_multipliers.pretrain.model.ssd import KERNEL_SIZES
from learnable_multipliers.pretrain.trainer.device import Device
from learnable_multipliers.pretrain.trainer.schedule import steps


class SlowPath(NamedTuple):
    """A part of a run that no kernel or CUDA graph serves."""

    text: str
    """Which setting is the cause, and what it costs."""
    advice: str
    """What to do."""

    @property
    def in_words(self) -> str:
        """Cause and advice in one sentence."""
        return f"{self.text}; {self.advice}"


def slow_paths(config: TrainConfig, device: Device) -> list[SlowPath]:
    """Return all slow paths of a run; other devices than CUDA's have only one path."""
    if device.device.type != "cuda":
        return []
    return [*_without_kernels(config.model), *_without_graphs(config, device)]


def _without_kernels(model: ModelConfig) -> Iterator[SlowPath]:
    if not HAS_TRITON:
        yield SlowPath(
            "the package triton is not installed: PyTorch computes the optimizer's step, the scan, "
            "the convolution and the rotary positions, several times slower",
            "pip install triton",
        )
        return
    sizes = ", ".join(map(str, KERNEL_SIZES))
    for name in ("ssm_head_dim", "ssm_state_size") if model.has_ssm else ():
        if getattr(model, name) not in KERNEL_SIZES:
            yield SlowPath(
                f"model.{name} is {getattr(model, name)}, which the kernels of the scan do not "
                "take: PyTorch scans, 2.5 to 3.3 times slower and with much more memory",
                f"choose one of {sizes} if the shape is yours to choose",
            )
    if model.has_ssm and model.ssm_conv_size != KERNEL_TAPS:
        yield SlowPath(
            f"model.ssm_conv_size is {model.ssm_conv_size}, which the kernels of the convolution "
            "do not take: PyTorch convolves, slower and with more memory",
            f"choose {KERNEL_TAPS} if the shape is yours to choose",
        )
    if model.has_attention and not kernels_take(model.head_dim):
        yield SlowPath(
            f"model.head_dim is {model.head_dim}, which the kernels of the rotary positions do not "
            "take: PyTorch turns queries and keys, slower",
            "choose a power of two of at least 16 if the shape is yours to choose",
        )


def _without_graphs(config: TrainConfig, device: Device) -> Iterator[SlowPath]:
    if not device.captured:
        if config.runtime.cuda_graph == "on":
            yield SlowPath(
                "runtime.cuda_graph=on has no effect: ranks exchange gradients in the middle of a "
                "pass, and it is not captured as a CUDA graph",
                "set it to auto",
            )
        return
    data = config.data
    micro = data.micro_batch_sequences
    planned = steps(config.schedule, data.batch_sequences, data.sequence_length)
    batches = sorted({step.sequences for step in planned})
    uneven = [n for n in batches if micro and n % min(micro, n)]
    if uneven:
        yield SlowPath(
            f"data.micro_batch_sequences={micro} does not divide batches of "
            f"{', '.join(map(str, uneven))} sequences: their passes are not captured as CUDA "
            "graphs, and the GPU waits for Python",
            "choose a number that divides them",
        )
