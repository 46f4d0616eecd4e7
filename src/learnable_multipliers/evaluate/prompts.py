"""Make items from the lines of a benchmark's file, with lm-eval's prompts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from learnable_multipliers.evaluate.answers import boxed, concluded, marked_number
from learnable_multipliers.evaluate.items import (
    Choice,
    Fields,
    Item,
    OpenItem,
    checked,
    cloze,
    field,
)

_LETTERS = "ABCDEFGHIJ"
_THINK = "Let's think step by step."


def _question(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def hellaswag(line: Fields) -> Item:
    """Return an item of HellaSwag."""
    context = f"{field(line, 'activity_label', str)}: {field(line, 'ctx', str)}"
    return cloze(context, field(line, "endings", list[str]), field(line, "label", int))


def answered(line: Fields) -> Item:
    """Return an item of ARC or SciQ."""
    context = _question(field(line, "question", str))
    return cloze(context, field(line, "choices", list[str]), field(line, "label", int))


def mmlu_cloze(line: Fields) -> Item:
    """Return an item of MMLU whose answers are scored as texts."""
    context = _question(field(line, "question", str).strip())
    group = field(line, "subject", str)
    return cloze(context, field(line, "choices", list[str]), field(line, "label", int), group)


def mmlu_pro_cloze(line: Fields) -> Item:
    """Return an item of MMLU-Pro whose answers are scored as texts."""
    context = _question(field(line, "question", str).strip())
    options, group = field(line, "options", list[str]), field(line, "category", str)
    return cloze(context, options, field(line, "answer_index", int), group)


def openbookqa(line: Fields) -> Item:
    """Return an item of OpenBookQA."""
    context = field(line, "question", str)
    return cloze(context, field(line, "choices", list[str]), field(line, "label", int))


def piqa(line: Fields) -> Item:
    """Return an item of PIQA, its right answer still unknown."""
    answers = [field(line, "sol1", str), field(line, "sol2", str)]
    # The right choice is in another file.
    return cloze(_question(field(line, "goal", str)), answers, 0)


def winogrande(line: Fields) -> Item:
    """Return an item of WinoGrande: one ending after two sentences."""
    before, gap, after = field(line, "sentence", str).partition("_")
    if not gap:
        raise ValueError("sentence has no _ where an option goes")
    ending = after.strip()
    options = field(line, "option1", str), field(line, "option2", str)
    choices = (Choice(before + option, f" {ending}", len(ending)) for option in options)
    return Item(tuple(choices), field(line, "answer", int) - 1)


def blimp(line: Fields) -> Item:
    """Return a pair of sentences of BLiMP."""
    sentences = [field(line, "sentence_good", str), field(line, "sentence_bad", str)]
    return cloze("", sentences, 0, field(line, "UID", str))


def lambada(line: Fields) -> Item:
    """Return an item of LAMBADA: the last word."""
    context, _, word = field(line, "text", str).rpartition(" ")
    if not context:
        raise ValueError("text is a single word")
    return cloze(context, [word], 0)


# -- with letters ------------------------------------------------------------------------------


def _lettered(options: list[str]) -> str:
    if len(options) > len(_LETTERS):
        raise ValueError(f"there are {len(options)} answers, but only {len(_LETTERS)} letters")
    return "\n".join(f"{name}. {text}" for name, text in zip(_LETTERS, options, strict=False))


def mmlu(line: Fields) -> Item:
    """Return an item of MMLU whose letters are scored."""
    options, subject = field(line, "choices", list[str]), field(line, "subject", str)
    context = f"{field(line, 'question', str).strip()}\n{_lettered(options)}\nAnswer:"
    about = subject.replace("_", " ")
    preamble = f"The following are multiple choice questions (with answers) about {about}.\n\n"
    letters = _LETTERS[: len(options)]
    return cloze(context, letters, field(line, "label", int), subject, preamble)


def arc_dev(line: Fields) -> Item:
    """Return an item of ARC in the form in which it was published."""
    inner = field(line, "question", Fields)
    choices = field(inner, "choices", list[Fields])
    labels = [field(choice, "label", str) for choice in choices]
    right = field(line, "answerKey", str)
    if right not in labels:
        raise ValueError(f"answerKey is {right!r}, and the choices are {', '.join(labels)}")
    answers = [field(choice, "text", str) for choice in choices]
    return cloze(_question(field(inner, "stem", str)), answers, labels.index(right))


# -- generation --------------------------------------------------------------------------------


def gsm8k(line: Fields) -> OpenItem:
    """Return an item of GSM8K."""
    solution = field(line, "answer", str)
    answer = marked_number(solution)
    if answer is None:
        raise ValueError("answer has no number after ####")
    return OpenItem(_question(field(line, "question", str)), f" {solution}", answer)


def mmlu_pro(line: Fields) -> OpenItem:
    """Return an item of MMLU-Pro; as an example it includes the reasoning of its file."""
    options, category = field(line, "options", list[str]), field(line, "category", str)
    right = field(line, "answer_index", int)
    if not 0 <= right < len(options):
        raise ValueError(f"the right answer is choice {right}, counted from 0, of {len(options)}")
    reasons = field(line, "cot_content", str).removeprefix(f"A: {_THINK}")
    return OpenItem(
        f"Question:\n{field(line, 'question', str)}\nOptions:\n"
        f"{_lettered([option.strip() for option in options])}\nAnswer: {_THINK}",
        reasons,
        _LETTERS[right],
        group=category,
        preamble=(
            f"The following are multiple choice questions (with answers) about {category}. Think "
            'step by step and then finish your answer with "the answer is (X)" where X is the '
            "correct letter choice.\n"
        ),
        num_choices=len(options),
    )


def math(line: Fields) -> OpenItem:
    """Return an item of MATH."""
    solution = field(line, "answer", str)
    answer = boxed(solution)
    if answer is None:
        raise ValueError("answer has no \\boxed{...}")
    return _problem(field(line, "question", str), solution, answer)


def _problem(problem: str, solution: str, answer: str) -> OpenItem:
    return OpenItem(f"Problem:\n{problem}\n\nSolution:", f" {solution}", answer)


# Our own: the evaluation sets hold no problems outside of the test set.
MATH_EXAMPLES = tuple(
    _problem(problem, solution, boxed(solution) or "")
    for problem, solution in (
        (
            r"A rectangle is $3$ longer than it is wide, and its area is $40$. What is its "
            r"perimeter?",
            r"If the width is $w$, then $w(w + 3) = 40$, so $w^2 + 3w - 40 = (w - 5)(w + 8) = 0$. "
            r"A width is positive, so $w = 5$ and the length is $8$. The perimeter is $2(5 + 8) = "
            r"\boxed{26}$.",
        ),
        (
            r"Two fair dice are rolled. What is the probability that their sum is $9$?",
            r"There are $6 \cdot 6 = 36$ equally likely outcomes. The sum is $9$ for $(3,6)$, "
            r"$(4,5)$, $(5,4)$ and $(6,3)$, which are $4$ of them. The probability is "
            r"$\frac{4}{36} = \boxed{\frac{1}{9}}$.",
        ),
        (
            r"Find all real $x$ with $x^2 - 4x < 5$. Give your answer as an interval.",
            r"The inequality says that $x^2 - 4x - 5 = (x + 1)(x - 5) < 0$. A product is negative "
            r"if its factors have opposite signs, which is the case for $-1 < x < 5$. The answer "
            r"is $\boxed{(-1,5)}$.",
        ),
        (
            r"Simplify $\sqrt{72} - \sqrt{18}$.",
            r"We have $\sqrt{72} = \sqrt{36 \cdot 2} = 6\sqrt{2}$ and $\sqrt{18} = "
            r"\sqrt{9 \cdot 2} = 3\sqrt{2}$. The difference is $6\sqrt{2} - "
            r"3\sqrt{2} = \boxed{3\sqrt{2}}$.",
        ),
    )
)


def bbh_items(path: Path) -> list[OpenItem]:
    """Return the items of one subtask of BIG-Bench Hard, named after its file."""
    items = []
    try:
        examples = field(json.loads(path.read_bytes()), "examples", list[Fields])
        for number, example in enumerate(examples, 1):
            question, target = (field(example, name, str) for name in ("input", "target"))
            try:
                items.append(checked(_step_by_step(question, "", target, path.stem)))
            except ValueError as error:
                raise ValueError(f"example {number}: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    preamble, _ = _bbh_prompt(path.parent.parent / "cot-prompts" / f"{path.stem}.txt")
    return [replace(item, preamble=f"{preamble}\n\n") for item in items]


def bbh_examples(path: Path) -> list[OpenItem]:
    """Return the examples of one subtask, with their chains of thought."""
    examples = []
    for text in _bbh_prompt(path)[1]:
        # In one file the answer follows a space, in the others a new line.
        question, thinks, solution = text.partition(f"\nA: {_THINK}")
        if not thinks or not solution.strip():
            raise ValueError(f"{path}: an example has no step-by-step answer ({text[:40]!r})")
        question = question.removeprefix("Q: ")
        answer = concluded(solution) or ""
        examples.append(_step_by_step(question, solution.lstrip(), answer, path.stem))
    return examples


def _step_by_step(question: str, solution: str, answer: str, group: str) -> OpenItem:
    return OpenItem(f"Q: {question}\nA: {_THINK}\n", solution, answer, group)


def _bbh_prompt(path: Path) -> tuple[str, list[str]]:
    """Return the description of a subtask and its examples, after the canary line."""
    if not path.is_file():
        raise ValueError(f"there is no {path}, which holds the examples of {path.stem}")
    _, line, body = path.read_text(encoding="utf8").partition("-----\n")
    description, *examples = re.split(r"\n\n(?=Q: )", body.strip())
    if not line or not examples:
        raise ValueError(f"{path} has no examples (Q: ...) after a line of dashes")
    return description, examples
