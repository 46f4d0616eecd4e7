"""`lrm evaluate` on runs, checkpoints and Hugging Face folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from evaluation_files import write_files
from learnable_multipliers.evaluate import models, requests, results, tasks
from learnable_multipliers.pretrain.export import export
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, LLAMA, small_run

TASKS = ("piqa", "blimp", "lambada")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Train a hybrid: its checkpoints are those of steps 5, 10 and 12."""
    out = tmp_path_factory.mktemp("runs") / "run"
    Trainer(small_run(data, out, model=HYBRID)).train()
    return out


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("sets"), 20)


@pytest.fixture
def copied(run, place):
    shutil.copytree(run, "run")
    return Path("run")


def metrics(folder):
    """Return the values of all metrics in a folder of results."""
    found = results.read_results(folder)
    return {(n, m): e.value for n, r in found.items() for m, e in r.metrics.items()}


def test_a_run_is_evaluated_into_its_folder(ask, copied, sets):
    code, table, _ = ask("evaluate", "run", "--eval-data", sets, "--device", "cpu")
    assert code == 0
    folder = copied / "evaluations" / "step-00000012"
    found = results.read_results(folder)
    assert len(found) == 11
    assert "run, steps 12" in table
    for name, result in found.items():
        (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        estimate = result.metrics["bits per byte"]
        assert f"{estimate.value:.3f} +- {estimate.error:.3f}" in line
        # Bytes as tokens, hardly trained: near the 8 bits of a uniform guess over 257.
        assert 5 < estimate.value < 11
    assert max(map(len, table.splitlines())) <= 120


def test_a_checkpoint_and_an_export_have_the_scores_of_the_run(ask, copied, sets):
    pytest.importorskip("transformers")
    export(copied, Path("hf"))
    shared = ("--eval-data", sets, "--tasks", *TASKS, "--device", "cpu")
    places = {"run": "a", "run/checkpoints/step-00000012": "b", "hf": "c"}
    for source, out in places.items():
        assert ask("evaluate", source, *shared, "--out", out)[0] == 0
    expected = metrics(Path("a"))
    assert len(expected) == 8
    assert metrics(Path("b")) == expected
    for key, value in metrics(Path("c")).items():
        assert value == pytest.approx(expected[key], abs=1e-5), key


def test_requests_scored_elsewhere_give_the_same_results(ask, copied, sets):
    shared = ("--eval-data", sets, "--tasks", *TASKS)
    code, told, _ = ask("evaluate", "run", *shared, "--requests-only", "requests.jsonl")
    assert (code, told) == (0, "requests.jsonl: 140 requests\n")
    assert not (copied / "evaluations").exists()
    assert ask("evaluate", "run", *shared, "--out", "a")[0] == 0
    # Without evaluation sets, and without the tokenizer.
    (copied / "tokenizer.json").unlink()
    small = ("--batch-tokens", "64")
    assert ask("evaluate", "run", "--requests", "requests.jsonl", "--out", "b", *small)[0] == 0
    expected = metrics(Path("a"))
    for key, value in metrics(Path("b")).items():
        assert value == pytest.approx(expected[key], abs=1e-5), key
    code, _, told = ask("evaluate", "run", "--requests", "requests.jsonl", "--tasks", "sciq")
    assert (code, told) == (1, "lrm evaluate: requests.jsonl holds no requests of sciq")


def test_the_last_checkpoints_are_averaged_in_score(ask, copied, sets):
    shared = ("--eval-data", sets, "--tasks", *TASKS, "--limit", 10)
    saved = sorted((copied / "checkpoints").glob("step-*"))
    each = []
    for path in saved[-2:]:
        assert ask("evaluate", path, *shared)[0] == 0
        each.append(metrics(copied / "evaluations" / f"{path.name}-limit-10"))
    assert ask("evaluate", "run", "--last", 2, *shared)[0] == 0
    both = metrics(copied / "evaluations" / "step-00000012-last-2-limit-10")
    assert each[0] != each[1]
    for key, value in both.items():
        assert value == pytest.approx((each[0][key] + each[1][key]) / 2, abs=1e-5), key
    code, _, told = ask("evaluate", "run", "--last", 9, *shared)
    assert code == 1
    assert f"9 checkpoints were requested, but run/checkpoints holds {len(saved)}" in told


def test_other_precision_or_length_leaves_earlier_results_alone(ask, copied, sets):
    shared = ("--eval-data", sets, "--tasks", "piqa", "--device", "cpu")
    assert ask("evaluate", "run", *shared)[0] == 0
    folder = copied / "evaluations" / "step-00000012"
    before = (folder / "piqa.json").read_bytes()
    for words, name in (
        (("--dtype", "bfloat16"), "dtype-bfloat16"),
        (("--max-length", 40), "length-40"),
    ):
        assert ask("evaluate", "run", *shared, *words)[0] == 0
        assert (folder / "piqa.json").read_bytes() == before
        assert metrics(Path(f"{folder}-{name}")) != metrics(folder)


def test_two_models_are_compared_item_by_item(ask, copied, sets, data):
    Trainer(small_run(data, Path("other"), steps=3, model=LLAMA)).train()
    shared = ("--eval-data", sets, "--tasks", *TASKS)
    code, table, _ = ask("evaluate", "run", *shared, "--against", "other")
    assert code == 0
    folders = [
        Path(name) for name in ("run/evaluations/step-00000012", "other/evaluations/step-00000003")
    ]
    first, second = map(results.read_results, folders)
    lines = table[table.index("run minus other, paired by item") :]
    for name in TASKS:
        found = results.difference(first[name], second[name])["bits per byte"]
        assert f"{found.value:+.3f} +- {found.error:.3f}" in lines
    # Also from what was written, without scoring anything.
    code, again, _ = ask("evaluate", folders[0], "--against", folders[1])
    assert code == 0
    assert sorted(again[again.index("minus") :].split()) == sorted(
        lines[lines.index("minus") :].split()
    )


def test_nothing_is_asked_of_a_network(ask, copied, sets, monkeypatch):
    def refuse(*_):
        pytest.fail("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    pytest.importorskip("transformers")
    export(copied, Path("hf"))
    assert ask("evaluate", "hf", "--eval-data", sets, "--tasks", "piqa")[0] == 0


# -- files that are not there -----------------------------------------------------------------


def test_without_names_the_tasks_whose_files_are_there_are_evaluated(ask, copied, sets):
    shutil.copytree(sets, "sets")
    for name in ("arc", "mmlu", "mmlu_pro", "sciq", "openbookqa", "winogrande", "hellaswag"):
        shutil.rmtree(Path("sets", name))
    Path("sets/piqa/valid-labels.lst").unlink()
    shared = ("--eval-data", "sets", "--limit", 4)
    code, table, told = ask("evaluate", "run", *shared, "--out", "a")
    assert code == 0
    assert {*results.read_results(Path("a"))} == {"blimp", "lambada"}
    left_out, _, _ = told.partition("\n")
    assert left_out == (
        "lrm evaluate: left out, not in sets: hellaswag (hellaswag/hellaswag_val.jsonl), "
        "arc_challenge (arc/arc_challenge_test.jsonl), arc_easy (arc/arc_easy_test.jsonl), "
        "mmlu_cloze (mmlu/mmlu_test.jsonl), mmlu_pro_cloze (mmlu_pro/test.jsonl), "
        "sciq (sciq/sciq_test_nosupport.jsonl), piqa (piqa/valid-labels.lst), "
        "openbookqa (openbookqa/openbookqa_test.jsonl), "
        "winogrande (winogrande/winogrande_dev.jsonl)"
    )
    # Once, also where two models are scored.
    code, _, told = ask("evaluate", "run", *shared, "--out", "a", "--against", "run")
    assert (code, told.count("left out")) == (0, 1)


def test_a_named_task_needs_its_files(ask, copied, sets):
    shutil.copytree(sets, "sets")
    for name in ("mmlu/mmlu_dev.jsonl", "sciq/sciq_test_nosupport.jsonl"):
        Path("sets", name).unlink()
    others = [name for name in tasks.TASKS if name not in ("mmlu", "sciq")]
    code, _, told = ask("evaluate", "run", "--eval-data", "sets", "--tasks", "mmlu", "sciq", "piqa")
    assert (code, told) == (
        1,
        "lrm evaluate: sets holds no files of mmlu (mmlu/mmlu_dev.jsonl), sciq "
        "(sciq/sciq_test_nosupport.jsonl): unpack them there, or leave them out of --tasks (there "
        f"are the files of {', '.join(others)})",
    )
    # Without examples it does not need theirs.
    shared = ("--eval-data", "sets", "--limit", 4, "--tasks", "mmlu")
    assert ask("evaluate", "run", *shared, "--num-fewshot", 0)[0] == 0


def test_the_error_for_a_folder_without_files_names_those_it_lacks(ask, copied):
    Path("sets").mkdir()
    code, _, told = ask("evaluate", "run", "--eval-data", "sets")
    assert code == 1
    assert told.startswith(
        "lrm evaluate: sets holds the files of no task: looked for hellaswag/hellaswag_val.jsonl, "
        "arc/arc_challenge_test.jsonl, "
    )
    assert "blimp/*.jsonl, lambada/lambada_test.jsonl (docs/evaluate.md lists them)" in told
    assert not (copied / "evaluations").exists()


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("run", 2, "name the folder of the evaluation sets: --eval-data DIR"),
        ("nowhere", 1, "nowhere is neither a run, nor a checkpoint, nor a Hugg"),
        ("run --eval-data nowhere", 1, "nowhere is not a folder"),
        ("run --eval-data sets --tasks pika", 1, "no task 'pika'; did you mean piqa?"),
        ("nowhere --eval-data sets", 1, "nowhere is neither a run, nor a checkpoint, nor a Hugg"),
        ("run --eval-data sets --limit -1", 2, "--num-fewshot are at least 0, --last and"),
        ("run --eval-data sets --max-new-tokens 9", 2, "needs a generation task: name one with"),
        (
            "run --eval-data sets --tasks piqa --against no",
            1,
            "no is neither a run, nor a checkpoint",
        ),
        ("run --requests no.jsonl", 1, "there is no file of requests no.jsonl: write one with"),
        ("run --requests a --eval-data sets", 2, "--requests cannot be combined"),
        ("run --eval-data sets --device abacus", 1, "abacus cannot be used"),
        ("run/checkpoints/step-00000012 --eval-data sets --last 2", 1, "is one checkpoint: give"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(ask, copied, sets, line, code, says):
    shutil.copytree(sets, "sets")
    got, out, complaints = ask("evaluate", *line.split())
    assert (got, out) == (code, "")
    assert says in complaints
    assert len(complaints.strip().splitlines()) == 1
    assert not (copied / "evaluations").exists()


def test_a_run_without_checkpoints_says_so(ask, data, place, sets):
    Trainer(small_run(data, Path("run"))).close()
    # As in a run that was stopped before its first checkpoint.
    shutil.rmtree("run/checkpoints", ignore_errors=True)
    code, _, complaints = ask("evaluate", "run", "--eval-data", sets)
    assert code == 1
    assert complaints.startswith("lrm evaluate: run holds no checkpoint yet: a run saves one when")


def test_a_hugging_face_model_with_code_is_not_run(tmp_path):
    pytest.importorskip("transformers")
    described = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=" contains code, which lrm does not run: load it in Py"):
        next(models.load_models(tmp_path, device=torch.device("cpu"), dtype="float32"))


def test_requests_of_another_tokenizer_are_rejected(ask, copied, sets):
    built = ("--eval-data", sets, "--tasks", "piqa", "--requests-only", "r.jsonl")
    assert ask("evaluate", "run", *built)[0] == 0
    path = Path("r.jsonl")
    found = requests.read_requests(path)
    expected = json.loads((copied / "checkpoints/step-00000012/state.json").read_text())
    assert found.tokenizer == expected["tokenizer"]
    path.write_text(path.read_text().replace(expected["tokenizer"], "0" * 64))
    code, _, told = ask("evaluate", "run", "--requests", "r.jsonl")
    assert code == 1
    assert "uses a different tokenizer from the one that built the requests" in told


# -- generated answers ------------------------------------------------------------------------


SHORT = ("--max-new-tokens", 6, "--num-fewshot", 1, "--limit", 4, "--max-length", 2000)


def answers(folder):
    """Return what was written, by task."""
    return {
        path.name.partition(".")[0]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(Path(folder).glob("*.answers.jsonl"))
    }


def test_answers_in_writing_are_kept_with_the_results(ask, copied, sets):
    tasks = ("gsm8k", "bbh", "math500", "mmlu_pro", "mmlu", "arc_challenge")
    shared = ("--eval-data", sets, "--tasks", *tasks, *SHORT)
    code, table, _ = ask("evaluate", "run", *shared)
    assert code == 0
    folder = copied / "evaluations" / "step-00000012-shots-1-tokens-6-limit-4-length-2000"
    found = results.read_results(folder)
    assert set(found) == set(tasks)
    for name, result in found.items():
        (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        assert f" {result.shots} " in line
        assert result.shots == 1
        assert ("bits per byte" in result.metrics) == (name in ("mmlu", "arc_challenge"))
    written = answers(folder)
    assert set(written) == set(tasks[:4])
    for name, lines in written.items():
        assert [line["item"] for line in lines] == [0, 1, 2, 3]
        # Tokens are bytes here.
        assert all(1 <= len(line["text"].encode(errors="replace")) <= 18 for line in lines)
        assert found[name].accuracy == tuple(line["scores"]["accuracy"] for line in lines)
    assert max(map(len, table.splitlines())) <= 130


def test_answers_of_an_export_and_of_requests_elsewhere_are_those_of_the_run(ask, copied, sets):
    pytest.importorskip("transformers")
    export(copied, Path("hf"))
    shared = ("--eval-data", sets, "--tasks", "gsm8k", "bbh", *SHORT)
    for source, out in (("run", "a"), ("hf", "b")):
        assert ask("evaluate", source, *shared, "--out", out, "--device", "cpu")[0] == 0
    code, told, _ = ask("evaluate", "run", *shared, "--requests-only", "requests.jsonl")
    assert (code, told) == (0, "requests.jsonl: 8 requests\n")
    (copied / "tokenizer.json").unlink()
    asked = ("--requests", "requests.jsonl", "--max-length", 2000, "--batch-tokens", 1)
    assert ask("evaluate", "run", *asked, "--out", "c", "--device", "cpu")[0] == 0
    expected = answers("a")
    assert all(line["text"] for lines in expected.values() for line in lines)
    assert answers("c") == expected
    assert [[line["text"] for line in lines] for lines in answers("b").values()] == [
        [line["text"] for line in lines] for lines in expected.values()
    ]


def test_answers_of_checkpoints_are_averaged_in_score(ask, copied, sets):
    shared = ("--eval-data", sets, "--tasks", "gsm8k", *SHORT, "--device", "cpu")
    code, table, _ = ask("evaluate", "run", "--last", 2, *shared, "--out", "both")
    assert code == 0
    lines = answers("both")["gsm8k"]
    assert [(line["step"], line["item"]) for line in lines] == [
        (step, item) for step in (10, 12) for item in range(4)
    ]
    result = results.read_results(Path("both"))["gsm8k"]
    for item, score in enumerate(result.accuracy):
        each = [line["scores"]["accuracy"] for line in lines if line["item"] == item]
        assert score == sum(each) / 2
    assert "+- is the standard error over items of each item's mean over the checkpoints" in table


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--tasks piqa --num-fewshot 5", "piqa takes no examples: the evaluation sets have none"),
        (
            "--tasks bbh --max-length 1000",
            "bbh: an answer may have 1,024 tokens, and the model reads",
        ),
        ("--tasks gsm8k --num-fewshot 99", "gsm8k: 99 examples were requested, but there are 8"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(ask, copied, sets, line, says):
    shutil.copytree(sets, "sets")
    code, _, told = ask("evaluate", "run", "--eval-data", "sets", *line.split())
    assert code == 1
    assert says in told
    assert len(told.strip().splitlines()) == 1
