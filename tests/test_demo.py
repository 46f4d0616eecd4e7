"""The demo compares like with like: one start, one order of batches, one page about both."""

import io
import os
import shutil
import signal
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
from rich.console import Console

from browser import open_in_browser
from learnable_multipliers.cli import demo
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run
from runs import BATCH, LENGTH, small_run

STEPS = 6


class Watched(Trainer):
    """A trainer whose start and batches are written down."""

    seen: dict[str, "Watched"] = {}
    kill_at: int | None = None

    def __init__(self, config, observer=None):
        super().__init__(config, observer)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.batches: list[torch.Tensor] = []
        read = self.data.batch

        def batch(*arguments):
            self.batches.append(read(*arguments))
            return self.batches[-1]

        self.data.batch = batch
        self.seen[config.name] = self

    def steps(self):
        for step in super().steps():
            yield step
            if step == self.kill_at and self.config.name == "plain":
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def config(data):
    return small_run(data, Path("unused"), steps=STEPS)


@pytest.fixture(scope="module")
def made(config, tmp_path_factory):
    """Run a demo; return its folder, its trainers and what was on the screen."""
    out = tmp_path_factory.mktemp("made") / "demo"
    console = Console(file=io.StringIO(), width=100, force_terminal=True, record=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "Trainer", Watched)
        patch.setattr(Watched, "seen", {})
        assert demo.compare(config, out, console) == out / "report.html"
        return out, Watched.seen, console.export_text()


def last_loss(folder: Path) -> float:
    return [record for record in read_metrics(folder) if record["kind"] == "eval"][-1]["loss"]


def test_both_runs_start_alike_and_see_the_same_batches(made):
    out, trainers, _ = made
    plain, multiplied = trainers["plain"], trainers["multipliers"]
    assert plain.start.keys() == multiplied.start.keys()
    for name, value in plain.start.items():
        assert torch.equal(value, multiplied.start[name]), name
    assert len(plain.batches) == len(multiplied.batches) == STEPS
    for first, second in zip(plain.batches, multiplied.batches, strict=True):
        assert first.shape == (BATCH, LENGTH + 1)
        assert torch.equal(first, second)
    assert plain.plan.num_multipliers == 0
    assert multiplied.plan.num_multipliers > 0
    # Multipliers of 1 change nothing: the first step finds the same loss.
    losses = [
        next(r["loss"] for r in read_metrics(out / name) if r["kind"] == "train")
        for name in demo.RUNS
    ]
    assert losses[0] == losses[1]


def test_the_page_shows_both_losses_and_what_the_text_was(made, data):
    out, _, _ = made
    text = unescape((out / "report.html").read_text())
    for name in demo.RUNS:
        assert f"{last_loss(out / name):.4f}" in text
    assert f"train the same model on {data}, from the same start" in text


def test_both_runs_share_the_screen(made):
    out, _, screen = made
    for name in demo.RUNS:
        last = [row for row in screen.splitlines() if f"{name} " in row][-1]
        assert f"{STEPS}/{STEPS}" in last
        assert f"{last_loss(out / name):.3f}" in last
        # The time the run took.
        assert last.rstrip()[-7:-4].startswith("0:0")


@pytest.mark.slow
def test_a_browser_shows_the_page_without_errors(made, tmp_path):
    page = (made[0] / "report.html").read_text()
    seen = open_in_browser(page, tmp_path)
    assert seen["errors"] == []
    assert seen["requests"] == 0
    # Losses and their gap, rms against the prediction and over steps, multipliers, learning rate.
    assert len(seen["plots"]) == page.count("<svg") >= 6
    assert all(width > 300 and height > 100 for width, height in seen["plots"])
    assert seen["width"] <= 500


