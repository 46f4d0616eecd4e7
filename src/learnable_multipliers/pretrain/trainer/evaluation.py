"""The loss on held-out text, and text samples from the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.shards import VALID
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.trainer.device import Device

# Bounds the memory of the logits.
_MAX_BATCH_TOKENS = 16384
_TEMPERATURE, _TOP_K = 0.8, 50


@torch.no_grad()
def evaluate(
    model: HybridLM,
    data: TrainingData,
    config: TrainConfig,
    device: Device,
    split: str = VALID,
) -> dict[str, float]:
    """Return nats per token and bits per byte of held-out text, the same tokens every time.

    Up to `log.evaluate_tokens` of the validation text; all of other text.
    """
    was_training = model.training
    model.eval()
    fits = max(1, _MAX_BATCH_TOKENS // config.data.sequence_length)
    batch_size = min(config.data.micro_batch_sequences or config.data.batch_sequences, fits)
    total, count = torch.zeros((), dtype=torch.float64), 0
    most = config.log.evaluate_tokens if split == VALID else 0
    for tokens in data.held_out(batch_size, most, device.device, split):
        # Not compiled: recompiling without gradients, and for a smaller last batch, takes longer
        # than it saves.
        with torch.compiler.set_stance("force_eager"), device.autocast():
            loss = model.loss(tokens).cross_entropy
        size = tokens.shape[0] * (tokens.shape[1] - 1)
        total += loss.double().cpu() * size
        count += size
    model.train(was_training)
    return {
        "loss": total.item() / count,
        # The bytes of exactly these tokens, since token lengths vary over the text.
        "bits_per_byte": total.item() / math.log(2) / data.held_out_bytes(count, split),
        "evaluated_tokens": count,
    }


@torch.no_grad()
def generate(
    model: HybridLM, prompt: Tensor, num_tokens: int, context: int, seed: int
) -> Tensor | None:
    """Return `prompt` (length,) and `num_tokens` more, sampled from the most likely tokens.

    Return None if the logits are not finite, as in a diverged model.

    Each token takes a forward pass over the last `context` tokens: slow and simple, for samples
    during training. For anything else, generate from an exported model.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(num_tokens):
        # Not compiled: every length would be recompiled.
        with torch.compiler.set_stance("force_eager"):
            logits = model(tokens[None, -context:])[0, -1].float().cpu()
        if not logits.isfinite().all():
            return None
        best, places = logits.topk(min(_TOP_K, len(logits)))
        at = torch.multinomial((best / _TEMPERATURE).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, places[at].to(tokens)))
    return tokens


def sample_text(
    model: HybridLM, data: TrainingData, config: TrainConfig, device: Device
) -> str | None:
    """Return the text generated after the config's prompt; None if the model has diverged."""
    prompt = torch.tensor(data.encode(config.log.prompt) or [data.eos], device=device.device)
    context = min(256, config.data.sequence_length)
    with device.autocast():
        tokens = generate(model, prompt, config.log.sample_tokens, context, config.seed)
    if tokens is None:
        return None
    written = tokens[len(prompt) :].tolist()
    if data.eos in written:
        written = written[: written.index(data.eos)]
    return data.decode(written)
