"""What a model writes behind prompts, token by token the likeliest one. Needs torch alone.

Prompts of a batch are read together as far as the shortest goes; from there one token at a time,
the prompt's own while it lasts. So nothing is filled up or masked, whatever the kind of model, and
neither the batch nor its lengths enter an answer, except through rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from learnable_multipliers.evaluate.requests import Prompt, Vocabulary
from learnable_multipliers.evaluate.scoring import BATCH_TOKENS, Model


class Reader(Protocol):
    """A model in the middle of a batch of texts."""

    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens, (batch, length), and return the logits behind the last."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        ...


class Rereader:
    """Any causal model: it reads the whole texts again with each token."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokens: Tensor | None = None

    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens, (batch, length), and return the logits behind the last."""
        before = () if self._tokens is None else (self._tokens,)
        self._tokens = torch.cat((*before, tokens), 1)
        return self._model(self._tokens)[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        assert self._tokens is not None
        self._tokens = self._tokens[rows]


@dataclass
class _Row:
    """A prompt and what was written behind it."""

    index: int
    request: Prompt
    tokens: tuple[int, ...]
    """Of the prompt, as far as the model can read it."""
    text: bytearray = field(default_factory=bytearray)
    num_written: int = 0
    done: bool = False

    def write(self, token: int, vocabulary: Vocabulary) -> None:
        """Take a token; the answer ends before a stop, and at a token that ends documents."""
        self.num_written += 1
        if token in vocabulary.end_ids:
            self.done = True
            return
        stops = [stop.encode() for stop in self.request.stops]
        # A stop may begin in the tokens before.
        start = max(0, len(self.text) - max(map(len, stops), default=1) + 1)
        # A model may have more rows in its embedding than the tokenizer has tokens.
        self.text += vocabulary.pieces[token] if token < len(vocabulary.pieces) else b""
        ends = [end for stop in stops if (end := self.text.find(stop, start)) >= 0]
        if ends:
            del self.text[min(ends) :]
        self.done = bool(ends) or self.num_written == self.request.max_new_tokens


@torch.no_grad()
def generate(
    reader: Callable[[], Reader],
    requests: Sequence[Prompt],
    vocabulary: Vocabulary,
    *,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Return what the model writes behind each prompt.

    Args:
        reader: Makes a reader for a batch: `lambda: Rereader(model)` for any causal model.
        max_length: Tokens the model can read; longer prompts lose their first tokens.
        batch_tokens: Most tokens in a batch, those to be written too; one longer text is a batch by
            itself.
        progress: Called with the number of requests done since the last call.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    rows = [_Row(index, r, _fitting(r, max_length)) for index, r in enumerate(requests)]
    # Also by content: the batches do not depend on the order of the requests.
    ordered = sorted(rows, key=lambda row: (-len(row.tokens), row.tokens))
    for batch in _batches(ordered, batch_tokens):
        _write(reader(), batch, vocabulary, torch.device(device))
        progress(len(batch))
    return [row.text.decode(errors="replace") for row in rows]


def num_truncated(requests: Sequence[Prompt], max_length: int | None) -> int:
    """Return how many prompts lose their first tokens."""
    return sum(len(_fitting(r, max_length)) < len(r.prompt) for r in requests)


def _fitting(request: Prompt, max_length: int | None) -> tuple[int, ...]:
    """Return the prompt, as much of its end as leaves room for the answer."""
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


def _write(reader: Reader, batch: list[_Row], vocabulary: Vocabulary, device: torch.device) -> None:
    """Write behind the prompts of a batch until all are done."""
    num_read = min(len(row.tokens) for row in batch)
    tokens = torch.tensor([row.tokens[:num_read] for row in batch])
    while True:
        logits = reader.read(tokens.to(device))
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
            row.write(token, vocabulary)
        left = [place for place, row in enumerate(batch) if not row.done]
        if not left:
            return
        # Not at once with each: a model copies what it remembers of the others.
        if len(left) <= len(batch) // 2:
            reader.keep(torch.tensor(left, device=device))
            batch, given = [batch[place] for place in left], [given[place] for place in left]
        tokens = torch.tensor(given)[:, None]
        num_read += 1
