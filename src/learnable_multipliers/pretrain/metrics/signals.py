"""Sizes of activations and of rows of weights, layer by layer: a record of kind `signals`.

All sizes are rms, the paper's norm. Activations come from one forward pass over held-out tokens,
the same at every measurement. Numbers stay on the device until all are there: one transfer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._plan import Plan
from learnable_multipliers.equilibrium._prediction import trained_tensors
from learnable_multipliers.optim._accessors import raw_weights
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.pretrain.config import DataConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, Layer
from learnable_multipliers.pretrain.model.trace import INPUTS, trace

MAX_SEQUENCES, MAX_TOKENS = 8, 16384
"""Size of the held-out text that activations are measured on."""
NUM_QUANTILES = 21
_COUNTED_TOKENS = 1 << 24
"""Training tokens that are counted for the frequencies of the embedding's rows."""
_DIGITS = 6
"""Significant digits in a record."""


class Signals:
    """Measures the signals of a run, at any step on the same tokens.

    Args:
        tokens: What the forward pass reads, (sequences, length).
        occurrences: How often each token occurs in a step, on average, (vocab_size,).
    """

    def __init__(
        self,
        model: HybridLM,
        optimizer: MultiplierOptimizer,
        plan: Plan,
        tokens: Tensor,
        occurrences: Tensor,
    ):
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._tokens = tokens
        middles, members = decades(occurrences)
        # Fraction of steps in which a token occurs, if occurrences are independent.
        shares = members * -torch.expm1(-occurrences.double())
        self._bands = {
            "occurrences": middles,
            "share": (shares.sum(1) / members.sum(1)).tolist(),
            "count": members.sum(1).tolist(),
        }
        self._members = members.to(tokens.device)

    @classmethod
    def of_run(
        cls,
        model: HybridLM,
        optimizer: MultiplierOptimizer,
        plan: Plan,
        data: TrainingData,
        config: DataConfig,
        device: torch.device,
    ) -> Signals:
        """Measure on the first held-out sequences, and count tokens in the training text."""
        length = config.sequence_length
        count = min(MAX_SEQUENCES, max(1, MAX_TOKENS // length))
        held_out = next(data.held_out(count, count * length, device))
        counts = data.token_counts(model.config.vocab_size, _COUNTED_TOKENS)
        occurrences = counts.double() / counts.sum() * config.batch_sequences * length
        return cls(model, optimizer, plan, held_out[:, :-1][:, :MAX_TOKENS], occurrences)

    @torch.no_grad()
    def measure(self, autocast: AbstractContextManager[object] | None = None) -> dict[str, Any]:
        """Return the record for the current weights, with the forward pass in `autocast`."""
        model, plan = self._model, self._plan
        with autocast or nullcontext():
            sizes, common = read_activations(model, self._tokens)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        effective = rows_by_role(plan, weights)
        raw = rows_by_role(plan, weights | raw_weights(self._optimizer))
        embedding = "embedding" if "embedding" in raw else "tied-embedding"
        on_device = {
            "activations": activations(sizes, model.config),
            "common_direction": common,
            "alignment": alignments(sizes, effective, plan),
            "gradients": gradients(self._optimizer),
            "parameters": parameters(model),
            "rows": {
                role: {
                    "raw": row_statistics(raw[role]),
                    "effective": row_statistics(effective[role]),
                }
                for role in raw
            },
            "token_rows": {
                "raw": band_rms(raw[embedding][0], self._members),
                "effective": band_rms(effective[embedding][0], self._members),
            },
        }
        record = to_host(on_device)
        record["token_rows"] |= self._bands
        return record


# -- activations -------------------------------------------------------------------------------


def read_activations(model: HybridLM, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the rms of each activation of `trace` by layer, and the fraction of common
    direction."""
    sizes: dict[str, list[Tensor]] = {}
    common = []
    for name, value in trace(model, tokens):
        sizes.setdefault(name, []).append(rms(value))
        if name == "residual":
            common.append(common_direction(value))
    stacked = {name: torch.stack(values) for name, values in sizes.items()}
    # All sequences have the same length.
    stacked["head"] = stacked["head"].square().mean(0, keepdim=True).sqrt()
    return stacked, torch.stack(common)


def activations(sizes: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the recorded sizes, including the fixed factors."""
    recorded = {
        "embedding": sizes["residual"][0],
        "logits": abs(config.mup_head) * sizes["head"][0],
        "residual": sizes["residual"],
    }
    if config.has_attention:
        key_factor = config.mup_attention_in**2 * abs(config.mup_key)
        # mup_attention_out is applied before the projection.
        recorded["attention_out"] = sizes["attention-out"]
        recorded["query_key"] = key_factor * sizes["query"] * sizes["key"]
    if config.has_ssm:
        recorded["ssm_out"] = sizes["ssm-out"]
        recorded["dt"] = abs(config.mup_ssm_in * config.mup_dt) * sizes["ssm-dt"]
    if config.has_mlp:
        recorded["mlp_out"] = abs(config.mup_down) * sizes["down"]
        recorded["gate"] = abs(config.mup_gate) * sizes["gate"]
    return recorded


def alignments(
    sizes: Mapping[str, Tensor], effective: Mapping[str, Tensor], plan: Plan
) -> dict[str, Tensor]:
    """Return |W x| / (d_in |W| |x|) by role and layer: 1 where all rows point along x.

    It is 1 / sqrt(d_in) for a random matrix.

    Args:
        effective: `rows_by_role` of the effective weights.
    """
    num_in = {
        block.role: entry.matrix.num_in
        for entry in plan.entries
        if entry.matrix is not None
        for block in entry.matrix.blocks
    }
    ratios = {}
    for role, source in INPUTS.items():
        if role in sizes:
            matrix = role if role in effective else "tied-embedding"
            weight = effective[matrix].square().mean(1).sqrt()
            ratios[role] = sizes[role] / (num_in[matrix] * weight * sizes[source])
    return ratios


def rms(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the root of the mean square, over all or over one dim, in float32 or wider."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    count = values.numel() if dim is None else values.shape[dim]
    return torch.linalg.vector_norm(values, dim=dim, dtype=dtype) / math.sqrt(count)


def common_direction(x: Tensor) -> Tensor:
    """Return |mean_t x_t|^2 / mean_t |x_t|^2: the share of x that is the same at all positions.

    x is (sequences, length, features); 1 for a constant, 1 / positions for independent noise.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (rms(x.mean((0, 1), dtype=dtype)) / rms(x)).square()


# -- weights -----------------------------------------------------------------------------------


def rows_by_role(plan: Plan, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rms of each row of each matrix, (layers, rows) by role."""
    by_role: dict[str, list[Tensor]] = {}
    for entry in plan.entries:
        if entry.matrix is None:
            continue
        blocks = entry.matrix.blocks
        parts = rms(weights[entry.name], dim=1).split([block.size for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            by_role.setdefault(block.role, []).append(part)
    return {role: torch.stack(rows) for role, rows in by_role.items()}


def gradients(optimizer: MultiplierOptimizer) -> dict[str, Tensor]:
    """Return the rms of the gradients of raw weights by role and layer, averaged as AdamW does.

    Muon keeps one average of a whole matrix.
    """
    by_role: dict[str, list[Tensor]] = {}
    for tensor in trained_tensors(optimizer):
        if tensor.part != "weight" or tensor.matrix is None or tensor.second is None:
            continue
        square = tensor.second.detach() / (1 - tensor.betas[1] ** max(1, tensor.steps))
        blocks = tensor.matrix.blocks
        rows = square.expand(tensor.value.shape).mean(1).split([block.size for block in blocks])
        for block, part in zip(blocks, rows, strict=True):
            by_role.setdefault(block.role, []).append(part.mean().sqrt())
    return {role: torch.stack(values) for role, values in by_role.items()}


def row_statistics(rows: Tensor) -> dict[str, Tensor]:
    """Return mean and spread of row norms by layer, and their quantiles over all layers.

    `log_std` is the standard deviation of the logarithm; the quantiles, `pooled`, are of each norm
    over the mean of its layer.
    """
    mean = rows.mean(1)
    at = torch.linspace(0, 1, NUM_QUANTILES, dtype=rows.dtype, device=rows.device)
    return {
        "mean": mean,
        "log_std": rows.log().std(1, correction=0),
        "pooled": torch.quantile((rows / mean[:, None]).flatten(), at),
    }


def decades(values: Tensor) -> tuple[list[float], Tensor]:
    """Return the decades of some numbers: the geometric middle of each, and which are in it.

    A decade is 10^d < number <= 10^(d+1); (decades, numbers). A zero is in none.
    """
    exponents = torch.ceil(values.double().log10()) - 1
    present = exponents[exponents.isfinite()].unique()
    return [10.0 ** (d + 0.5) for d in present.tolist()], exponents == present[:, None]


def band_rms(rows: Tensor, members: Tensor) -> Tensor:
    """Return the rms over the rows in each band; `members` is (bands, rows)."""
    return ((members * rows.square()).sum(1) / members.sum(1)).sqrt()


def parameters(model: HybridLM) -> dict[str, Tensor]:
    """Return the rms of parameters that are not matrices: filters, skips and norms."""
    by_name: dict[str, list[Tensor]] = {}
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        values = {"input_norm": layer.input_layernorm.weight}
        if layer.mamba is not None:
            values |= {"conv1d": layer.mamba.conv1d.weight, "D": layer.mamba.D}
        if layer.pre_ff_layernorm is not None:
            values["mlp_norm"] = layer.pre_ff_layernorm.weight
        for name, value in values.items():
            by_name.setdefault(name, []).append(rms(value))
    by_name["final_norm"] = [rms(model.model.final_layernorm.weight)]
    return {name: torch.stack(values) for name, values in by_name.items()}


# -- the way to the host -----------------------------------------------------------------------


def to_host(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of tensors as numbers and lists, with a single transfer."""
    leaves = list(_leaves(tree))
    flat = iter(torch.cat([leaf.flatten() for leaf in leaves]).tolist())

    def read(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: read(item) for key, item in value.items()}
        numbers = [float(f"{next(flat):.{_DIGITS}g}") for _ in range(value.numel())]
        return numbers if value.ndim else numbers[0]

    return read(tree)


def _leaves(tree: Mapping[str, Any]) -> list[Tensor]:
    return [
        leaf
        for value in tree.values()
        for leaf in (_leaves(value) if isinstance(value, Mapping) else [value])
    ]
