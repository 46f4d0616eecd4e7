"""Data for pretraining: text to token shards, and batches in an order that is a pure function."""

from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.formats import DocumentError
from learnable_multipliers.pretrain.data.loader import BatchLoader, evaluation_batches
from learnable_multipliers.pretrain.data.manifest import Manifest, Shard
from learnable_multipliers.pretrain.data.order import num_samples, sample_order
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, Progress, prepare
from learnable_multipliers.pretrain.data.shards import TokenDataset
from learnable_multipliers.pretrain.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

__all__ = [
    "BatchLoader",
    "Corpus",
    "DocumentError",
    "Manifest",
    "PrepareConfig",
    "Progress",
    "Shard",
    "TextTokenizer",
    "TokenDataset",
    "evaluation_batches",
    "load_tokenizer",
    "num_samples",
    "prepare",
    "sample_order",
    "train_tokenizer",
]
