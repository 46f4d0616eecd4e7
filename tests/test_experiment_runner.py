"""`lrm experiment`: every run once, whatever happens on the way."""

import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import small_experiment
from learnable_multipliers.cli import experiment as command
from learnable_multipliers.experiments import catalogue, runner
from learnable_multipliers.experiments.progress import Display
from learnable_multipliers.experiments.record import Record, append, read_file, read_records
from learnable_multipliers.experiments.run import Run
from learnable_multipliers.experiments.worker import Failure, Job, train
from learnable_multipliers.pretrain.cores import num_cores
from processes import start
from runs import damage

HERE = Path(__file__).parent
# What a run measures, apart from the clock.
SAME = ("config", "ledger", "outcome", "loss", "train", "held_out", "weights", "readings", "data")
COMMAND = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import time
from learnable_multipliers.cli import experiment as command
from learnable_multipliers.experiments import catalogue, runner
catalogue.MODULES = {{"small": "small_experiment"}}
append = runner.append
def first_alone(path, record):
    # However late the kill comes, it finds one record.
    if path.exists():
        time.sleep(600)
    append(path, record)
runner.append = first_alone
from learnable_multipliers.cli import main
main()
"""


@pytest.fixture
def small(monkeypatch):
    """A catalogue of two experiments of the same three runs."""
    modules = {"small": "small_experiment", "again": "small_experiment"}
    monkeypatch.setattr(catalogue, "MODULES", modules)
    monkeypatch.setattr(catalogue, "BEYOND", {})


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    """The records of three runs, trained one after another in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "MODULES", {"small": "small_experiment"})
        jobs = runner.missing(["small"], "cpu", data, {})
    folder = tmp_path_factory.mktemp("reference") / "run"
    return [train(job, folder) for job in jobs]


def measured(record):
    values = {name: getattr(record, name) for name in SAME}
    return values | {"config": values["config"] | {"runtime": None}}


class Watcher:
    """Notes what it hears, and may act on it."""

    def __init__(self, started=lambda job: None, ended=lambda job: None):
        self.found, self._started, self._ended = {}, started, ended

    def added(self, count):
        pass

    def started(self, job):
        self._started(job)

    def ended(self, job, found, seconds_left):
        self.found[job.run.in_words] = found
        self._ended(job)


