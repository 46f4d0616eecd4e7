"""The loss on held-out text."""

from __future__ import annotations

import math

import torch

from learnable_multipliers.pretrain.config import DataConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.trainer.device import Device

# Bounds the memory of the logits.
_MAX_BATCH_TOKENS = 16384


@torch.no_grad()
def evaluate(
    model: HybridLM, data: TrainingData, config: DataConfig, device: Device, *, max_tokens: int = 0
) -> dict[str, float]:
    """Return nats per token and bits per byte of held-out text, the same tokens every time."""
    was_training = model.training
    model.eval()
    fits = max(1, _MAX_BATCH_TOKENS // config.sequence_length)
    batch_size = min(config.micro_batch_sequences or config.batch_sequences, fits)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens in data.held_out(batch_size, max_tokens, device.device):
        # Not compiled: a pass without gradients, and one for a smaller last batch, would be
        # compiled anew, which takes longer than it saves.
        with torch.compiler.set_stance("force_eager"), device.autocast():
            loss = model.loss(tokens).cross_entropy
        size = tokens.shape[0] * (tokens.shape[1] - 1)
        total += loss.double().cpu() * size
        count += size
    model.train(was_training)
    return {
        "loss": total.item() / count,
        # Bytes of these very tokens: some text has longer tokens than the rest.
        "bits_per_byte": total.item() / math.log(2) / data.held_out_bytes(count),
        "evaluated_tokens": count,
    }
