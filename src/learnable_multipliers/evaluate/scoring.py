"""Log-likelihoods of requests under a model. Needs only torch.

Sequences are sorted by length, batched up to a number of tokens and padded on the right, where a
causal model does not look. So a score depends on the batch and the padding only through rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learnable_multipliers.evaluate.requests import Request

Model = Callable[[Tensor], Tensor]
"""Token ids, (batch, length), to logits, (batch, length, vocabulary), of a causal model."""
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Score:
    """The score of a continuation."""

    log_likelihood: float
    """Nats, summed over the tokens of the continuation."""
    greedy: bool
    """Whether each token is the model's most likely one."""


@dataclass(frozen=True)
class _Sequence:
    """An input of the model, and the requests that read its logits."""

    tokens: tuple[int, ...]
    requests: list[int]


@torch.no_grad()
def score(
    model: Model,
    requests: Sequence[Request],
    *,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Score]:
    """Return the score of each request.

    Args:
        max_length: Tokens the model can read; longer contexts lose their first tokens.
        batch_tokens: Maximum tokens in a batch; one longer sequence is a batch by itself.
        progress: Called with the number of requests done since the last call.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    scores: dict[int, Score] = {}
    for batch in _batches(_sequences(requests, max_length), batch_tokens):
        rows = torch.zeros(len(batch), len(batch[0].tokens), dtype=torch.long)
        for row, sequence in zip(rows, batch, strict=True):
            row[: len(sequence.tokens)] = torch.tensor(sequence.tokens)
        logits = model(rows.to(device))
        if logits.dim() != 3 or logits.shape[:2] != rows.shape:
            raise ValueError(
                f"the model returned logits of shape {tuple(logits.shape)} for tokens of shape "
                f"{tuple(rows.shape)}: expected (batch, length, vocabulary)"
            )
        batch_scores = _scores_of(logits, batch, requests)
        scores |= batch_scores
        progress(len(batch_scores))
    return [scores[index] for index in range(len(requests))]


def num_truncated(requests: Sequence[Request], max_length: int | None) -> int:
    """Return how many requests have contexts that lose their first tokens."""
    if max_length is None:
        return 0
    return sum(len(r.context) + len(r.continuation) > max_length + 1 for r in requests)


def _sequences(requests: Sequence[Request], max_length: int | None) -> list[_Sequence]:
    """Return the inputs of the model, longest first; equal ones are read once."""
    owners: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        if max_length is not None and len(request.continuation) > max_length:
            raise ValueError(
                f"{request.task}, item {request.item}: choice {request.choice} has "
                f"{len(request.continuation):,} tokens, and the model reads {max_length:,}: leave "
                "the task out with --tasks, or try --max-length if the model can read more"
            )
        # The last token is predicted and not read.
        tokens = (*request.context, *request.continuation)[:-1]
        owners.setdefault(tokens if max_length is None else tokens[-max_length:], []).append(index)
    # Also by content: the batches do not depend on the order of the requests.
    ordered = sorted(owners, key=lambda tokens: (-len(tokens), tokens))
    return [_Sequence(tokens, owners[tokens]) for tokens in ordered]


def _batches(sequences: Sequence[_Sequence], batch_tokens: int) -> Iterator[Sequence[_Sequence]]:
    start = 0
    while start < len(sequences):
        size = max(1, batch_tokens // len(sequences[start].tokens))
        yield sequences[start : start + size]
        start += size


def _scores_of(
    logits: Tensor, batch: Sequence[_Sequence], requests: Sequence[Request]
) -> dict[int, Score]:
    """Read the scores of a batch; its logits go to the host once."""
    rows, places, targets, owners = [], [], [], []
    for row, sequence in enumerate(batch):
        for index in sequence.requests:
            continuation = requests[index].continuation
            first = len(sequence.tokens) - len(continuation)
            rows += [row] * len(continuation)
            places += range(first, len(sequence.tokens))
            targets += continuation
            owners += [index] * len(continuation)
    at = torch.tensor([rows, places, targets], device=logits.device)
    # Only what is read: all logits in float32 would be a second copy of the largest tensor.
    wanted = logits[at[0], at[1]]  # (tokens, vocabulary)
    wanted = wanted if wanted.dtype == torch.float64 else wanted.float()
    log_probabilities = wanted.log_softmax(-1).gather(1, at[2, :, None])[:, 0]
    greedy = wanted.argmax(-1) == at[2]
    read = torch.stack((log_probabilities.double(), greedy.double())).cpu().tolist()
    sums: dict[int, tuple[float, bool]] = {}
    for index, value, is_greedy in zip(owners, *read, strict=True):
        if value != value:
            raise ValueError(
                f"{requests[index].task}, item {requests[index].item}: the model's logits are not "
                "finite; has the run diverged?"
            )
        total, all_greedy = sums.get(index, (0.0, True))
        sums[index] = total + value, all_greedy and bool(is_greedy)
    return {index: Score(*values) for index, values in sums.items()}
