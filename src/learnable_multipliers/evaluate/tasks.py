"""The tasks: files, forms, examples and metrics, as in lm-eval's tasks of the same names."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from learnable_multipliers.evaluate import answers, latex, prompts
from learnable_multipliers.evaluate.items import (
    Fields,
    Item,
    checked,
    evenly,
    read_items,
    read_lines,
    with_examples,
)

Form = Literal["cloze", "letter", "partial", "pair", "last word", "generation"]
"""cloze: answers after a question. letter: letters of answers listed in the question. partial: one
ending after sentences filled in differently. pair: two whole sentences. last word: one word that
must be the model's greedy choice. generation: the answer is extracted from generated text."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a generated answer ends and how it is extracted."""

    stops: tuple[str, ...]
    """Stop strings: the answer ends before the first."""
    max_new_tokens: int
    extract: Mapping[str, Callable[[str], str | None]]
    """Metric -> a function that extracts the answer from a text, or None."""
    equal: Callable[[str, str], bool] = operator.eq
    """Whether an extracted answer equals the right one."""


@dataclass(frozen=True)
class Examples:
    """Items shown with their answers; never items of the test set."""

    file: str | None
    """Path in the folder of evaluation sets; None for our own examples."""
    read: Callable[[Path], Any]

    def __call__(self, folder: Path) -> Any:
        """Return the examples, given the folder of evaluation sets."""
        return self.read(folder) if self.file is None else _read_all(folder, self.file, self.read)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark in local files."""

    name: str
    form: Form = "cloze"
    file: str
    """Path in the folder of evaluation sets; may be a pattern for several files."""
    read: Callable[[Path], Any]
    """Return the items of a file."""
    normalized: bool = True
    """Whether accuracy normalized by the length of the answer is reported too."""
    labels: str | None = None
    """File of the right choices, if they are not in the items."""
    shots: int = 0
    """Default number of examples in the prompt."""
    examples: Examples | None = None
    generation: Generation | None = None
    """Only for generation tasks."""
    note: str = ""
    """Differences from lm-eval's task, or from the paper's."""

    def missing_file(self, folder: Path, shots: int | None) -> str | None:
        """Return a file that the items need and the folder lacks; None if it has all."""
        count = self.shots if shots is None else shots
        needed = [self.file, self.labels, self.examples.file if count and self.examples else None]
        for file in filter(None, needed):
            if not any(path.is_file() for path in folder.glob(file)):
                return file
        return None

    def items(
        self, folder: Path, *, shots: int | None = None, limit: int = 0, max_new_tokens: int = 0
    ) -> Any:
        """Return the items, a list of `Item` or of `OpenItem`.

        Args:
            shots: Examples before each item; None for the default.
            limit: Maximum number of items, evenly spaced over the file; 0 for all.
            max_new_tokens: Maximum generated tokens of an answer; 0 for the default.
        """
        check_folder(folder)
        count = self.shots if shots is None else shots
        if count and self.examples is None:
            able = ", ".join(task.name for task in TASKS.values() if task.examples)
            raise ValueError(
                f"{self.name} takes no examples: the evaluation sets have none for it apart "
                f"from its questions (tasks with examples: {able})"
            )
        items = _read_all(folder, self.file, self.read)
        if self.labels is not None:
            items = _labelled(items, folder / self.labels)
        items = evenly(items, limit) if limit else items
        if self.generation is not None:
            most = max_new_tokens or self.generation.max_new_tokens
            items = [replace(i, stops=self.generation.stops, max_new_tokens=most) for i in items]
        examples = self.examples(folder) if count and self.examples else []
        try:
            return with_examples(items, examples, count)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error


def check_folder(folder: Path) -> None:
    """Raise a ValueError unless the folder of evaluation sets exists."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: give the folder of the evaluation sets (--eval-data)"
        )


def _read_all(folder: Path, file: str, read: Callable[[Path], Any]) -> Any:
    paths = sorted(folder.glob(file)) if "*" in file else [folder / file]
    if not paths:
        raise ValueError(
            f"{folder} holds no {file}: unpack it there, or leave the task out with --tasks"
        )
    return [item for path in paths for item in read(path)]


def _labelled(items: list[Item], path: Path) -> list[Item]:
    """Return items with the right choices read from a separate file."""
    labels = read_lines(path)
    if len(labels) != len(items):
        raise ValueError(f"{path} has {len(labels)} labels for {len(items)} items")
    labelled = []
    for number, (item, label) in enumerate(zip(items, labels, strict=True), 1):
        try:
            labelled.append(checked(replace(item, right=int(label))))
        except ValueError as error:
            raise ValueError(f"{path}, label {number} ({label[:20]!r}): {error}") from error
    return labelled


def _lines(parse: Callable[[Fields], Any]) -> Callable[[Path], Any]:
    return partial(read_items, parse=parse)


