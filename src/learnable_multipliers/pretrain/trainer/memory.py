"""Peak memory of each rank of a run, from shapes.

Weights, gradients and optimizer state are counted parameter by parameter. Activations are counted
by formula: what autograd keeps of each layer and of the head, per token. Estimates were within 8%
of the peaks on an H200, compiled and not; one of a 20M model with 2,048 tokens was 15% too high
(`tests/test_memory.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from learnable_multipliers._formats import size
from learnable_multipliers._multiplier import initial_values
from learnable_multipliers._plan import Plan
from learnable_multipliers.kernels._backend import HAS_TRITON
from learnable_multipliers.optim._muon import is_hidden
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.loss import CHUNK_BYTES
from learnable_multipliers.pretrain.model.parallelize import rank_shape
from learnable_multipliers.pretrain.model.ssd import KERNEL_HEAD_DIMS, KERNEL_STATES
from learnable_multipliers.pretrain.trainer.build import make_plan, store_matrices_
from learnable_multipliers.pretrain.trainer.device import Device

# Weights, raw weights, multipliers, all moments and the residual stream are float32.
_FLOAT = 4
_SINGLE_PROCESS = Axes()
_LIBRARIES = 64 * 2**20
"""What cuBLAS allocates for itself on a CUDA device."""
_ACTIVATIONS = "activations of a micro-batch"
_ERROR = 0.25
"""Relative error of estimates: a run is rejected only if it exceeds the memory by more."""
_MEMINFO = Path("/proc/meminfo")
MEMORY_ADVICE = (
    "give --data.micro-batch-sequences a smaller number or set --runtime.recompute layers"
)
"""Advice for a run that needs too much memory."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one rank."""

    rows: dict[str, int]
    """Bytes by what they hold."""
    accumulates: bool
    """Whether a step has several micro-batches, whose gradients add up."""

    @property
    def peak(self) -> int:
        """The most bytes held at a time.

        The gradients of a step with one micro-batch are written while its activations are freed,
        so the larger of the two counts.
        """
        overlap = 0 if self.accumulates else min(self.rows["gradients"], self.rows[_ACTIVATIONS])
        return sum(self.rows.values()) - overlap


def estimate(config: TrainConfig, device: Device, axes: Axes = _SINGLE_PROCESS) -> MemoryEstimate:
    """Return the estimate of a run's memory on each rank."""
    length = config.data.sequence_length
    # A chunk is no longer than the sequence.
    shape = replace(config.model, ssm_chunk_size=min(config.model.ssm_chunk_size, length))
    with torch.device("meta"):
        plan = make_plan(HybridLM(shape), config.optimizer)
        # Factors folded into multipliers are not in the forward pass.
        shape = replace(shape, **{name: 1.0 for name, _ in plan.folds})
        sharded = replace(config, model=rank_shape(shape, axes.tensor))
        model = HybridLM(sharded.model)
        store_matrices_(model, config)
    rows = state_bytes(sharded, model, plan, axes.shard)
    rows |= _communication(model, axes)
    sequences = micro_batch(config, axes.dp_degree)
    in_chunks = axes.tensor == 1 and _has_kernels(device)
    tokens = sequences * config.data.sequence_length
    loss = 0
    if in_chunks:
        loss = _head_bytes(sharded.model, tokens, device)
    elif not device.compiled:
        # The backward pass of the loss computes several tensors of their size in float32.
        loss = 4 * _FLOAT * tokens * sharded.model.vocab_size
    if config.runtime.recompute == "layers":
        activation_size = recomputed_bytes(sharded.model, tokens, device, loss, in_chunks=in_chunks)
        rows[_ACTIVATIONS] = activation_size
    else:
        activation_size = activation_bytes(sharded.model, tokens, device, in_chunks=in_chunks)
        # Freed before most gradients are there, like the rest of the activations.
        rows[_ACTIVATIONS] = activation_size + (loss if in_chunks else 0)
        if loss and not in_chunks:
            rows["gradients of the logits"] = loss
    if device.device.type == "cuda":
        rows["workspace of CUDA libraries"] = _LIBRARIES
    return MemoryEstimate(rows, sequences * axes.dp_degree < config.data.batch_sequences)


def check_fits(config: TrainConfig, device: Device, axes: Axes = _SINGLE_PROCESS) -> None:
    """Raise a ValueError for a run that the device cannot hold, before anything is built."""
    short = memory_warning(estimate(config, device, axes), device)
    if short is not None:
        raise ValueError(f"{short}; --dry-run shows what takes how much")


