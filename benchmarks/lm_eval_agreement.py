"""Compare `lrm evaluate` with EleutherAI's lm-eval on the same items and Hugging Face folder.

    python benchmarks/lm_eval_agreement.py MODEL --eval-data DIR --limit 50

lm-eval's own task definitions read the local items, rewritten to the fields they expect, so
prompts, tokens, scores and metrics are all its own; nothing is downloaded. Needs lm-eval 0.4 with
its dependencies, `math` too, in an environment of its own. SciQ gets an empty passage, and
HellaSwag's context is given whole: lm-eval changes the case of a part that the file does not mark.
Examples are the first of their file on both sides, those of MATH ours.

Generation tasks are compared twice: on what the model writes, and on made-up
texts of which half are right, since a small model is never right.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as default
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
import torch
import yaml
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from learnable_multipliers.evaluate.evaluation import evaluate, read_answer
from learnable_multipliers.evaluate.items import evenly
from learnable_multipliers.evaluate.models import load_encoder, load_models
from learnable_multipliers.evaluate.prompts import MATH_EXAMPLES
from learnable_multipliers.evaluate.requests import RequestSet, build_set
from learnable_multipliers.evaluate.results import Answer, Result, summarize_generated
from learnable_multipliers.evaluate.scoring import score
from learnable_multipliers.evaluate.tasks import TASKS

Line = dict[str, Any]
HOME = Path(lm_eval.__file__).parent / "tasks"
LETTERS = "ABCDE"


def answered(line: Line) -> Line:
    """Return a line with the fields of ARC and OpenBookQA."""
    if "answerKey" in line:
        # Examples are in the form in which ARC was published.
        published = line["question"]
        texts, labels = ([c[key] for c in published["choices"]] for key in ("text", "label"))
        right = labels.index(line["answerKey"])
        line = {"question": published["stem"], "choices": texts, "label": right}
    letters = LETTERS[: len(line["choices"])]
    choices = {"text": line["choices"], "label": list(letters)}
    stem = {"question": line["question"], "question_stem": line["question"]}
    return {**stem, "choices": choices, "answerKey": letters[line["label"]]}


def hellaswag(line: Line) -> Line:
    """Return a line as lm-eval has it after its own processing."""
    query = f"{line['activity_label']}: {line['ctx']}"
    return {"query": query, "choices": line["endings"], "label": line["label"]}


def sciq(line: Line) -> Line:
    """Return a line with an empty passage and the right answer apart."""
    names = ("correct_answer", "distractor1", "distractor2", "distractor3")
    wrong = [text for place, text in enumerate(line["choices"]) if place != line["label"]]
    texts = (line["choices"][line["label"]], *wrong)
    return {"question": line["question"], "support": "", **dict(zip(names, texts, strict=True))}


def mmlu(line: Line) -> Line:
    """Return a line with the fields of MMLU."""
    return {"question": line["question"], "choices": line["choices"], "answer": line["label"]}


def problem(line: Line) -> Line:
    """Return a line with the fields of MATH."""
    return {"problem": line["question"], "solution": line["answer"]}


@dataclass(frozen=True)
class Their:
    """lm-eval's definition of a task."""

    source: str
    """Its file; {} is the subject, where each has one of its own."""
    convert: Callable[[Line], Line] = dict
    """Its fields from ours."""
    replaced: Line = default(default_factory=dict)
    """Settings of it that are replaced."""
    examples: str | None = None
    """File of examples."""
    subject: str | None = None
    """Field that names a subject."""
    shots: int = 0
    own_examples: bool = False
    """Whether its examples are in the definition itself."""