def wait_for(condition, process=None, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert process is None or process.poll() is None
        time.sleep(0.02)


def children(pid):
    """Return the processes that have a parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = path.read_text().split(" (", 1)
        except OSError:
            continue
        if int(rest.rpartition(") ")[2].split()[1]) == pid:
            found.append(int(number))
    return found


# -- the command -------------------------------------------------------------------------------


def test_a_killed_command_goes_on_and_every_run_is_trained_once(
    data, tmp_path, reference, ask, small
):
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    words = ["experiment", "small", "--data", str(data), "--out", str(out), "--jobs", "1"]
    process = start(
        [sys.executable, "-c", COMMAND, *words], env=os.environ | {"TMPDIR": str(scratch)}
    )
    path = out / "small.jsonl"
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= 1, process)
    workers = children(process.pid)
    process.kill()
    process.wait()
    # Nothing is left of it: no process, no folder.
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert list(scratch.iterdir()) == []
    before = read_file(path)
    assert len(before) == 1
    # As if it had been killed while it wrote a line.
    path.write_bytes(path.read_bytes() + b'{"config": {"ou')
    code, text, _ = ask(*words)
    assert code == 0
    assert f"3 runs, {len(before)} of them have a record" in text
    found = read_file(path)
    assert found[: len(before)] == before
    assert list(map(measured, found)) == list(map(measured, reference))
    # Nothing is left to do, for another experiment with the same runs either.
    content = path.read_bytes()
    for name in ("small", "again", "all"):
        assert ask(*words[:1], name, *words[2:])[:2] == (0, "3 runs, 3 of them have a record\n")
    assert path.read_bytes() == content
    assert [each.name for each in sorted(out.glob("*.jsonl"))] == ["small.jsonl"]


def test_failures_are_told_and_the_others_go_on(data, tmp_path):
    """One worker at a time: a run that raises, one that is fine, one that is killed, a signal."""
    far = replace(small_experiment.run_of(1e-3).config.data, sequence_length=10**6)
    runs = [
        small_experiment.run_of(1e-3, data=far),
        *(small_experiment.run_of(lr) for lr in (2e-3, 4e-3, 5e-3)),
    ]
    jobs = [
        Job(experiment="small", run=runner.prepared(run, "cpu", data), ledger={}) for run in runs
    ]
    # The ranks of other tests may be alive.
    others = set(multiprocessing.active_children())
    workers = []

    def started(job):
        (worker,) = set(multiprocessing.active_children()) - others
        workers.append(worker.pid)
        if job is jobs[2]:
            os.kill(worker.pid, signal.SIGKILL)

    def ended(job):
        if job is jobs[2]:
            os.kill(os.getpid(), signal.SIGTERM)

    watcher = Watcher(started, ended)
    result = runner.train_missing(jobs, tmp_path, watcher, num_workers=1, num_threads=1)
    assert set(multiprocessing.active_children()) <= others
    # A failure may have spoilt its process; a run that is fine has not.
    assert workers[0] != workers[1] == workers[2]
    raised, fine, killed = watcher.found.values()
    assert isinstance(raised, Failure)
    assert raised.text.startswith("ValueError: ")
    assert "1000000" in raised.text
    assert isinstance(killed, Failure)
    assert killed.text.startswith("its process was killed (SIGKILL)")
    assert result.failures == [(jobs[0], raised), (jobs[2], killed)]
    assert isinstance(fine, Record)
    assert result.records == [fine] == list(read_records(tmp_path).values())
    assert fine.config["optimizer"]["lr"] == 2e-3
    assert (result.num_left, result.stopped_by) == (1, signal.SIGTERM)


def fake_training(monkeypatch, answer):
    def train_missing(jobs, out, watcher, **settings):
        return answer(jobs, out, settings)

    monkeypatch.setattr(runner, "train_missing", train_missing)


def test_a_failed_run_ends_the_command_with_an_error_that_names_it(ask, data, small, monkeypatch):
    fake_training(
        monkeypatch,
        lambda jobs, out, _: runner.Result(failures=[(jobs[1], Failure("ValueError: no"))]),
    )
    code, _, complaints = ask("experiment", "small", "--data", str(data))
    assert code == 1
    message = "1 run failed: small: lr=0.001 seed=0 (ValueError: no)"
    assert complaints.strip() == f"lrm experiment: {message}"


def test_a_stopped_command_says_what_is_left(ask, data, small, monkeypatch):
    fake_training(monkeypatch, lambda *_: runner.Result(num_left=2, stopped_by=signal.SIGTERM))
    code, text, _ = ask("experiment", "small", "--data", str(data))
    assert code == 128 + signal.SIGTERM
    assert "0 runs trained, 2 left: the same command continues with them" in text


def test_workers_of_the_cpu_preset_have_one_thread_each(ask, data, small, monkeypatch):
    seen = []
    fake_training(monkeypatch, lambda *given: seen.append(given) or runner.Result())
    for options in ([], ["--jobs", "3", "--seconds", "60"]):
        assert ask("experiment", "small", "--data", str(data), *options)[0] == 0
    settings = {"num_threads": 1, "follow_up": None, "known": []}
    assert seen[0][2] == {**settings, "num_workers": num_cores(), "seconds": 0.0}
    assert seen[1][2] == {**settings, "num_workers": 3, "seconds": 60.0}
    assert all(job.run.config.runtime.device == "cpu" for job in seen[0][0])
    assert runner.default_threads("gpu", 1) == num_cores()


def test_a_gpu_is_told_that_the_code_is_not_committed(ask, data, small, monkeypatch):
    fake_training(monkeypatch, lambda *_: runner.Result())
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    words = ("experiment", "small", "--data", str(data), "--preset")
    for preset, commit, count in (
        ("gpu", "a" * 40 + "-changed", 1),
        ("gpu", "a" * 40, 0),
        ("gpu", None, 0),
        ("cpu", "a" * 40 + "-changed", 0),
    ):
        monkeypatch.setattr(command, "commit", lambda commit=commit: commit)
        code, text, _ = ask(*words, preset)
        assert code == 0
        assert text.count("the package has changes that are not committed") == count


def test_an_experiment_may_ask_for_one_run_at_a_time():
    """The headline does: it compares times, and its models fill a GPU."""
    assert runner.default_jobs("gpu", ["noise"]) == runner.GPU_JOBS
    assert runner.default_jobs("gpu", ["noise", "headline"]) == 1
    assert runner.default_threads("gpu", 10**6) == 1


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("experiment", 2, "name experiments, or all; lrm experiment list shows them"),
        ("experiment smalll", 2, "no experiment 'smalll'; did you mean small?"),
        ("experiment xyz", 2, "no experiment 'xyz'; lrm experiment list shows them"),
        ("experiment small all", 2, "all stands alone"),
        ("experiment small --preset gpu", 1, "give the folder that lrm data prepare wrote"),
        ("experiment small --jobs -1", 1, "--jobs and --seconds must not be negative"),
        ("experiment small --data nowhere", 1, "no token dataset at nowhere"),
    ],
)
def test_what_cannot_be_run_is_rejected_in_words(ask, small, line, code, says):
    found, _, complaints = ask(*line.split())
    assert found == code
    assert says in complaints


def test_the_paper_is_printed_as_commands_and_nothing_is_trained(ask, small):
    code, text, complaints = ask("experiment", "small", "again", "--preset", "paper")
    assert (code, complaints) == (0, "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 6
    start = "torchrun --nproc-per-node 8 --no-python lrm train "
    assert all(line.startswith(start) for line in lines)
    assert " --out runs/small/lr=0.004-seed=0 " in lines[0]
    assert list(Path().iterdir()) == []


def test_the_list_counts_runs_and_their_records(ask, small, reference):
    Path("experiments").mkdir()
    append(Path("experiments/small.jsonl"), reference[0])
    code, text, _ = ask("experiment", "list")
    assert code == 0
    table, _, said = text.partition("\n\n")
    assert said == "Records in experiments; others with --out.\n"
    rows = [line.split("  ") for line in table.splitlines()]
    assert [[cell.strip() for cell in row if cell] for row in rows[1:]] == [
        [name, "Fig. 0", "C0", "1 of 3", "Loss by learning rate"] for name in ("small", "again")
    ]


def test_records_of_other_data_are_not_mixed_with_new_ones(ask, small, data, reference):
    Path("experiments").mkdir()
    append(Path("experiments/small.jsonl"), replace(reference[0], data="other"))
    code, _, complaints = ask("experiment", "small", "--data", str(data))
    assert code == 1
    assert "1 of the runs have records of other data" in complaints


def test_damaged_data_are_rejected_before_a_run_is_started(ask, small, data, monkeypatch):
    shutil.copytree(data, "copy")
    damage(next(Path("copy").glob("train*.bin")))
    fake_training(monkeypatch, lambda *_: pytest.fail("something was trained"))
    code, _, complaints = ask("experiment", "small", "--data", "copy")
    assert code == 1
    assert "copy/train" in complaints


def test_two_commands_do_not_write_to_one_folder(ask, small, data):
    with runner.locked(Path("experiments")):
        code, _, complaints = ask("experiment", "small", "--data", str(data))
    assert code == 1
    assert "another process is writing records to experiments" in complaints


def test_runs_that_follow_from_records_are_trained_by_the_same_command(
    ask, data, tmp_path, reference, monkeypatch
):
    """A module with `follow_up`: after its first run another rate, and none after that."""
    first, second, _ = small_experiment.runs("cpu")
    module = type(sys)("following_experiment")
    module.TITLE, module.FIGURE, module.CLAIMS = "Following", "none", ()
    module.runs = lambda preset: []

    def follow_up(preset, records, failed):
        known = records.get(first.key)
        return [first] if known is None or known.loss is None else [first, second]

    module.follow_up = follow_up
    monkeypatch.setitem(sys.modules, "following_experiment", module)
    monkeypatch.setattr(catalogue, "MODULES", {})
    monkeypatch.setattr(catalogue, "BEYOND", {"following": "following_experiment"})
    words = ["experiment", "following", "--data", str(data), "--out", str(tmp_path / "out")]
    code, text, complaints = ask(*words)
    assert (code, complaints) == (0, "")
    assert [line.split()[0] for line in text.splitlines()] == ["1", "1/2", "2/2"]
    found = read_file(tmp_path / "out" / "following.jsonl")
    assert [record.key for record in found] == [first.key, second.key]
    assert [record.loss for record in found] == [record.loss for record in reference[:2]]
    assert ask(*words)[:2] == (0, "2 runs, 2 of them have a record\n")


def test_evaluations_on_the_way_leave_a_run_as_it_is(data, tmp_path):
    """The headline evaluates some of the arms that it compares more often than others."""
    run = small_experiment.run_of(1e-3)
    found = []
    for every in (0, 5):
        log = replace(run.config.log, evaluate_every=every)
        changed = replace(run, config=replace(run.config, log=log))
        job = Job(experiment="small", run=runner.prepared(changed, "cpu", data), ledger={})
        found.append(train(job, tmp_path / "run"))
    once, often = found
    assert once.held_out["step"] == [12.0]
    assert often.held_out["step"] == [5.0, 10.0, 12.0]
    # To the bit.
    for name in ("loss", "train", "weights", "readings"):
        assert getattr(once, name) == getattr(often, name)


# -- what is missing ---------------------------------------------------------------------------


def test_runs_that_experiments_share_are_asked_for_once(small, data, reference):
    jobs = runner.missing(["again", "small"], "cpu", data, {})
    assert [job.run.key for job in jobs] == [record.key for record in reference]
    assert {job.experiment for job in jobs} == {"again"}
    done = {reference[1].key: reference[1]}
    left = runner.missing(["small"], "cpu", data, done)
    assert [job.run.labels["lr"] for job in left] == [4e-3, 2e-4]


def test_a_run_carries_all_claims_as_they_are_defined_when_it_is_made(small, data, monkeypatch):
    (claim,) = small_experiment.CLAIMS
    more = replace(claim, id="C00")
    other = type(sys)("other_experiment")
    other.CLAIMS, other.runs = (more,), lambda preset: []
    monkeypatch.setitem(sys.modules, "other_experiment", other)
    monkeypatch.setitem(catalogue.MODULES, "other", "other_experiment")
    for job in runner.missing(["small"], "cpu", data, {}):
        assert job.ledger == {"C0": claim.hash, "C00": more.hash}


def test_runs_from_before_a_claim_changed_are_repeated_when_asked_for(
    ask, small, data, reference, monkeypatch
):
    Path("experiments").mkdir()
    for record in reference[:2]:
        append(Path("experiments/small.jsonl"), record)
    append(Path("experiments/small.jsonl"), replace(reference[2], ledger={"C0": "before"}))
    records = read_records(Path("experiments"))
    assert runner.missing(["small"], "cpu", data, records) == []
    (job,) = runner.missing(["small"], "cpu", data, records, again=True)
    assert job.run.labels["lr"] == 2e-4
    text = ask("experiment", "small", "--data", str(data))[1]
    assert "small: 1 records are from before C0 was defined as it is now" in text
    assert "--again repeats" in text


# -- the order ---------------------------------------------------------------------------------


def jobs_of(*shapes):
    run = small_experiment.run_of(1e-3)
    return [
        Job(
            experiment="small",
            run=Run(
                labels={"number": number, "seed": 0},
                config=replace(run.config, model=replace(run.config.model, num_layers=layers)),
            ),
            ledger={},
        )
        for number, layers in enumerate(shapes)
    ]


def test_a_worker_goes_on_with_what_it_has_compiled():
    jobs = [
        replace(job, run=runner.prepared(job.run, "gpu", Path("data")))
        for job in jobs_of(1, 2, 1, 2)
    ]
    assert runner.next_job(jobs, None) is jobs[0]
    assert runner.next_job(jobs, jobs[1].compiled) is jobs[1]
    assert runner.next_job(jobs[:1] + jobs[2:], jobs[1].compiled) is jobs[3]
    assert runner.next_job(jobs[2:3], jobs[1].compiled) is jobs[2]
    assert runner.next_job([], None) is None
    # Nothing is compiled on a CPU, and runs stay in order.
    jobs = [replace(job, run=runner.prepared(job.run, "cpu", None)) for job in jobs]
    assert runner.next_job(jobs, jobs[1].compiled) is jobs[0]


def test_a_seed_is_completed_before_a_worker_goes_on_with_what_it_has_compiled():
    first, other = (
        replace(job, run=runner.prepared(job.run, "gpu", Path("data"))) for job in jobs_of(1, 2)
    )
    later = replace(other, run=replace(other.run, labels={**other.run.labels, "seed": 1}))
    elsewhere = replace(other, experiment="another")
    assert runner.next_job([first, other], other.compiled) is other
    assert runner.next_job([first, later], other.compiled) is first
    assert runner.next_job([first, elsewhere], other.compiled) is first


def test_time_is_estimated_from_runs_of_the_same_model_by_their_tokens(reference):
    small, large = jobs_of(2, 3)
    (alike,) = [replace(reference[0], config=record_config(small), seconds=2.0)]
    other = replace(reference[0], config=record_config(large), seconds=7.0)
    tokens = small.run.config.schedule.tokens
    assert alike.tokens == tokens
    assert runner.durations(small, [alike, other]) == [2.0]
    # Three layers take longer than two, and a mixer longer than none.
    assert runner.durations(large, [alike]) == [pytest.approx(3.0)]
    hybrid = replace(large.run.config.model, ssm_size=64)
    mixer = replace(large, run=replace(large.run, config=replace(large.run.config, model=hybrid)))
    assert runner.durations(mixer, [alike]) == [pytest.approx(4.8)]
    # Runs of this call count first, then earlier ones of the model, then this call's of others.
    assert runner.durations(small, [alike], [replace(alike, seconds=9.0)]) == [2.0]
    assert runner.durations(large, [alike], [other]) == [7.0]
    assert runner.durations(mixer, [alike], [other]) == [pytest.approx(4.8)]
    assert runner.durations(mixer, [], [alike]) == [pytest.approx(4.8)]
    assert runner.seconds_left([small, large], [], 1, [alike, other]) == 9.0
    assert runner.durations(small, []) == []
    twice = replace(small.run.config.schedule, tokens=2 * tokens)
    longer = replace(
        small, run=replace(small.run, config=replace(small.run.config, schedule=twice))
    )
    assert runner.durations(longer, [alike]) == [4.0]
    assert runner.seconds_left([small, longer, large], [alike, other], 2) == (2 + 4 + 7) / 2
    assert runner.seconds_left([small], [], 2) is None


class Instant:
    """Workers that take ten seconds of a clock for each job, and no time."""

    now = 0.0
    compiled = None

    def __init__(self, record, failing=()):
        self.record, self.failing, self.jobs = record, failing, []

    def __call__(self, *_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def busy(self):
        return list(self.jobs)

    def idle(self):
        while len(self.jobs) < 2:
            yield self

    def submit(self, job):
        self.jobs.append(job)

    def completed(self, timeout):
        self.now += 10.0
        while self.jobs:
            job = self.jobs.pop(0)
            if job.run.labels["number"] in self.failing:
                yield job, Failure("ValueError: no")
                continue
            yield job, replace(self.record, config=record_config(job), seconds=10.0)


@pytest.mark.parametrize(
    ("seconds", "trained"), [(0.0, 6), (100.0, 6), (29.9, 4), (20.0, 4), (19.9, 2), (0.1, 2)]
)
def test_no_run_is_started_that_would_not_end_in_time(
    reference, tmp_path, monkeypatch, seconds, trained
):
    workers = Instant(reference[0])
    monkeypatch.setattr(runner, "Workers", workers)
    monkeypatch.setattr(runner.time, "monotonic", lambda: workers.now)
    jobs = jobs_of(*[2] * 6)
    watcher = Watcher()
    result = runner.train_missing(
        jobs, tmp_path, watcher, num_workers=2, num_threads=1, seconds=seconds
    )
    assert (len(result.records), result.num_left) == (trained, 6 - trained)
    assert list(watcher.found) == [job.run.in_words for job in jobs[:trained]]


def test_the_first_run_of_a_call_is_judged_by_earlier_ones(reference, tmp_path, monkeypatch):
    jobs = jobs_of(2, 2)
    known = [replace(reference[0], config=record_config(jobs[0]), seconds=30.0)]
    for seconds, trained in ((29.9, 0), (30.0, 2)):
        workers = Instant(reference[0])
        monkeypatch.setattr(runner, "Workers", workers)
        monkeypatch.setattr(runner.time, "monotonic", lambda workers=workers: workers.now)
        result = runner.train_missing(
            *(jobs, tmp_path, Watcher()),
            **{"num_workers": 2, "num_threads": 1, "seconds": seconds, "known": known},
        )
        assert (len(result.records), result.num_left) == (trained, 2 - trained)


def test_what_follows_is_asked_for_after_a_failure_too(reference, tmp_path, monkeypatch):
    """Other runs go on; one that failed is not repeated by the same call, but by the next."""
    first, failing, third = jobs_of(1, 2, 3)
    calls = []

    def follow_up(records, failed):
        calls.append((len(records), set(failed)))
        return [first, failing, *([third] if failing.run.key in failed else [])]

    for _ in range(2):
        monkeypatch.setattr(runner, "Workers", Instant(reference[0], failing=(1,)))
        watcher = Watcher()
        result = runner.train_missing(
            *([failing], tmp_path, watcher),
            **{"num_workers": 1, "num_threads": 1, "follow_up": follow_up},
        )
        assert [job for job, _ in result.failures] == [failing]
        assert set(watcher.found) == {job.run.in_words for job in (first, failing, third)}
        assert calls == [(0, {failing.run.key}), (1, {failing.run.key}), (2, {failing.run.key})]
        calls.clear()


@pytest.mark.parametrize("live", [False, True])
def test_progress_is_a_line_for_each_run_with_the_time_left(reference, live):
    job = jobs_of(2)[0]
    text = io.StringIO()
    console = Console(file=text, force_terminal=live, width=120)
    with Display(12, console) as display:
        for found, left in (
            (replace(reference[0], loss=1.23456, seconds=2.34), 65.0),
            (replace(reference[0], outcome="diverged", loss=None, seconds=2.0), None),
            (Failure("ValueError: no [b]markup[/b]"), 5.0),
        ):
            display.started(job)
            display.ended(job, found, left)
    lines = [
        " 1/12  small: number=0 seed=0  loss 1.2346  2.3 s",
        " 2/12  small: number=0 seed=0  diverged  2.0 s",
        " 3/12  small: number=0 seed=0  failed: ValueError: no [b]markup[/b]",
    ]
    if live:
        assert all(line in text.getvalue() for line in lines)
        assert re.search(r"3/12 \S*━.* 5s left", text.getvalue().splitlines()[-2])
    else:
        expected = [f"{lines[0]}  1m 05s left", lines[1], f"{lines[2]}  5s left"]
        assert text.getvalue().splitlines() == expected


def record_config(job):
    return json.loads(json.dumps(runner.to_dict(job.run.config)))