def memory_warning(estimated: MemoryEstimate, device: Device) -> str | None:
    """Return a warning if the device cannot hold a run, else None."""
    total = total_memory(device.device)
    if total is None or estimated.peak <= total * (1 + _ERROR):
        return None
    return (
        f"this run needs about {size(estimated.peak)} of memory (estimated from shapes), and "
        f"{device.name} has {size(total)}: {MEMORY_ADVICE}, or choose a smaller model"
    )


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of a device, for a CPU with swap; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return system_memory("MemTotal", "SwapTotal") if device.type == "cpu" else None


def system_memory(*names: str) -> int | None:
    """Return the sum of some fields of /proc/meminfo in bytes; None on other systems."""
    if not _MEMINFO.is_file():
        return None
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in names)


def state_bytes(
    config: TrainConfig, model: HybridLM, plan: Plan, shards: int = 1
) -> dict[str, int]:
    """Return the bytes of everything that lasts from step to step, and of the gradients.

    Args:
        shards: Ranks that every parameter is sharded over, along its first dimension.
    """
    matrices = {entry.name: entry.matrix for entry in plan.entries}
    kinds = ("weights", "gradients", "raw weights", "moments", "multipliers and their moments")
    sizes: dict[str, int] = dict.fromkeys(kinds, 0)
    for name, parameter in model.named_parameters():
        number = _largest_shard(parameter, shards)
        each = _FLOAT * number
        sizes["weights"] += parameter.element_size() * number
        if not parameter.requires_grad:
            continue
        matrix = matrices[name]
        grad_dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        sizes["gradients"] += grad_dtype.itemsize * number
        # Muon keeps one moment of a hidden matrix and an average over it, AdamW two moments; both
        # count steps.
        one = config.optimizer.kind == "muon" and is_hidden(matrix)
        sizes["moments"] += each + 2 * _FLOAT if one else 2 * each + _FLOAT
        if parameter.dtype != torch.float32 or (matrix is not None and matrix.carries):
            sizes["raw weights"] += each
        if matrix is not None and matrix.carries:
            # Shapes only: the machine may not have the memory.
            with torch.device("meta"):
                carried = sum(value.numel() for value in initial_values(matrix).values())
            # Counted as replicated: column multipliers are, and all of them are small.
            sizes["multipliers and their moments"] += 3 * _FLOAT * carried
    return sizes


def activation_bytes(
    model: ModelConfig, num_tokens: int, device: Device, *, in_chunks: bool = False
) -> int:
    """Return the bytes that autograd keeps of one micro-batch.

    Args:
        in_chunks: Kernels compute the loss, and keep no logits.
    """
    saved = _SavedActivations(model, device, in_chunks)
    per_token = model.num_layers * saved.layer() + saved.head()
    weights = model.num_layers * saved.layer_weights() + saved.head_weight()
    return num_tokens * per_token + weights


