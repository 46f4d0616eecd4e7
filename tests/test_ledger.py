"""The ledger, and what is published of it: claims with the verdicts that their records give."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from browser import open_in_browser
from learnable_multipliers.experiments import catalogue, ledger, page, presets, readings, record
from learnable_multipliers.experiments.claim import Claim, Judged, Test
from learnable_multipliers.experiments.drawing import canvas, curves
from learnable_multipliers.experiments.run import Run
from shuffling import made_up

ROOT = Path(__file__).parents[1]
ARMS = ("frozen", "vector")
GAP = Test(name="C2.gap", what="loss of frozen - vector", bound=0.05, opposite=-0.05, effect=0.2)
FLAT = replace(GAP, name="C3.flat", bound=0.3, opposite=0.25)


def runs(preset):
    plain = presets.base(preset, "llama")
    return [
        Run(
            labels={"arm": arm, "seed": seed},
            config=replace(plain, seed=seed, schedule=replace(plain.schedule, decay_factor=2 + i)),
        )
        for seed in presets.SEEDS[preset]
        for i, arm in enumerate(ARMS)
    ]


def analyse(records):
    gaps = readings.paired(
        lambda a, b: readings.loss(a) - readings.loss(b),
        *(readings.by_seed(records, arm=arm) for arm in ARMS),
    )
    return {"C2.gap": gaps, "C3.flat": gaps}


def plot(records):
    plots = []
    for early in (0.0, 0.5):
        caption = "Mean & range < 1 over seeds."
        with canvas(plots, "Loss", caption, x="step", y="training loss, nats per token") as axes:
            seeds = {arm: [x.record for x in readings.select(records, arm=arm)] for arm in ARMS}
            kept = {
                arm: [dict(zip(r.train["step"], r.train["loss"], strict=True)) for r in found]
                for arm, found in seeds.items()
            }
            curves(axes, kept, early=early)
    return plots


PROJECTOR = SimpleNamespace(
    TITLE="Scale of the projector",
    FIGURE="Fig. 1, top",
    CLAIMS=(
        Claim(id="C2", statement="Frozen is worse & <more>", where="Fig. 1", tests=(GAP,)),
        Claim(id="C3", statement="By a lot", where="Fig. 1", tests=(FLAT, GAP), note="A note."),
    ),
    runs=runs,
    analyse=analyse,
    plot=plot,
)
NOISE = SimpleNamespace(
    TITLE="Noise",
    FIGURE="Eq. 1",
    CLAIMS=(Claim(id="C1", statement="Noise", where="Eq. 1", tests=(replace(GAP, name="C1"),)),),
    runs=lambda preset: [],
    analyse=lambda records: {},
    plot=lambda records: [],
)
OWNED = {"C1", "C2", "C3", *(claim.id for claim in ledger.ELSEWHERE)}
REST = SimpleNamespace(
    TITLE="The rest",
    FIGURE="All others",
    CLAIMS=tuple(
        Claim(id=each, statement="A claim", where="Somewhere", tests=(replace(GAP, name=each),))
        for each in ledger.IDS
        if each not in OWNED
    ),
    runs=lambda preset: [],
    analyse=lambda records: {},
    plot=lambda records: [],
)


def world(labels, noise):
    loss = 3.5 + 0.2 * (labels["arm"] == "frozen") + noise.gauss(0, 0.003)
    return {"loss": loss, "train": {"step": [1.0, 300.0, 600.0], "loss": [9.0, 4.0, loss]}}


@pytest.fixture
def two(monkeypatch):
    """Two experiments, and one that owns all other claims."""
    experiments = {"projector": PROJECTOR, "noise": NOISE, "rest": REST}
    monkeypatch.setattr(catalogue, "MODULES", dict.fromkeys(experiments, ""))
    monkeypatch.setattr(catalogue, "BEYOND", {})
    monkeypatch.setattr(catalogue, "load", experiments.__getitem__)
    return experiments


@pytest.fixture
def folder(two, tmp_path):
    """The records of one of them, one run diverged."""
    (tmp_path / "runs").mkdir()
    for each in made_up(PROJECTOR, world):
        record.append(tmp_path / "runs" / "projector.jsonl", each.record)
    return tmp_path / "runs"


def verdicts(records):
    return {entry.claim.id: entry.verdict for entry in ledger.verdicts({"projector": records})}


def test_claims_are_judged_by_their_own_experiment(two):
    found = verdicts(made_up(PROJECTOR, world))
    assert list(found) == [f"C{number}" for number in range(1, 25)]
    assert found.pop("C2") == "reproduced"
    # Of its two tests, the gap is reproduced and the larger bound contradicted.
    assert found.pop("C3") == "contradicted"
    assert set(found.values()) == {"not run"}


def test_without_records_nothing_was_run(two):
    assert set(verdicts([]).values()) == {"not run"}


def test_records_of_another_definition_do_not_count(two):
    records = made_up(PROJECTOR, world)
    for ledger_of in ({"C3": PROJECTOR.CLAIMS[1].hash}, {"C2": "0" * 12}, {}):
        old = [replace(x, record=replace(x.record, ledger=ledger_of)) for x in records]
        entry = next(x for x in ledger.verdicts({"projector": old}) if x.claim.id == "C2")
        assert entry.verdict == "not run"
        assert entry.judged[0].n == 0
        assert "6 records are from before the claim was changed" in entry.notes[0]


def test_a_seed_with_an_old_record_is_left_out_alone(two):
    records = made_up(PROJECTOR, world)
    records[0] = replace(records[0], record=replace(records[0].record, ledger={}))
    entry = next(x for x in ledger.verdicts({"projector": records}) if x.claim.id == "C2")
    assert (entry.verdict, sorted(entry.judged[0].by_seed)) == ("underpowered", [1, 2])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["C1", "C2", "C3"], "claims C1 have two owners"),
        (["C2", "C3", "C25"], "claims C25 are none of C1 to C24"),
        (["C2"], "claims C3 have no owner"),
    ],
)
def test_ids_are_of_the_paper_and_owned_once(two, monkeypatch, ids, message):
    claims = tuple(replace(PROJECTOR.CLAIMS[0], id=each) for each in ids)
    monkeypatch.setattr(PROJECTOR, "CLAIMS", claims)
    with pytest.raises(ValueError, match=message):
        ledger.verdicts({})


def test_every_claim_of_the_paper_has_an_owner_and_is_not_run_without_records():
    """Of the experiments as they are: `verdicts` refuses a ledger with gaps."""
    entries = ledger.verdicts({})
    assert {entry.verdict for entry in entries} == {"not run"}
    untested = {entry.claim.id for entry in entries if not entry.claim.tests}
    assert untested == {claim.id for claim in ledger.ELSEWHERE}
    named = [judged.test.name for entry in entries for judged in entry.judged]
    assert len(set(named)) == len(named)


def test_claims_without_runs_name_tests_and_results_that_exist():
    named = 0
    for claim in ledger.ELSEWHERE:
        for path, test in re.findall(r"(tests/\w+\.py)::(\w+)", claim.note):
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE)
            named += 1
        for path in re.findall(r"(?:benchmarks|results)/[\w.-]+\.(?:py|json)", claim.note):
            assert (ROOT / path).is_file()
            named += 1
    assert named == 6


def test_cost_in_the_note_is_that_of_the_results():
    found = json.loads((ROOT / "results/optimizers-h200.json").read_text())["training"]
    cost = found["ours_over_plain_percent"]
    note = next(claim.note for claim in ledger.ELSEWHERE if claim.id == "C16")
    low, high = cost["interval_95"]
    assert f"{-cost['median']:.2f}% less" in note
    assert f"{low:.2f}% to {high:.2f}%" in note
    assert f"{found['explicit_over_plain_percent']:.1f}% more" in note


def test_json_holds_every_number(two):
    text = ledger.to_json(ledger.verdicts({"projector": made_up(PROJECTOR, world)}), "gpu")
    claim = next(each for each in json.loads(text)["claims"] if each["id"] == "C2")
    assert claim["verdict"] == "reproduced"
    assert claim["command"] == "lrm experiment projector --preset gpu --data DATA"
    (test,) = claim["tests"]
    assert (test["bound"], test["opposite"], test["effect"]) == (0.05, -0.05, 0.2)
    values = list(test["seeds"].values())
    assert test["mean"] == pytest.approx(sum(values) / 3, rel=1e-5)
    assert test["interval"][0] < min(values) < max(values) < test["interval"][1]


def test_the_command_of_an_experiment_can_be_given_as_it_is():
    """On a GPU the headline is refused without requests, and the others with them."""
    data = "--preset gpu --data DATA"
    assert (
        ledger.command("headline", "gpu") == f"lrm experiment headline {data} --requests REQUESTS"
    )
    assert ledger.command("noise", "gpu") == f"lrm experiment noise {data}"
    assert "--requests" not in ledger.command("headline", "cpu")


def test_json_of_diverged_runs_stays_json(two):
    records = made_up(PROJECTOR, lambda labels, noise: {"loss": None})
    text = ledger.to_json(ledger.verdicts({"projector": records}), "gpu")
    claim = next(each for each in json.loads(text)["claims"] if each["id"] == "C2")
    assert claim["tests"][0]["seeds"] == {"0": "nan", "1": "nan", "2": "nan"}
    assert claim["tests"][0]["interval"] == ["-inf", "inf"]
    assert claim["verdict"] == "underpowered"


def test_report_is_written_beside_the_records_and_again_with_the_same_bytes(folder, tmp_path):
    (folder / "plots").mkdir()
    left, mine = folder / "plots" / "projector-7.svg", folder / "plots" / "mine.svg"
    for path in (left, mine):
        path.write_text("<svg/>")
    paths = page.write_report(folder, "gpu", tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in paths]
    assert names == [
        *("runs/claims.html", "runs/plots/projector-0.svg", "runs/plots/projector-1.svg"),
        *("claims.json", "README.md"),
    ]
    assert mine.exists()
    assert not left.exists()
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in page.write_report(folder, "gpu", tmp_path)] == first


def test_readme_has_every_claim_and_links_that_exist(folder, tmp_path):
    page.write_report(folder, "gpu", tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| C2 | Frozen is worse & <more> (Fig. 1) | **reproduced** |" in text
    assert "24 claims: 1 reproduced, 1 contradicted, 22 not run." in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 3
    assert all((tmp_path / link).is_file() for link in links)


def test_report_is_a_command(folder, ask):
    code, out, _ = ask("experiment", "report", "--preset", "gpu", "--out", folder, "--ledger", "l")
    assert code == 0
    assert [Path(line).name for line in out.splitlines()] == [
        *("claims.html", "projector-0.svg", "projector-1.svg", "claims.json", "README.md")
    ]
    assert all(Path(line).is_file() for line in out.splitlines())
    assert "**reproduced**" in Path("l/README.md").read_text()
    code, _, complaints = ask("experiment", "report", "--out", "nowhere")
    assert code == 1
    assert "there is no folder nowhere with records of runs: --out names it" in complaints


def test_report_without_records_says_not_run_everywhere(two, tmp_path):
    page.write_report(tmp_path, "gpu")
    claims = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert {claim["verdict"] for claim in claims} == {"not run"}
    assert not list(tmp_path.rglob("*.svg"))


def test_page_escapes_text_and_shows_each_plot(folder):
    page.write_report(folder, "gpu")
    text = (folder / "claims.html").read_text()
    assert "Frozen is worse &amp; &lt;more&gt;" in text
    assert "range &lt; 1" in text
    assert text.count("<svg") == 2
    assert "https:" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)


def test_the_protocol_is_that_of_the_records(folder):
    found = record.labelled(runs("gpu"), record.read_records(folder))
    lost = replace(found[0], record=replace(found[0].record, outcome="diverged", loss=None))
    sentences = " ".join(page.protocol([lost, *found[1:-1]], 6))
    assert "5 of 6 runs have a record (seeds 0, 1, 2)." in sentences
    settled = [presets.settling(run.config) for run in runs("gpu")]
    assert f"2 wd sum(lr) = {min(settled):.1f} to {max(settled):.1f}" in sentences
    assert sentences.endswith("Diverged: frozen seed=0.")
    other = replace(found[0], record=replace(found[0].record, data="other"))
    assert "different texts" in " ".join(page.protocol([other, *found[1:]], 6))


def test_the_protocol_says_where_the_code_changed_between_runs(folder):
    """Runs of other code are compared only by those who know of it."""
    commits = ["a" * 40, "a" * 40, f"{'b' * 40}-changed", None]
    found = record.labelled(runs("gpu"), record.read_records(folder))
    found = [
        replace(each, record=replace(each.record, commit=commit))
        for each, commit in zip(found, commits, strict=False)
    ]
    (sentence,) = (each for each in page.protocol(found, 6) if "source tree" in each)
    assert sentence == (
        "Of more than one source tree, by commit: aaaaaaa (2), bbbbbbb-changed (1), unknown (1)."
    )
    assert not any("source tree" in each for each in page.protocol(found[:2], 6))


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.401751, 0.006848, "0.4018 [0.3949, 0.4086]"),
        (-1.98, 0.12, "-1.98 [-2.10, -1.86]"),
        (31.2, 4.4, "31.2 [26.8, 35.6]"),
        (-0.000001, 0.004, "0.0000 [-0.0040, 0.0040]"),
        (3.0, 0.0, "3.0000 [3.0000, 3.0000]"),
        (2e-9, 1e-9, "2e-09 [1e-09, 3e-09]"),
    ],
)
def test_digits_follow_the_width_of_the_interval(mean, half, text):
    judged = Judged(
        test=GAP,
        by_seed={0: mean},
        mean=mean,
        low=mean - half,
        high=mean + half,
        verdict="reproduced",
    )
    assert page.numbers(judged) == text


def test_numbers_without_an_interval_are_given_by_seed():
    values = {"test": GAP, "mean": math.inf, "low": -math.inf, "high": math.inf}
    judged = Judged(by_seed={0: 0.25, 1: math.inf}, verdict="underpowered", **values)
    assert page.numbers(judged) == "0.25, inf (no interval)"
    assert page.numbers(replace(judged, by_seed={}, verdict="not run")) == "-"


@pytest.mark.slow
def test_a_browser_shows_the_claims_without_errors(folder, tmp_path):
    page.write_report(folder, "gpu")
    seen = open_in_browser((folder / "claims.html").read_text(), tmp_path)
    assert seen["errors"] == []
    assert seen["requests"] == 0
    assert len(seen["plots"]) == 2
    assert all(400 < width <= 500 and height > 100 for width, height in seen["plots"])
    assert seen["width"] <= 500
    assert all(width > 0 and height >= 9 for width, height in seen["texts"])
