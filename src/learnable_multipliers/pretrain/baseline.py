"""What counting alone can do: an n-gram model on the same text, as a yardstick."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from learnable_multipliers.pretrain.data.splits import TRAIN, VALID
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.ngram import KneserNey

Unit = Literal["bytes", "tokens"]


def kneser_ney_loss(
    data: TrainingData, order: int, unit: Unit = "bytes", *, max_tokens: int = 0
) -> float:
    """Return the held-out loss of a Kneser-Ney model of bytes or of tokens, in nats per token.

    Fitted to all training text, however little of it a run reads, and tried on the tokens that an
    evaluation with the same `max_tokens` reads. Over bytes it is the loss of their bytes, so that
    it stands beside a model's loss; the ends of documents, which have none, cost it nothing.
    """
    num_tokens = data.num_held_out(max_tokens)
    if unit == "tokens":
        model = KneserNey.fit(data.tokens(TRAIN), order, data.manifest.vocab_size)
        first, stream = 1, data.tokens(VALID)[: num_tokens + 1]
    else:
        model = KneserNey.fit(_bytes(data, TRAIN), order, 256)
        valid = _bytes(data, VALID)
        # The first token of all is read, never asked for, and so are its bytes.
        first = len(valid) - round(data.held_out_bytes(len(data.tokens(VALID)) - 1))
        stream = valid[: first + round(data.held_out_bytes(num_tokens))]
    return -float(np.log(model.probabilities(stream)[first:]).sum()) / num_tokens


def _bytes(data: TrainingData, split: str) -> NDArray[np.uint8]:
    return np.frombuffer(data.text(split), np.uint8)
