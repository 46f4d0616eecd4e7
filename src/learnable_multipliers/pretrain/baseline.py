"""What counting alone can do: an n-gram model on the same text, as a yardstick."""

from __future__ import annotations

from learnable_multipliers.pretrain.data.prepare import TRAIN, VALID
from learnable_multipliers.pretrain.data.shards import TokenDataset
from learnable_multipliers.pretrain.ngram import KneserNey
from learnable_multipliers.pretrain.training_data import TrainingData


def kneser_ney_loss(data: TrainingData, order: int) -> float:
    """Return the held-out loss of a Kneser-Ney model over the same tokens, in nats per token."""
    train, valid = (TokenDataset(data.folder, data.manifest, split) for split in (TRAIN, VALID))
    model = KneserNey.fit(train.tokens(0, len(train)), order, data.manifest.vocab_size)
    return model.loss(valid.tokens(0, len(valid)))