FIRST = {"fewshot_config": {"sampler": "first_n"}}
MATH_SAMPLES = [
    {
        "problem": example.prompt.removeprefix("Problem:\n").removesuffix("\n\nSolution:"),
        "solution": example.solution.removeprefix(" "),
        "few_shot": "1",
    }
    for example in MATH_EXAMPLES
]
DEFINITIONS: dict[str, Their] = {
    "hellaswag": Their("hellaswag/hellaswag.yaml", hellaswag, {"process_docs": None}),
    "arc_easy": Their("arc/arc_easy.yaml", answered),
    "arc_challenge": Their("arc/arc_easy.yaml", answered),
    "arc_challenge 5-shot": Their(
        "arc/arc_easy.yaml", answered, FIRST, examples="arc/ARC-Challenge-Dev.jsonl", shots=5
    ),
    "mmlu_cloze": Their("mmlu/continuation/_continuation_template_yaml", mmlu),
    "sciq": Their("sciq/sciq.yaml", sciq, {"doc_to_text": "Question: {{question}}\nAnswer:"}),
    "piqa": Their("piqa/piqa.yaml"),
    "openbookqa": Their("openbookqa/openbookqa.yaml", answered),
    "winogrande": Their(
        "winogrande/default.yaml", lambda line: {**line, "answer": str(line["answer"])}
    ),
    "blimp": Their("blimp/_template_yaml"),
    # Without its perplexity, whose error is drawn at random.
    "lambada": Their(
        "lambada/lambada_openai.yaml",
        dict,
        {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]},
    ),
    "mmlu": Their(
        "mmlu/default/mmlu_{}.yaml",
        mmlu,
        examples="mmlu/mmlu_dev.jsonl",
        subject="subject",
        shots=5,
    ),
    "mmlu_pro": Their(
        "mmlu_pro/mmlu_pro_{}.yaml",
        examples="mmlu_pro/validation.jsonl",
        subject="category",
        shots=5,
    ),
    "bbh": Their("bbh/cot_fewshot/{}.yaml", subject="subtask", shots=3, own_examples=True),
    "gsm8k": Their("gsm8k/gsm8k.yaml", dict, FIRST, examples="gsm8k/train.jsonl", shots=5),
    "math500": Their(
        "minerva_math/minerva_math_algebra.yaml",
        problem,
        {"fewshot_config": {"sampler": "first_n", "samples": MATH_SAMPLES}},
        shots=4,
        own_examples=True,
    ),
}
METRICS = {
    "accuracy": (
        "acc,none",
        "exact_match,strict-match",
        "exact_match,get-answer",
        "exact_match,custom-extract",
        "math_verify,none",
    ),
    "normalized": ("acc_norm,none",),
    "flexible": ("exact_match,flexible-extract",),
}
SAYS = {
    "mmlu_pro": " So. The answer is ({}).",
    "bbh": "Because. So the answer is {}.",
    "gsm8k": " It is {0}.\n#### {0}",
    "math500": " We find $\\boxed{{{}}}$.",
}


class _Loader(yaml.SafeLoader):
    """Reads a definition; `!function file.name` becomes the function itself."""


def read_definition(path: Path) -> Line:
    """Return a definition with those that it includes."""

    def function(_: Any, node: yaml.ScalarNode) -> Any:
        module, _, attribute = node.value.rpartition(".")
        found: Line = {}
        exec(compile((path.parent / f"{module}.py").read_text(), module, "exec"), found)
        return found[attribute]

    _Loader.add_constructor("!function", function)
    found = yaml.load(path.read_text(), _Loader)
    included = found.pop("include", None)
    return read_definition(path.parent / included) | found if included else found


def definition(name: str, subject: str, folder: Path, most: int) -> Line:
    """Return lm-eval's definition of a task with our files in place of its data set."""
    their = DEFINITIONS[name]
    found = read_definition(HOME / their.source.format(subject.replace(" ", "_")))
    for key in ("tag", "training_split", "validation_split", "fewshot_split", "task_alias"):
        found.pop(key, None)
    if their.examples is None and not their.own_examples:
        found.pop("fewshot_config", None)
    files = {path.stem: str(path) for path in folder.glob("*.jsonl")}
    data = {
        "task": "local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "fewshot_split": "examples" if their.examples else None,
        "num_fewshot": their.shots,
    }
    if "generation_kwargs" in found:
        data["generation_kwargs"] = found["generation_kwargs"] | {"max_gen_toks": most}
    return {k: v for k, v in (found | data | their.replaced).items() if v is not None}


