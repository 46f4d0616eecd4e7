"""The tasks: files, prompts and normalizations, as in lm-eval's definitions of the same names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learnable_multipliers.evaluate.items import (
    Choice,
    Fields,
    Item,
    checked,
    cloze,
    field,
    read_items,
    read_lines,
)

Form = Literal["cloze", "partial", "pair", "last word"]
"""cloze: answers behind one question. partial: one ending behind sentences filled in differently.
pair: two whole sentences. last word: the one word that must be the model's own first choice."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark in local files."""

    name: str
    form: Form = "cloze"
    file: str
    """Below the folder of evaluation sets; may be a pattern of several files."""
    parse: Callable[[Fields], Item]
    normalized: bool = True
    """Whether accuracy normalized by the characters of an answer is reported too."""
    labels: str | None = None
    """File of right choices, where they are not in the items."""
    note: str = ""
    """How it differs from lm-eval's task, or from the paper's."""

    def items(self, folder: Path) -> list[Item]:
        """Read all items."""
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is no folder: give that of the evaluation sets (--eval-data)"
            )
        paths = sorted(folder.glob(self.file)) if "*" in self.file else [folder / self.file]
        if not paths:
            raise ValueError(
                f"{folder} holds no {self.file}, which the task {self.name} reads: unpack it "
                "there, or leave the task out with --tasks"
            )
        items = [item for path in paths for item in read_items(path, self.parse)]
        return items if self.labels is None else _labelled(items, folder / self.labels)


def _labelled(items: list[Item], path: Path) -> list[Item]:
    """Return items with the right choices that stand in a file of their own."""
    labels = read_lines(path)
    if len(labels) != len(items):
        raise ValueError(f"{path} has {len(labels)} labels for {len(items)} items")
    found = []
    for number, (item, label) in enumerate(zip(items, labels, strict=True), 1):
        try:
            found.append(checked(Item(item.choices, int(label), item.group)))
        except ValueError as error:
            raise ValueError(f"{path}, label {number} ({label[:20]!r}): {error}") from error
    return found


# -- prompts -----------------------------------------------------------------------------------


def _question(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def _hellaswag(line: Fields) -> Item:
    context = f"{field(line, 'activity_label', str)}: {field(line, 'ctx', str)}"
    return cloze(context, field(line, "endings", list), field(line, "label", int))


def _answered(line: Fields) -> Item:
    """ARC and SciQ."""
    context = _question(field(line, "question", str))
    return cloze(context, field(line, "choices", list), field(line, "label", int))


def _mmlu(line: Fields) -> Item:
    context = _question(field(line, "question", str).strip())
    group = field(line, "subject", str)
    return cloze(context, field(line, "choices", list), field(line, "label", int), group)


def _mmlu_pro(line: Fields) -> Item:
    context = _question(field(line, "question", str).strip())
    group = field(line, "category", str)
    return cloze(context, field(line, "options", list), field(line, "answer_index", int), group)


def _openbookqa(line: Fields) -> Item:
    context = field(line, "question", str)
    return cloze(context, field(line, "choices", list), field(line, "label", int))


def _piqa(line: Fields) -> Item:
    answers = [field(line, "sol1", str), field(line, "sol2", str)]
    # The right one stands in another file.
    return cloze(_question(field(line, "goal", str)), answers, 0)


def _winogrande(line: Fields) -> Item:
    before, gap, after = field(line, "sentence", str).partition("_")
    if not gap:
        raise ValueError("sentence has no _ where an option goes")
    ending = after.strip()
    options = field(line, "option1", str), field(line, "option2", str)
    choices = (Choice(before + option, f" {ending}", len(ending)) for option in options)
    return Item(tuple(choices), field(line, "answer", int) - 1)


def _blimp(line: Fields) -> Item:
    sentences = [field(line, "sentence_good", str), field(line, "sentence_bad", str)]
    return cloze("", sentences, 0, field(line, "UID", str))


def _lambada(line: Fields) -> Item:
    context, _, word = field(line, "text", str).rpartition(" ")
    if not context:
        raise ValueError("text is a single word")
    return cloze(context, [word], 0)


_ALL = (
    Task(
        name="hellaswag",
        file="hellaswag/hellaswag_val.jsonl",
        parse=_hellaswag,
        note="context as its file has it; lm-eval capitalizes the last part",
    ),
    Task(
        name="arc_challenge",
        file="arc/arc_challenge_test.jsonl",
        parse=_answered,
    ),
    Task(name="arc_easy", file="arc/arc_easy_test.jsonl", parse=_answered),
    Task(
        name="mmlu",
        file="mmlu/mmlu_test.jsonl",
        parse=_mmlu,
        note="lm-eval's mmlu_continuation, without examples; not the form with letters",
    ),
    Task(
        name="mmlu_pro",
        file="mmlu_pro/test.jsonl",
        parse=_mmlu_pro,
        note="in MMLU's form; lm-eval and the paper let the model reason in writing",
    ),
    Task(
        name="sciq",
        file="sciq/sciq_test_nosupport.jsonl",
        parse=_answered,
        note="without the supporting passage that lm-eval puts first: harder",
    ),
    Task(name="piqa", file="piqa/valid.jsonl", labels="piqa/valid-labels.lst", parse=_piqa),
    Task(
        name="openbookqa",
        file="openbookqa/openbookqa_test.jsonl",
        parse=_openbookqa,
    ),
    Task(
        name="winogrande",
        form="partial",
        file="winogrande/winogrande_dev.jsonl",
        parse=_winogrande,
        normalized=False,
    ),
    Task(name="blimp", form="pair", file="blimp/*.jsonl", parse=_blimp, normalized=False),
    Task(
        name="lambada",
        form="last word",
        file="lambada/lambada_test.jsonl",
        parse=_lambada,
        normalized=False,
        note="lm-eval's lambada_openai",
    ),
)
TASKS = {task.name: task for task in _ALL}


def named(names: tuple[str, ...]) -> list[Task]:
    """Return tasks by name, each once; a ValueError gives the closest name to an unknown one."""
    for name in names:
        if name not in TASKS:
            close = difflib.get_close_matches(name.lower(), TASKS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(TASKS)}"
            raise ValueError(f"there is no task {name!r}; {hint}")
    return [TASKS[name] for name in dict.fromkeys(names)]
