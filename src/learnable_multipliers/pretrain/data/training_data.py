"""The data of a run: training batches, held-out text, and their tokenizer.

A batch is a pure function of the dataset, the seed and the global sample index. That index is the
whole state of a run's data: a run resumed with it sees the batches it would have seen.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from learnable_multipliers.pretrain.config import DataConfig
from learnable_multipliers.pretrain.data.check import DataCheck
from learnable_multipliers.pretrain.data.order import num_samples, sample_order
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.shards import (
    DATASET_MANIFEST,
    FORMAT,
    TRAIN,
    VALID,
    TokenDataset,
    Tokens,
    verify_sha256,
)
from learnable_multipliers.pretrain.data.tokenizer import load_tokenizer

_NUM_SPANS = 256
"""In which a large text is sampled."""


class TrainingData:
    """A prepared dataset as a run uses it."""

    def __init__(self, folder: Path, sequence_length: int, seed: int):
        self._length, self._seed = sequence_length, seed
        # Sizes and the tokenizer are checked here; `check` and `verify` read all of the tokens.
        self._train, valid = TokenDataset(folder, TRAIN), TokenDataset(folder, VALID)
        self.folder, self.manifest = folder, (manifest := self._train.manifest)
        self.tests = tuple(split for split in manifest.splits if split not in (TRAIN, VALID))
        """Names of further held-out text."""
        self._held_out = {split: TokenDataset(folder, split) for split in self.tests}
        self._held_out[VALID] = valid
        # Report too little text now, not at the first batch or evaluation.
        self._num_samples = num_samples(len(self._train), sequence_length)
        self._num_held_out = {
            split: num_samples(len(tokens), sequence_length)
            for split, tokens in self._held_out.items()
        }
        self._tokenizer_file = folder / manifest.tokenizer_file
        verify_sha256(self._tokenizer_file, manifest.tokenizer_sha256)
        self._tokenizer = load_tokenizer(self._tokenizer_file, manifest.eos_token)
        sizes = self._tokenizer.vocab_size, self._tokenizer.eos_id
        if sizes != (manifest.vocab_size, manifest.eos_id):
            raise ValueError(
                f"{folder / DATASET_MANIFEST} cannot be used (vocab_size and eos_id of its "
                f"tokenizer are {sizes}, not {(manifest.vocab_size, manifest.eos_id)}); prepare "
                "the dataset again"
            )
        self._token_bytes = self._tokenizer.token_bytes()
        self.eos = manifest.eos_id
        self.fingerprint = manifest.fingerprint()

    @classmethod
    def open(cls, config: DataConfig, vocab_size: int, seed: int) -> TrainingData:
        """Open the data a config names; the default corpus is prepared on first use."""
        folder = config.path or default_corpus(vocab_size)
        data = cls(folder, config.sequence_length, seed)
        if vocab_size and data.manifest.vocab_size > vocab_size:
            raise ValueError(
                f"the data at {folder} have a vocabulary of {data.manifest.vocab_size}, the model "
                f"one of {vocab_size}: set --model.vocab-size to at least "
                f"{data.manifest.vocab_size}, or prepare the data with a smaller tokenizer"
            )
        return data

    def check(self, *, reads: bool = True) -> DataCheck:
        """Return a check of all tokens against the manifest, not yet started.

        Args:
            reads: False if another process checks the same files.
        """
        datasets = (self._train, *self._held_out.values())
        files = [file for dataset in datasets for file in dataset.files] if reads else []
        return DataCheck(files, cache_folder() / "good-shards")

    def verify(self) -> None:
        """Read all tokens and compare their checksums with the manifest, ignoring the cache."""
        for dataset in (self._train, *self._held_out.values()):
            dataset.verify()

    def batch(self, start: int, size: int, device: torch.device) -> Tensor:
        """Return the samples from global index `start` on, (size, sequence_length + 1).

        Inputs are `[:, :-1]`, targets `[:, 1:]`.
        """
        samples = sample_order(np.arange(start, start + size), self._num_samples, self._seed)
        return _moved(self._train.samples(samples, self._length), device)

    def token_counts(self, vocab_size: int, max_tokens: int) -> Tensor:
        """Return how often each token occurs in the training text, (vocab_size,).

        Text of more than `max_tokens` is counted in spans spread evenly over it.
        """
        total, spans = len(self._train), 1 if len(self._train) <= max_tokens else _NUM_SPANS
        size = min(total, max_tokens) // spans
        counts = np.zeros(vocab_size, np.int64)
        for span in range(spans):
            start = span * total // spans
            counts += np.bincount(self._train.tokens(start, start + size), minlength=vocab_size)
        return torch.from_numpy(counts)

    def held_out(
        self, batch_size: int, max_tokens: int, device: torch.device, split: str = VALID
    ) -> Iterator[Tensor]:
        """Yield held-out samples from the start, the same ones every time; 0 tokens is all.

        The last batch may be smaller. Tokens after the last whole sample are not read.
        """
        count = self.num_held_out(max_tokens, split) // self._length
        for start in range(0, count, batch_size):
            samples = np.arange(start, min(start + batch_size, count))
            yield _moved(self._held_out[split].samples(samples, self._length), device)

    def num_held_out(self, max_tokens: int, split: str = VALID) -> int:
        """Return how many held-out tokens `held_out` asks for: whole sequences, one at least."""
        sequences = self._num_held_out[split]
        if max_tokens:
            sequences = min(sequences, max(1, max_tokens // self._length))
        return sequences * self._length

    def held_out_bytes(self, num_tokens: int, split: str = VALID) -> float:
        """Return the bytes of text that the first `num_tokens` held-out targets stand for.

        Exact for byte-level tokenizers; for others an average over the whole split.
        """
        tokens = self._held_out[split]
        if self._token_bytes is None:
            return num_tokens * self.manifest.num_bytes(split) / len(tokens)
        # The first token is input only, never a target.
        return float(self._token_bytes[tokens.tokens(1, num_tokens + 1)].sum())

    def tokens(self, split: str) -> Tokens:
        """Return all tokens of a split."""
        dataset = TokenDataset(self.folder, split)
        return dataset.tokens(0, len(dataset))

    @property
    def num_tokens(self) -> int:
        """Tokens to train on before one is seen again."""
        return len(self._train)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens."""
        return self._tokenizer.decode([t for t in tokens if t < self.manifest.vocab_size])

    def tokenizer(self) -> bytes:
        """Return the content of the tokenizer's file."""
        verify_sha256(self._tokenizer_file, self.manifest.tokenizer_sha256)
        return self._tokenizer_file.read_bytes()


def default_corpus(vocab_size: int) -> Path:
    """Return the prepared sources of Python's standard library, prepared on first use."""
    size = vocab_size or 4096
    # With the format, so data of other releases are not touched.
    folder = cache_folder() / f"python-{platform.python_version()}-{size}-{FORMAT}"
    if not folder.exists():
        try:
            prepare(PrepareConfig(out=folder, vocab_size=size, valid_fraction=0.05))
        except FileExistsError:
            # Another process was faster; folders are published when complete.
            if not folder.exists():
                raise
    return folder


def cache_folder() -> Path:
    """Return the folder of default data and cached results: LRM_CACHE, or the user's cache."""
    if own := os.environ.get("LRM_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "learnable-multipliers"


def _moved(batch: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device)