def test_a_demo_can_be_run_again(made, config, tmp_path):
    out = tmp_path / "demo"
    shutil.copytree(made[0], out)
    (out / "note.txt").write_text("mine")
    before = [last_loss(out / name) for name in demo.RUNS]
    assert demo.compare(replace(config, seed=1), out).is_file()
    assert (out / "note.txt").read_text() == "mine"
    after = [last_loss(out / name) for name in demo.RUNS]
    assert all(abs(first - second) > 1e-3 for first, second in zip(before, after, strict=True))


def test_ctrl_c_ends_without_a_report_and_the_next_demo_starts_afresh(
    made, config, tmp_path, monkeypatch
):
    out = tmp_path / "demo"
    shutil.copytree(made[0], out)
    monkeypatch.setattr(demo, "Trainer", Watched)
    monkeypatch.setattr(Watched, "kill_at", 3)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        demo.compare(config, out)
    assert signal.getsignal(signal.SIGINT) is handler
    # A page about runs that are no longer there would be a lie.
    assert not (out / "report.html").exists()
    monkeypatch.setattr(Watched, "kill_at", None)
    assert demo.compare(config, out).is_file()
    assert [last_loss(out / name) for name in demo.RUNS] == [
        last_loss(made[0] / name) for name in demo.RUNS
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def page_of_ours_edited(out: Path) -> str:
    page = out / "report.html"
    page.write_bytes(page.read_bytes().replace(b"</h1>", b" (my notes)</h1>", 1))
    return "report.html"


def page_of_lrm_report(out: Path) -> str:
    write_page(out / "report.html", [Run.load(out / "plain")], title="mine")
    return "report.html"


def page_of_somebody_else(out: Path) -> str:
    shutil.rmtree(out)
    out.mkdir()
    (out / "report.html").write_text("a year of work")
    return "report.html"


def page_that_is_a_folder(out: Path) -> str:
    (out / "report.html").unlink()
    (out / "report.html").mkdir()
    return "report.html"


def run_of_somebody_else(out: Path) -> str:
    (out / "multipliers" / ".lrm-demo").unlink()
    return "multipliers"


def run_that_is_a_link(out: Path) -> str:
    (out / "plain").rename(out / "elsewhere")
    (out / "plain").symlink_to("elsewhere")
    return "plain"


def notes_in_a_run(out: Path) -> str:
    (out / "plain" / "notes.txt").write_text("mine")
    return "plain/notes.txt"


@pytest.mark.parametrize(
    "change",
    [
        page_of_ours_edited,
        page_of_lrm_report,
        page_of_somebody_else,
        page_that_is_a_folder,
        run_of_somebody_else,
        run_that_is_a_link,
        notes_in_a_run,
    ],
)
def test_what_the_demo_did_not_write_stays_and_is_named_before_any_work(
    made, config, tmp_path, monkeypatch, change
):
    out = tmp_path / "demo"
    shutil.copytree(made[0], out)
    name = change(out)
    before = content(out)
    # Neither data nor models are touched.
    monkeypatch.setattr(demo, "TrainingData", None)
    monkeypatch.setattr(demo, "Trainer", None)
    with pytest.raises(ValueError, match="was not written by lrm demo and is kept: ") as error:
        demo.compare(config, out)
    assert str(error.value).startswith(f"{out / name} was not written by lrm demo")
    assert content(out) == before


def test_runs_of_lrm_train_are_not_replaced(config, tmp_path):
    Trainer(replace(config, out=tmp_path / "runs" / "plain")).train()
    before = content(tmp_path)
    with pytest.raises(ValueError, match="was not written by lrm demo and is kept"):
        demo.compare(config, tmp_path / "runs")
    assert content(tmp_path) == before


def test_a_page_written_by_somebody_else_during_the_demo_stays(config, tmp_path, monkeypatch):
    out = tmp_path / "demo"

    def train(configs, console, real=demo._train):
        real(configs, console)
        (out / "report.html").write_text("mine")

    monkeypatch.setattr(demo, "_train", train)
    with pytest.raises(ValueError, match="is kept: lrm report .*plain .*multipliers --out"):
        demo.compare(config, out)
    assert (out / "report.html").read_text() == "mine"