def lines_of(pattern: str, folder: Path, labels: str | None = None) -> list[Line]:
    """Return the lines of a task's files, in the order of its items."""
    found = []
    for path in sorted(folder.glob(pattern)):
        if path.suffix == ".json":
            examples = json.loads(path.read_text(encoding="utf8"))["examples"]
            found += [example | {"subtask": path.stem} for example in examples]
        else:
            lines = path.read_text(encoding="utf8").split("\n")
            found += [json.loads(line) for line in lines if line.strip()]
    if labels is not None:
        rights = (folder / labels).read_text().split()
        found = [line | {"label": int(label)} for line, label in zip(found, rights, strict=True)]
    return found


class Scribe(LM):
    """A model of lm-eval that writes what it is given."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = texts

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Return the texts, in the order of the items."""
        return [self._texts[request.doc_id] for request in requests]

    def loglikelihood(self, requests: list[Any], **_: Any) -> Any:
        """Not asked for."""
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def theirs(lm: Any, task: Line) -> tuple[Line, list[Line]]:
    """Return lm-eval's metrics, and its record of each item with the answers that it read."""
    found: Any = lm_eval.simple_evaluate(
        lm,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        # Of means it computes the standard error, unless told 0.
        bootstrap_iters=1,
        log_samples=True,
        verbosity="ERROR",
    )
    samples: dict[int, Line] = {}
    for sample in found["samples"]["local"]:
        kept = samples.setdefault(sample["doc_id"], sample | {"read": {}})
        kept["read"][sample["filter"]] = sample["filtered_resps"][0]
    return found["results"]["local"], [samples[index] for index in sorted(samples)]


def equal_answers(name: str, answers: list[Answer], samples: list[Line]) -> int:
    """Return the number of items in which both sides read the same answers, or none."""

    def plain(answer: str) -> str | None:
        if name == "gsm8k":
            # What lm-eval leaves out when it compares numbers.
            answer = answer.replace(",", "").replace("$", "").removesuffix(".")
        return None if answer == "[invalid]" else answer

    return sum(
        list(answer.read.values()) == [plain(read) for read in sample["read"].values()]
        for answer, sample in zip(answers, samples, strict=True)
    )


def joined(rows: list[tuple[int, Line]], metric: str) -> list[float] | None:
    """Return the mean and standard error of a metric of lm-eval over all subjects."""
    keys = [key for key in METRICS[metric] if key in rows[0][1]]
    if not keys:
        return None
    count = sum(size for size, _ in rows)
    value = sum(size * values[keys[0]] for size, values in rows) / count
    if len(rows) > 1:
        # From the sums of zeros and ones.
        return [value, (value * (1 - value) / (count - 1)) ** 0.5]
    return [value, rows[0][1][keys[0].replace(",", "_stderr,")]]


def compared(result: Result, rows: list[tuple[int, Line]]) -> Line:
    """Return both sides' metrics, ours first."""
    found = {}
    for metric in METRICS:
        values = joined(rows, metric)
        if metric in result.metrics and values is not None:
            estimate = result.metrics[metric]
            found[metric] = [estimate.value, values[0]]
            found[f"{metric}_error"] = [estimate.error, values[1]]
    return found


def by_subject(name: str, folder: Path, limit: int) -> dict[str, list[int]]:
    """Return the places of the items to ask, by subject."""
    task, their = TASKS[name.split()[0]], DEFINITIONS[name]
    lines = lines_of(task.file, folder, task.labels)
    chosen: dict[str, list[int]] = {}
    for place in evenly(range(len(lines)), limit):
        subject = lines[place][their.subject] if their.subject else ""
        chosen.setdefault(subject, []).append(place)
    return chosen