_ALL = (
    Task(
        name="hellaswag",
        file="hellaswag/hellaswag_val.jsonl",
        read=_lines(prompts.hellaswag),
        note="context as its file has it; lm-eval capitalizes the last part",
    ),
    Task(
        name="arc_challenge",
        file="arc/arc_challenge_test.jsonl",
        read=_lines(prompts.answered),
        examples=Examples("arc/ARC-Challenge-Dev.jsonl", _lines(prompts.arc_dev)),
    ),
    Task(name="arc_easy", file="arc/arc_easy_test.jsonl", read=_lines(prompts.answered)),
    Task(
        name="mmlu_cloze",
        file="mmlu/mmlu_test.jsonl",
        read=_lines(prompts.mmlu_cloze),
        examples=Examples("mmlu/mmlu_dev.jsonl", _lines(prompts.mmlu_cloze)),
        note="lm-eval's mmlu_continuation, without its line about the subject",
    ),
    Task(
        name="mmlu_pro_cloze",
        file="mmlu_pro/test.jsonl",
        read=_lines(prompts.mmlu_pro_cloze),
        examples=Examples("mmlu_pro/validation.jsonl", _lines(prompts.mmlu_pro_cloze)),
        note="in the form of mmlu_cloze; lm-eval has no such task",
    ),
    Task(
        name="sciq",
        file="sciq/sciq_test_nosupport.jsonl",
        read=_lines(prompts.answered),
        note="without the supporting passage that lm-eval puts first: harder",
    ),
    Task(
        name="piqa",
        file="piqa/valid.jsonl",
        labels="piqa/valid-labels.lst",
        read=_lines(prompts.piqa),
    ),
    Task(
        name="openbookqa",
        file="openbookqa/openbookqa_test.jsonl",
        read=_lines(prompts.openbookqa),
    ),
    Task(
        name="winogrande",
        form="partial",
        file="winogrande/winogrande_dev.jsonl",
        read=_lines(prompts.winogrande),
        normalized=False,
    ),
    Task(
        name="blimp",
        form="pair",
        file="blimp/*.jsonl",
        read=_lines(prompts.blimp),
        normalized=False,
    ),
    Task(
        name="lambada",
        form="last word",
        file="lambada/lambada_test.jsonl",
        read=_lines(prompts.lambada),
        normalized=False,
        note="lm-eval's lambada_openai",
    ),
    Task(
        name="mmlu",
        form="letter",
        file="mmlu/mmlu_test.jsonl",
        read=_lines(prompts.mmlu),
        normalized=False,
        shots=5,
        examples=Examples("mmlu/mmlu_dev.jsonl", _lines(prompts.mmlu)),
    ),
    Task(
        name="mmlu_pro",
        form="generation",
        file="mmlu_pro/test.jsonl",
        read=_lines(prompts.mmlu_pro),
        shots=5,
        examples=Examples("mmlu_pro/validation.jsonl", _lines(prompts.mmlu_pro)),
        generation=Generation(
            stops=("Question:",), max_new_tokens=2048, extract={"accuracy": answers.letter}
        ),
    ),
    Task(
        name="bbh",
        form="generation",
        file="bbh/bbh/*.json",
        read=prompts.bbh_items,
        shots=3,
        examples=Examples("bbh/cot-prompts/*.txt", prompts.bbh_examples),
        generation=Generation(
            stops=("</s>", "Q", "\n\n"),
            max_new_tokens=1024,
            extract={"accuracy": answers.concluded},
        ),
        note="an answer counts with and without a period behind it; lm-eval wants one",
    ),
    Task(
        name="gsm8k",
        form="generation",
        file="gsm8k/test.jsonl",
        read=_lines(prompts.gsm8k),
        shots=5,
        examples=Examples("gsm8k/train.jsonl", _lines(prompts.gsm8k)),
        generation=Generation(
            stops=("Question:", "</s>", "<|im_end|>"),
            max_new_tokens=256,
            extract={"accuracy": answers.marked_number, "flexible": answers.last_number},
        ),
        note="the first examples of the training file; lm-eval draws others for each question",
    ),
    Task(
        name="math500",
        form="generation",
        file="math500/test.jsonl",
        read=_lines(prompts.math),
        shots=4,
        examples=Examples(None, lambda folder: list(prompts.MATH_EXAMPLES)),
        generation=Generation(
            stops=("Problem:",),
            max_new_tokens=1024,
            extract={"accuracy": answers.boxed},
            equal=latex.same,
        ),
        note="our own examples; 500 problems of all levels, where the paper has all of level 5",
    ),
)
TASKS = {task.name: task for task in _ALL}
SETS: dict[str, tuple[str, ...]] = {
    "quick": tuple(task.name for task in _ALL if not task.shots),
    "paper": ("hellaswag", "arc_challenge", "mmlu", "mmlu_pro", "bbh", "gsm8k", "math500"),
    "all": tuple(TASKS),
}
"""Names for several tasks: those without examples; the seven of the paper's table; all."""


def named(names: Sequence[str]) -> list[Task]:
    """Return tasks by name, each once; a ValueError gives the closest name to an unknown one."""
    for name in names:
        if name not in TASKS and name not in SETS:
            close = difflib.get_close_matches(name.lower(), [*TASKS, *SETS], n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(TASKS)}"
            raise ValueError(f"there is no task {name!r}; {hint}")
    whole = (task for name in names for task in SETS.get(name, (name,)))
    return [TASKS[name] for name in dict.fromkeys(whole)]
