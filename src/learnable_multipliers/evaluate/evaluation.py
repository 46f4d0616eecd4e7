"""One model, some requests, and the results of each task."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import torch

from learnable_multipliers.evaluate import generation, results, scoring
from learnable_multipliers.evaluate.models import Loaded
from learnable_multipliers.evaluate.requests import Prompt, RequestSet
from learnable_multipliers.evaluate.results import Answer, Result
from learnable_multipliers.evaluate.tasks import TASKS

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Given a task and the number of its requests, gives a callback for the number done."""


@dataclass(frozen=True)
class Evaluation:
    """Results by task, and the generated answers of generation tasks."""

    results: dict[str, Result]
    answers: dict[str, list[Answer]] = field(default_factory=dict)


def check(asked: RequestSet, loaded: Loaded, source: str) -> None:
    """Raise a ValueError if the requests were not made for this model."""
    if None not in (asked.tokenizer, loaded.tokenizer) and asked.tokenizer != loaded.tokenizer:
        raise ValueError(
            f"{source} uses a different tokenizer from the one that built the requests: build them "
            "from this model"
        )
    rows = chain(
        (ids for r in asked.requests for ids in (r.context, r.continuation)),
        (prompt.prompt for prompt in asked.prompts),
    )
    largest = max(map(max, rows), default=0)
    if largest >= loaded.vocab_size:
        raise ValueError(
            f"the requests hold token {largest}, but the model's vocabulary has "
            f"{loaded.vocab_size:,}: they were built with the tokenizer of another model"
        )


def num_truncated(asked: RequestSet, max_length: int | None) -> int:
    """Return how many requests exceed the model's maximum length."""
    return scoring.num_truncated(asked.requests, max_length) + generation.num_truncated(
        asked.prompts, max_length
    )


def evaluate(
    loaded: Loaded,
    asked: RequestSet,
    *,
    source: str = "",
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    batch_tokens: int = scoring.BATCH_TOKENS,
    progress: Progress = lambda name, count: nullcontext(lambda done: None),
) -> Evaluation:
    """Return the results of one model; `max_length` is its maximum length in tokens."""
    evaluation = Evaluation({})
    steps = () if loaded.step is None else (loaded.step,)
    for name, items in asked.checksums.items():
        about = {"items": items, "model": source, "steps": steps, "shots": asked.shots.get(name, 0)}
        task = TASKS[name]
        settings = {"device": device, "max_length": max_length, "batch_tokens": batch_tokens}
        if task.generation is None:
            chosen = [request for request in asked.requests if request.task == name]
            with progress(name, len(chosen)) as advance:
                scores = scoring.score(loaded.model, chosen, **settings, progress=advance)
            evaluation.results[name] = results.summarize(
                chosen, scores, normalized=task.normalized, **about
            )
            continue
        prompts = [prompt for prompt in asked.prompts if prompt.task == name]
        with progress(name, len(prompts)) as advance:
            texts = generation.generate(
                loaded.make_decoder, prompts, asked.vocabulary, **settings, progress=advance
            )
        answers = [
            read_answer(p, text, loaded.step) for p, text in zip(prompts, texts, strict=True)
        ]
        evaluation.results[name] = results.summarize_generated(prompts, answers, **about)
        evaluation.answers[name] = answers
    return evaluation


def read_answer(prompt: Prompt, text: str, step: int | None = None) -> Answer:
    """Return the answer found in a generated text, and whether it is right."""
    generated = TASKS[prompt.task].generation
    assert generated is not None
    read = {metric: extract(text) for metric, extract in generated.extract.items()}
    scores = {
        metric: float(answer is not None and generated.equal(answer, prompt.answer))
        for metric, answer in read.items()
    }
    return Answer(prompt.item, step, prompt.answer, read, scores, text)
