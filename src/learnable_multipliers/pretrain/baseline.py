"""What counting alone can do: an n-gram model on the same text, as a yardstick."""

from __future__ import annotations

from typing import Literal

import numpy as np

from learnable_multipliers.pretrain.data.splits import TRAIN, VALID
from learnable_multipliers.pretrain.ngram import KneserNey
from learnable_multipliers.pretrain.training_data import TrainingData

Unit = Literal["bytes", "tokens"]


def kneser_ney_loss(data: TrainingData, order: int, unit: Unit = "bytes") -> float:
    """Return the held-out loss of a Kneser-Ney model of bytes or of tokens, in nats per token.

    Fitted to all training text, however little of it a run reads. Over bytes it is the loss per
    byte times the bytes in a token, so that it stands beside a model's loss.
    """
    if unit == "tokens":
        model = KneserNey.fit(data.tokens(TRAIN), order, data.manifest.vocab_size)
        return model.loss(data.tokens(VALID))
    train, valid = (np.frombuffer(data.text(split), np.uint8) for split in (TRAIN, VALID))
    return KneserNey.fit(train, order, 256).loss(valid) * data.bytes_per_token
