"""Made-up evaluation sets in the formats of the real ones: `write_files(folder)`."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

WORDS = [
    "red",
    "green",
    "blue",
    "stone",
    "river",
    "cloud",
    "seven",
    "paper",
    "glass",
    "wheel",
    "north",
    "salt",
    "engine",
    "lamp",
]


def write_files(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """Write `count` items for every task; right choices and texts are drawn at random."""
    draw = random.Random(seed)

    def text(words: int = 3) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    def choices(number: int = 4) -> list[str]:
        # All different: equal ones would share the credit.
        return [f"{text()} {place}" for place in range(number)]

    def answered(number: int = 4) -> dict[str, object]:
        label = draw.randrange(number)
        return {"question": f"{text()}?", "choices": choices(number), "label": label}

    def write(name: str, lines: Iterable[object]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    each = range(count)
    write(
        "hellaswag/hellaswag_val.jsonl",
        (
            {"activity_label": text(1), "ctx": text(), "endings": choices(), "label": n % 4}
            for n in each
        ),
    )
    write("arc/arc_challenge_test.jsonl", (answered(3 + n % 3) for n in each))
    write("arc/arc_easy_test.jsonl", (answered() for _ in each))
    write("mmlu/mmlu_test.jsonl", ({"subject": f"s{n % 3}", **answered()} for n in each))
    write(
        "mmlu_pro/test.jsonl",
        (
            {
                "question": text(),
                "options": choices(10),
                "answer_index": n % 10,
                "category": f"c{n % 2}",
                "cot_content": "",
            }
            for n in each
        ),
    )
    write("sciq/sciq_test_nosupport.jsonl", (answered() for _ in each))
    write("openbookqa/openbookqa_test.jsonl", (answered() for _ in each))
    write("piqa/valid.jsonl", ({"goal": text(), "sol1": text(), "sol2": text(4)} for _ in each))
    write("piqa/valid-labels.lst", (draw.randrange(2) for _ in each))
    write(
        "winogrande/winogrande_dev.jsonl",
        (
            {"sentence": f"{text()} _ {text()}.", "option1": "Ann", "option2": "Bo", "answer": a}
            for a in (draw.choice((1, 2)) for _ in each)
        ),
    )
    for uid in ("agreement", "island"):
        write(
            f"blimp/{uid}.jsonl",
            ({"sentence_good": text(5), "sentence_bad": text(4), "UID": uid} for _ in each),
        )
    write("lambada/lambada_test.jsonl", ({"text": text(8)} for _ in each))
    _write_written(folder, write, draw, text, choices, count)
    _write_examples(write, text, answered)
    return folder


def _write_written(folder: Path, write, draw, text, choices, count: int) -> None:
    """Write the generation tasks and their examples."""

    def example(category: str) -> dict[str, object]:
        right = draw.randrange(10)
        reasons = f"A: Let's think step by step. {text()}. The answer is ({'ABCDEFGHIJ'[right]})."
        line = {"question": f"{text()}?", "options": choices(10), "answer_index": right}
        return {**line, "category": category, "cot_content": reasons}

    write("mmlu_pro/validation.jsonl", (example(f"c{n % 2}") for n in range(10)))

    def sum_of_two() -> dict[str, str]:
        a, b = draw.randrange(900), draw.randrange(900)
        reasons = f"{text()}: {a} + {b} = <<{a}+{b}={a + b}>>{a + b}."
        return {"question": f"{text()} {a}, {b}?", "answer": f"{reasons}\n#### {a + b:,}"}

    write("gsm8k/test.jsonl", (sum_of_two() for _ in range(count)))
    write("gsm8k/train.jsonl", (sum_of_two() for _ in range(8)))

    def problem() -> dict[str, str]:
        top, bottom = draw.randrange(1, 90), draw.randrange(2, 90)
        answer = f"\\boxed{{\\frac{{{top}}}{{{bottom}}}}}"
        return {"question": f"{text()} ${top}:{bottom}$?", "answer": f"{text()} ${answer}$."}

    write("math500/test.jsonl", (problem() for _ in range(count)))
    for place, name in enumerate(("word_sorting", "navigate")):
        asked = [
            {"input": f"{text(5)} {n}", "target": draw.choice(("Yes", "No")) if place else text(2)}
            for n in range(count if place else count // 2)
        ]
        # One object on one line.
        write(f"bbh/bbh/{name}.json", [{"canary": "none", "examples": asked}])
        shown = (
            f"Q: {text(4)}\nA: Let's think step by step.\n{text(6)}. So the answer is {text(1)}."
            for _ in range(3)
        )
        prompt = folder / f"bbh/cot-prompts/{name}.txt"
        prompt.parent.mkdir(parents=True, exist_ok=True)
        prompt.write_text("\n\n".join((f"canary\n-----\nAbout {name}.", *shown)))


def _write_examples(write, text, answered) -> None:
    """Write items of other splits."""
    write("mmlu/mmlu_dev.jsonl", ({"subject": f"s{n % 3}", **answered()} for n in range(15)))
    write(
        "arc/ARC-Challenge-Dev.jsonl",
        (
            {
                "question": {
                    "stem": f"{text()}?",
                    "choices": [{"text": text(), "label": label} for label in "ABCD"],
                },
                "answerKey": "ABCD"[n % 4],
            }
            for n in range(6)
        ),
    )
