"""Compare `lrm evaluate` with EleutherAI's lm-eval on the same items and Hugging Face folder.

    python benchmarks/lm_eval_agreement.py MODEL --eval-data DIR --limit 50

lm-eval's own task definitions read the local items, rewritten to the fields they expect, so
prompts, tokens, scores and metrics are all its own; nothing is downloaded. Needs lm-eval 0.4 with
its dependencies, in an environment of its own. SciQ gets an empty passage, and HellaSwag's context
is given whole: lm-eval changes the case of a part that the file does not mark.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from learnable_multipliers.evaluate.items import Item, evenly
from learnable_multipliers.evaluate.models import load_encoder, load_models
from learnable_multipliers.evaluate.requests import build
from learnable_multipliers.evaluate.results import Result, summarize
from learnable_multipliers.evaluate.scoring import score
from learnable_multipliers.evaluate.tasks import TASKS

Line = dict[str, Any]
HOME = Path(lm_eval.__file__).parent / "tasks"
LETTERS = "ABCDE"


def answered(line: Line) -> Line:
    """Return a line with the fields of ARC and OpenBookQA."""
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


# Ours -> lm-eval's definition, its fields from ours, and settings of it that are replaced.
DEFINITIONS: dict[str, tuple[str, Callable[[Line], Line], Line]] = {
    "hellaswag": ("hellaswag/hellaswag.yaml", hellaswag, {"process_docs": None}),
    "arc_easy": ("arc/arc_easy.yaml", answered, {}),
    "arc_challenge": ("arc/arc_easy.yaml", answered, {}),
    "mmlu": ("mmlu/continuation/_continuation_template_yaml", mmlu, {}),
    "sciq": (
        "sciq/sciq.yaml",
        sciq,
        {"doc_to_text": "Question: {{question}}\nAnswer:"},
    ),
    "piqa": ("piqa/piqa.yaml", dict, {}),
    "openbookqa": ("openbookqa/openbookqa.yaml", answered, {}),
    "winogrande": (
        "winogrande/default.yaml",
        lambda line: {**line, "answer": str(line["answer"])},
        {},
    ),
    "blimp": ("blimp/_template_yaml", dict, {}),
    # Without its perplexity, whose error is drawn at random.
    "lambada": (
        "lambada/lambada_openai.yaml",
        dict,
        {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]},
    ),
}
METRICS = {"accuracy": "acc,none", "normalized": "acc_norm,none"}


class _Loader(yaml.SafeLoader):
    """Reads a definition; `!function file.name` becomes an absolute one."""


def definition(name: str, items: Path) -> Line:
    """Return lm-eval's definition of a task with our file in place of its data set."""
    source, _, replaced = DEFINITIONS[name]
    path = HOME / source

    def function(_: Any, node: yaml.ScalarNode) -> Any:
        module, _, attribute = node.value.rpartition(".")
        found: Line = {}
        exec(compile((path.parent / f"{module}.py").read_text(), module, "exec"), found)
        return found[attribute]

    _Loader.add_constructor("!function", function)
    found = yaml.load(path.read_text(), _Loader)
    for key in ("tag", "include", "training_split", "validation_split", "test_split"):
        found.pop(key, None)
    found.pop("fewshot_split", None)
    found.pop("fewshot_config", None)
    data = {
        "task": f"local_{name}",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(items)}},
        "test_split": "test",
        "num_fewshot": 0,
    }
    return {k: v for k, v in (found | data | replaced).items() if v is not None}


def lines_of(name: str, folder: Path) -> list[Line]:
    """Return the lines of a task's files, in the order of its items."""
    task = TASKS[name]
    texts = [path.read_text(encoding="utf8") for path in sorted(folder.glob(task.file))]
    found = [json.loads(line) for text in texts for line in text.split("\n") if line.strip()]
    if task.labels is not None:
        labels = (folder / task.labels).read_text().split()
        found = [line | {"label": int(label)} for line, label in zip(found, labels, strict=True)]
    return found


def ours(
    model: Path, name: str, items: list[Item], max_length: int | None
) -> tuple[Result, list[float]]:
    """Return our result and the log-likelihood of every request."""
    encoder, _ = load_encoder(model)
    (loaded,) = load_models(model, device=torch.device("cpu"), dtype="float32")
    asked = build(name, items, encoder)
    scores = score(loaded.model, asked, max_length=max_length or loaded.max_length)
    result = summarize(asked, scores, items="", normalized=TASKS[name].normalized)
    return result, [score.log_likelihood for score in scores]


def main() -> None:
    """Print both sides' metrics and the largest difference between log-likelihoods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--eval-data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--tasks", nargs="+", default=list(DEFINITIONS), choices=DEFINITIONS)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    theirs = HFLM(
        str(options.model),
        device="cpu",
        dtype="float32",
        batch_size=8,
        max_length=options.max_length,
    )
    records = []
    for name in options.tasks:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.jsonl"
            convert = DEFINITIONS[name][1]
            chosen = evenly(lines_of(name, options.eval_data), options.limit)
            path.write_text("".join(json.dumps(convert(line)) + "\n" for line in chosen))
            found: Any = lm_eval.simple_evaluate(
                theirs,
                tasks=[definition(name, path)],
                task_manager=TaskManager(include_defaults=False),
                # Of means it computes the standard error, unless told 0.
                bootstrap_iters=1,
                log_samples=True,
                verbosity="ERROR",
            )
        items = evenly(TASKS[name].items(options.eval_data), options.limit)
        result, likelihoods = ours(options.model, name, items, options.max_length)
        samples = sorted(found["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])
        their_likelihoods = [float(r[0][0]) for sample in samples for r in sample["resps"]]
        if name == "sciq":
            # Its right answer stands last, ours anywhere.
            likelihoods, their_likelihoods = sorted(likelihoods), sorted(their_likelihoods)
        pairs = zip(likelihoods, their_likelihoods, strict=True)
        record: Line = {
            "task": name,
            "items": len(items),
            "requests": len(likelihoods),
            "largest_difference": max(abs(a - b) for a, b in pairs),
        }
        values = found["results"][f"local_{name}"]
        for metric, key in METRICS.items():
            if metric in result.metrics and key in values:
                estimate = result.metrics[metric]
                record[metric] = [estimate.value, values[key]]
                record[f"{metric}_error"] = [estimate.error, values[key.replace(",", "_stderr,")]]
        records.append(record)
        print(json.dumps(record), flush=True)
    if options.out is not None:
        about = {"lm_eval": lm_eval.__version__, "torch": torch.__version__, "tasks": records}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
