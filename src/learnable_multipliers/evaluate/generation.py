"""Greedy generation. No padding or masking: prompts of a batch advance token by token together.

The prompts are read together up to the length of the shortest, then one token at a time: the
prompt's own tokens first, then generated ones. So any causal model works, and an answer depends on
the other prompts of the batch only through rounding. Needs only torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from learnable_multipliers.evaluate.requests import Prompt, Vocabulary
from learnable_multipliers.evaluate.scoring import BATCH_TOKENS, Model


class Decoder(Protocol):
    """A model and the state of its batch of texts."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Append tokens (batch, length) and return the logits after the last."""
        ...

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        ...


class UncachedDecoder:
    """Any causal model, without a cache: each call runs the whole texts again."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokens: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Append tokens (batch, length) and return the logits after the last."""
        before = () if self._tokens is None else (self._tokens,)
        self._tokens = torch.cat((*before, tokens), 1)
        return self._model(self._tokens)[:, -1]

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        assert self._tokens is not None
        self._tokens = self._tokens[rows]


@dataclass
class _Row:
    """A prompt and the text generated for it."""

    index: int
    request: Prompt
    tokens: tuple[int, ...]
    """Tokens of the prompt that fit the model's length."""
    text: bytearray = field(default_factory=bytearray)
    num_generated: int = 0
    done: bool = False

    def append(self, token: int, vocabulary: Vocabulary) -> None:
        """Append a token; the text ends before a stop string and at an end-of-document token."""
        self.num_generated += 1
        if token in vocabulary.end_ids:
            self.done = True
            return
        stops = [stop.encode() for stop in self.request.stops]
        # A stop string may begin in earlier tokens.
        start = max(0, len(self.text) - max(map(len, stops), default=1) + 1)
        # A model may have more rows in its embedding than the tokenizer has tokens.
        self.text += vocabulary.token_bytes[token] if token < len(vocabulary.token_bytes) else b""
        ends = [end for stop in stops if (end := self.text.find(stop, start)) >= 0]
        if ends:
            del self.text[min(ends) :]
        self.done = bool(ends) or self.num_generated == self.request.max_new_tokens


@torch.no_grad()
def generate(
    make_decoder: Callable[[], Decoder],
    requests: Sequence[Prompt],
    vocabulary: Vocabulary,
    *,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Return the text that the model generates for each prompt.

    Args:
        make_decoder: Makes the decoder of a batch: `lambda: UncachedDecoder(model)` for any model.
        max_length: Tokens the model can read; longer prompts lose their first tokens.
        batch_tokens: Maximum tokens in a batch, including generated ones; a longer text is a batch
            by itself.
        progress: Called with the number of requests done since the last call.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    rows = [_Row(index, r, _fitting(r, max_length)) for index, r in enumerate(requests)]
    # Also by content: the batches do not depend on the order of the requests.
    ordered = sorted(rows, key=lambda row: (-len(row.tokens), row.tokens))
    for batch in _batches(ordered, batch_tokens):
        _generate_batch(make_decoder(), batch, vocabulary, torch.device(device))
        progress(len(batch))
    return [row.text.decode(errors="replace") for row in rows]


def num_truncated(requests: Sequence[Prompt], max_length: int | None) -> int:
    """Return how many prompts lose their first tokens."""
    return sum(len(_fitting(r, max_length)) < len(r.prompt) for r in requests)


def _fitting(request: Prompt, max_length: int | None) -> tuple[int, ...]:
    """Return the end of the prompt that leaves room for the answer."""
    if max_length is None:
        return request.prompt
    room = max_length - request.max_new_tokens
    if room < 1:
        raise ValueError(
            f"{request.task}: an answer may have {request.max_new_tokens:,} tokens, and the model "
            f"reads {max_length:,} with the prompt: lower --max-new-tokens, or try --max-length if "
            "the model can read more"
        )
    return request.prompt[-room:]


def _batches(rows: Sequence[_Row], batch_tokens: int) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row.tokens) + row.request.max_new_tokens)
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], len(row.tokens) + row.request.max_new_tokens
        batch.append(row)
    if batch:
        yield batch


def _generate_batch(
    decoder: Decoder, batch: list[_Row], vocabulary: Vocabulary, device: torch.device
) -> None:
    """Generate until all prompts of a batch are done."""
    num_read = min(len(row.tokens) for row in batch)
    tokens = torch.tensor([row.tokens[:num_read] for row in batch])
    while True:
        logits = decoder.forward(tokens.to(device))
        best, places = logits.max(-1)
        # One transfer; ids are exact in float64.
        largest, chosen = torch.stack((best.double(), places.double())).tolist()
        given = []
        for row, value, place in zip(batch, largest, chosen, strict=True):
            token = row.tokens[num_read] if num_read < len(row.tokens) else int(place)
            given.append(token)
            if num_read < len(row.tokens) or row.done:
                continue
            if value != value:
                raise ValueError(
                    f"{row.request.task}, item {row.request.item}: the model's logits are not "
                    "finite; has the run diverged?"
                )
            row.append(token, vocabulary)
        left = [place for place, row in enumerate(batch) if not row.done]
        if not left:
            return
        # Not after every row: selecting rows copies the cache of the others.
        if len(left) <= len(batch) // 2:
            decoder.select_rows(torch.tensor(left, device=device))
            batch, given = [batch[place] for place in left], [given[place] for place in left]
        tokens = torch.tensor(given)[:, None]
        num_read += 1
