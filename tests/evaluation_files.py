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
            {"question": text(), "options": choices(10), "answer_index": n % 10, "category": "c"}
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
    return folder
