"""Runs of an experiment are scored on benchmarks as `lrm evaluate` scores their checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest

import small_experiment
from evaluation_files import write_files
from learnable_multipliers.evaluate.results import read_results
from learnable_multipliers.experiments import catalogue, runner
from learnable_multipliers.experiments.record import from_line, read_records, to_line
from learnable_multipliers.experiments.worker import train
from runs import small_run, trained

TASKS = ("lambada", "blimp", "piqa")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("sets"), 20)


@pytest.fixture
def requests(ask, data, sets, place):
    """A file of requests in the tokens of the data."""
    shared = ("--eval-data", sets, "--tasks", *TASKS, "--requests-only", "requests.jsonl")
    assert ask("evaluate", data, *shared)[0] == 0
    return Path("requests.jsonl").resolve()


@pytest.fixture
def small(monkeypatch):
    """A catalogue of one experiment, which scores the first of its runs."""
    first, *others = small_experiment.runs("cpu")
    monkeypatch.setattr(catalogue, "MODULES", {"small": "small_experiment"})
    monkeypatch.setattr(catalogue, "BEYOND", {})
    monkeypatch.setattr(small_experiment, "BENCHMARKS", TASKS, raising=False)
    monkeypatch.setattr(
        small_experiment, "runs", lambda preset: [replace(first, scored=True), *others]
    )


def test_a_run_has_the_scores_of_its_last_checkpoint(ask, data, sets, requests, small, tmp_path):
    jobs = runner.missing(["small"], "cpu", data, {}, requests=requests)
    assert [job.requests for job in jobs] == [requests, None, None]
    record = train(jobs[0], tmp_path / "run")
    trained(replace(jobs[0].run.config, out=Path("same")))
    words = ("--eval-data", sets, "--tasks", *TASKS, "--device", "cpu", "--out", "expected")
    assert ask("evaluate", "same", *words)[0] == 0
    expected = read_results(Path("expected"))
    assert set(record.benchmarks) == set(TASKS)
    for name, result in expected.items():
        found = record.benchmarks[name]
        assert found["items"] == result.items
        for metric, estimate in result.metrics.items():
            assert found[metric] == pytest.approx(estimate.value, abs=1e-5), (name, metric)
    assert from_line(to_line(record)) == record
    # Scoring is not a part of what makes a run: the others have its losses.
    assert record.loss == train(replace(jobs[0], requests=None), tmp_path / "run").loss


def test_requests_that_do_not_fit_are_rejected_before_a_run(
    ask, data, sets, requests, small, place
):
    words = ("experiment", "small", "--data", data, "--requests")
    other = ("--eval-data", sets, "--tasks", "piqa", "--requests-only", "piqa.jsonl")
    assert ask("evaluate", data, *other)[0] == 0
    code, _, complaints = ask(*words, "piqa.jsonl")
    assert code == 1
    assert "piqa.jsonl holds no requests of lambada, blimp: make it with lrm evaluate" in complaints
    lines = requests.read_text().splitlines(keepends=True)
    at = lines[0].index('"tokenizer":"') + len('"tokenizer":"')
    lines[0] = lines[0][:at] + "0" * 64 + lines[0][at + 64 :]
    Path("other.jsonl").write_text("".join(lines))
    code, _, complaints = ask(*words, "other.jsonl")
    assert code == 1
    assert "other.jsonl was made with another tokenizer than that of" in complaints
    code, _, complaints = ask(*words, "none.jsonl")
    assert code == 1
    assert "there is no file of requests none.jsonl" in complaints
    assert not list(Path("experiments").glob("*.jsonl"))


def test_requests_other_than_those_of_earlier_records_are_rejected(
    ask, data, sets, requests, small, monkeypatch, place
):
    words = ("experiment", "small", "--data", data, "--jobs", "1", "--requests")
    assert ask(*words, requests)[0] == 0
    # One more run, and half of the questions.
    first, *others = small_experiment.runs("cpu")
    more = replace(first, config=replace(first.config, seed=99))
    monkeypatch.setattr(small_experiment, "runs", lambda preset: [first, *others, more])
    fewer = (
        "--eval-data",
        sets,
        "--tasks",
        *TASKS,
        "--limit",
        "10",
        "--requests-only",
        "few.jsonl",
    )
    assert ask("evaluate", data, *fewer)[0] == 0
    code, _, complaints = ask(*words, "few.jsonl")
    assert code == 1
    assert (
        "few.jsonl asks other questions of blimp, lambada, piqa than earlier records" in complaints
    )
    records = read_records(Path("experiments"))
    assert more.key not in records
    assert len(records) == 1 + len(others)


def test_requests_are_rejected_where_nothing_is_scored(ask, data, requests, place):
    code, _, complaints = ask("experiment", "projector", "--data", data, "--requests", requests)
    assert code == 1
    assert "none of these experiments scores its runs on benchmarks" in complaints
    assert "headline" in complaints


def test_the_headline_is_not_trained_without_requests(ask, data, place):
    code, _, complaints = ask("experiment", "headline", "--preset", "gpu", "--data", data)
    assert code == 1
    assert "are scored on benchmarks when they are trained, and at no other time" in complaints
    assert f"lrm evaluate {data} --eval-data FOLDER --tasks lambada" in complaints


def test_requests_made_from_data_are_those_of_a_run_on_them(ask, data, sets, requests, place):
    trained(small_run(data, Path("run"), steps=3))
    words = ("--eval-data", sets, "--tasks", *TASKS, "--requests-only", "again.jsonl")
    assert ask("evaluate", "run", *words)[0] == 0
    assert Path("again.jsonl").read_bytes() == requests.read_bytes()