def recomputed_bytes(
    model: ModelConfig, num_tokens: int, device: Device, loss: int, *, in_chunks: bool
) -> int:
    """Return the most bytes held of one micro-batch whose layers are computed again.

    All inputs of layers, and either what the head keeps, in the forward pass, or what one layer
    keeps, in the backward pass, and a fifth of it for the gradients of its activations.

    Args:
        loss: Bytes that the loss takes beside what the head keeps.
        in_chunks: Kernels compute the loss, and keep no logits.
    """
    saved = _SavedActivations(model, device, in_chunks)
    inputs = num_tokens * _FLOAT * model.num_layers * model.hidden_size
    layer = num_tokens * saved.layer() + saved.layer_weights()
    head = num_tokens * saved.head() + saved.head_weight() + loss
    return inputs + max(layer + layer // 5, head)


class _SavedActivations:
    """Activations that autograd saves, in bytes per token; compiled layers recompute cheap ones."""

    def __init__(self, model: ModelConfig, device: Device, in_chunks: bool):
        self.model, self.eager = model, not device.compiled
        self.in_chunks, self.has_kernels = in_chunks, _has_kernels(device)
        self.width = device.dtype.itemsize
        self.casts = self.width < _FLOAT
        self.cuda = device.device.type == "cuda"
        is_served = model.ssm_head_dim in KERNEL_HEAD_DIMS and model.ssm_state_size in KERNEL_STATES
        self.kernels = self.has_kernels and is_served
        self.heads = model.num_heads * model.head_dim
        self.kv_heads = model.num_kv_heads * model.head_dim if model.has_attention else 0

    def layer(self) -> int:
        """Return what one layer keeps."""
        model, width = self.model, self.width
        return (
            self._norm()
            + (self._norm() + width * self._mlp() if model.has_mlp else 0)
            + (width * self._attention() if model.has_attention else 0)
            + (width * self._ssm() if model.has_ssm else 0)
            # The input of a joined output product.
            + (width * (model.ssm_size + self.heads) if model.has_ssm else 0)
        )

    def head(self) -> int:
        """Return what embedding, last norm, logits and loss keep."""
        model = self.model
        residual = (2 * _FLOAT + self.width) * model.hidden_size
        if self.in_chunks:
            # The gradient of the features.
            return residual + (_FLOAT + self.width) * model.hidden_size
        if not self.eager:
            return residual + self.width * model.vocab_size
        # float32 logits and the mask of the targets.
        return residual + (_FLOAT + 1) * model.vocab_size

    def layer_weights(self) -> int:
        """Return the bytes of a layer's weights in the precision of products, and joined ones."""
        model = self.model
        inputs = self.heads + 2 * self.kv_heads
        inputs += sum(model.ssm_block_sizes) if model.has_ssm else 0
        outputs = self.heads + model.ssm_size
        joined = 2 * model.intermediate_size
        if self.casts or model.has_attention:
            joined += inputs
        if self.casts or (model.has_attention and model.has_ssm):
            joined += outputs
        if self.casts:
            joined += model.intermediate_size
        return self.width * model.hidden_size * joined

    def head_weight(self) -> int:
        """Return the bytes of the head's weight in the precision of products."""
        model = self.model
        return self.width * model.hidden_size * model.vocab_size if self.casts else 0

    def _norm(self) -> int:
        """Return what a norm keeps: its input and output, on a CPU also what is between.

        Compiled, the residual stream in front of the MLP is added up again from the mixers' output.
        """
        size = self.model.hidden_size
        if self.eager:
            return ((1 if self.cuda else 2) * _FLOAT + self.width) * size
        return (_FLOAT // 2 + 3 * self.width // 2) * size

    def _attention(self) -> int:
        """Return the numbers of queries, keys, values and outputs."""
        kept = 2 * self.heads + 2 * self.kv_heads
        if not self.kernels and not self.model.has_ssm:
            # Values are a view of the joined projection, which stays whole.
            kept += self.heads + self.kv_heads
        return kept

    def _mlp(self) -> int:
        """Return the numbers of gate, up and their product; without a compiler of silu(gate)."""
        if self.has_kernels:
            return 3 * self.model.intermediate_size
        scaled = self.model.mup_gate != 1.0
        return (3 + self.eager + scaled) * self.model.intermediate_size

    def _ssm(self) -> int:
        """Return the numbers of the joined input projection, the convolution and the scan."""
        model = self.model
        size, _, states, _, num_heads = model.ssm_block_sizes
        projected = sum(model.ssm_block_sizes) + self.heads + 2 * self.kv_heads
        chunk = model.ssm_chunk_size
        chunk_states = size * model.ssm_state_size // chunk
        kept = projected + 2 * states + chunk_states
        if self.kernels:
            return kept + 2 * size
        # The scan in PyTorch keeps decays between all pairs of steps in a chunk, two of them in
        # float32 without a compiler.
        tables = (2 * _FLOAT // self.width if self.eager else 0) + 1
        tables = tables * num_heads * chunk + model.ssm_groups * chunk
        return kept + (6 + self.eager) * size + tables + chunk_states + 2 * states


def _has_kernels(device: Device) -> bool:
    return device.device.type == "cuda" and HAS_TRITON


def _head_bytes(model: ModelConfig, num_tokens: int, device: Device) -> int:
    """Return what the loss holds while it computes logits a chunk at a time."""
    logits = num_tokens * model.vocab_size * device.dtype.itemsize
    gradient = (_FLOAT + device.dtype.itemsize) * model.vocab_size * model.hidden_size
    return min(logits, CHUNK_BYTES) + gradient


def micro_batch(config: TrainConfig, dp_degree: int) -> int:
    """Return the sequences that a rank has in one pass, at most."""
    share = max(1, config.data.batch_sequences // dp_degree)
    return min(config.data.micro_batch_sequences or share, share)


def _largest_shard(parameter: Tensor, shards: int) -> int:
    first, *rest = parameter.shape
    return math.ceil(first / shards) * math.prod(rest)


def _communication(model: HybridLM, axes: Axes) -> dict[str, int]:
    """Return the bytes of what ranks gather and send, beside what they keep."""
    if axes.dp_degree == 1:
        return {}
    if axes.shard == axes.tensor == 1:
        # DistributedDataParallel copies gradients into buckets.
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {"gradient buckets": _FLOAT * trained}
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    outside = model.num_parameters - layer * len(model.model.layers)
    # FSDP2 gathers a layer while it computes another; embedding, last norm and head stay gathered
    # from the start of a pass to its end.
    return {
        "gathered weights": _FLOAT * (outside + 2 * layer),
        "gradient buckets": _FLOAT * max(outside, layer),
    }