def agreement(name: str, options: argparse.Namespace, lm: Any) -> Line:
    """Return what both sides make of the same items of a task."""
    task, their = TASKS[name.split()[0]], DEFINITIONS[name]
    encoder, _ = load_encoder(options.model)
    (loaded,) = load_models(options.model, device=torch.device("cpu"), dtype="float32")
    all_items = task.items(
        options.eval_data, shots=their.shots, max_new_tokens=options.max_new_tokens
    )
    lines = lines_of(task.file, options.eval_data, task.labels)
    examples = lines_of(their.examples, options.eval_data) if their.examples else []
    rows, samples, marked, marks, items = [], [], [], [], []
    for subject, places in by_subject(name, options.eval_data, options.limit).items():
        with tempfile.TemporaryDirectory() as folder:
            shown = [e for e in examples if not subject or e[str(their.subject)] == subject]
            for file, chosen in (("test", [lines[p] for p in places]), ("examples", shown)):
                if chosen:
                    text = "".join(json.dumps(their.convert(line)) + "\n" for line in chosen)
                    (Path(folder) / f"{file}.jsonl").write_text(text)
            settings = definition(name, subject, Path(folder), options.max_new_tokens)
            asked = [all_items[place] for place in places]
            values, found = theirs(lm, settings)
            rows.append((len(asked), values))
            samples += found
            if task.generation is not None:
                # Right, or as right as the answer to the next question is.
                answers = [asked[(n + n % 2) % len(asked)].answer for n, _ in enumerate(asked)]
                texts = [SAYS[name].format(answer) for answer in answers]
                marked += texts
                marks.append((len(asked), theirs(Scribe(texts), settings)[0]))
            items += asked
    built = build_set({task.name: items}, encoder, shots={task.name: their.shots})
    longest = options.max_length or loaded.max_length
    record: Line = {"task": name, "items": len(items), "shots": their.shots}
    found = evaluate(loaded, built, max_length=longest)
    if task.generation is None:
        pairs = [(c.context, c.continuation) for item in items for c in item.choices]
        record |= likelihoods(name, loaded.model, built, samples, longest, pairs)
        return record | compared(found.results[task.name], rows)
    texts = [answer.text for answer in found.answers[task.name]]
    if name != "math500":
        # Of MATH, lm-eval keeps no answer apart from the text.
        record["equal_answers"] = equal_answers(name, found.answers[task.name], samples)
    made_up = [read_answer(p, text) for p, text in zip(built.prompts, marked, strict=True)]
    return record | {
        "equal_prompts": sum(
            item.prompt == s["arguments"][0][0] for item, s in zip(items, samples, strict=True)
        ),
        "equal_texts": sum(t == s["resps"][0][0] for t, s in zip(texts, samples, strict=True)),
        **compared(found.results[task.name], rows),
        "made_up": compared(summarize_generated(built.prompts, made_up, items=""), marks),
    }


def likelihoods(
    name: str,
    model: Any,
    built: RequestSet,
    samples: list[Line],
    longest: int | None,
    pairs: list[tuple[str, str]],
) -> Line:
    """Return how far apart the log-likelihoods are, and how many requests have the same text."""
    found = [s.log_likelihood for s in score(model, built.requests, max_length=longest)]
    other = [float(r[0][0]) for sample in samples for r in sample["resps"]]
    asked = [tuple(arguments[:2]) for sample in samples for arguments in sample["arguments"]]
    equal = sum(a == b for a, b in zip(sorted(pairs), sorted(asked), strict=True))
    if name == "sciq":
        # Its right answer stands last, ours anywhere.
        found, other = sorted(found), sorted(other)
    return {
        "requests": len(found),
        "equal_requests": equal,
        "largest_difference": max(abs(a - b) for a, b in zip(found, other, strict=True)),
    }


def main() -> None:
    """Print both sides' metrics and the largest difference between log-likelihoods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--eval-data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--tasks", nargs="+", default=list(DEFINITIONS), choices=DEFINITIONS)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, help="also write the records here, beside other tasks'")
    options = parser.parse_args()
    lm = HFLM(
        str(options.model),
        device="cpu",
        dtype="float32",
        batch_size=8,
        max_length=options.max_length,
    )
    records = {}
    if options.out is not None and options.out.is_file():
        records = {r["task"]: r for r in json.loads(options.out.read_text())["tasks"]}
    for name in options.tasks:
        records[name] = agreement(name, options, lm)
        print(json.dumps(records[name]), flush=True)
        if options.out is not None:
            tasks = [records[name] for name in DEFINITIONS if name in records]
            about = {"lm_eval": lm_eval.__version__, "torch": torch.__version__, "tasks": tasks}
            options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
