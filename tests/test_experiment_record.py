"""From the folder of a run to a line of a file, and back."""

import json
import lzma
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from learnable_multipliers._checksum import decode_line, encode_line
from learnable_multipliers.experiments import record as records
from learnable_multipliers.experiments.record import (
    CURVE_POINTS,
    SNAPSHOTS,
    VECTORS,
    Labelled,
    append,
    from_line,
    labelled,
    read_file,
    read_records,
    summarize,
    thinned,
    to_line,
)
from learnable_multipliers.experiments.run import Run, key_of
from learnable_multipliers.experiments.worker import Job, train
from learnable_multipliers.pretrain.config import (
    LogConfig,
    OptimizerConfig,
    SpikeConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.metrics.log import MetricLog, read_metrics
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import LLAMA, small_run


@pytest.fixture(scope="module")
def trainer(data, tmp_path_factory):
    """A run of 80 steps, logged at each; longer than a record has room for."""
    log = LogConfig(
        every=1,
        weights_every=4,
        evaluate_every=20,
        evaluate_tokens=640,
        sample_tokens=0,
        tensorboard=False,
        drift=False,
    )
    folder = tmp_path_factory.mktemp("run") / "run"
    run = Trainer(small_run(data, folder, steps=80, log=log, model=replace(LLAMA, num_layers=1)))
    assert run.train() == "finished"
    return run


def summary(trainer, **changes):
    config = replace(trainer.config, model=replace(trainer.config.model, vocab_size=0))
    given = {
        "outcome": "finished",
        "readings": trainer.monitor.health().readings,
        "ledger": {"C1": "abc"},
        "seconds": 1.5,
        "device": "cpu",
        "data": trainer.data.fingerprint,
        "commit": "abcdef",
    }
    return summarize(trainer.config.out, config, **(given | changes))


@pytest.fixture(scope="module")
def record(trainer):
    return summary(trainer)


# -- what is kept ------------------------------------------------------------------------------


def test_a_record_has_the_numbers_of_the_run(trainer, record):
    found = read_metrics(trainer.config.out)
    train = {each["step"]: each for each in found if each["kind"] == "train"}
    for name in ("loss", "lr", "grad_norm"):
        expected = [train[step][name] for step in record.train["step"]]
        assert record.train[name] == pytest.approx(expected, rel=1e-5)
    held_out = [each for each in found if each["kind"] == "eval"]
    assert record.held_out["step"] == [20, 40, 60, 80]
    assert record.loss == record.held_out["loss"][-1] == pytest.approx(held_out[-1]["loss"], 1e-5)
    assert record.bits_per_byte == pytest.approx(held_out[-1]["bits_per_byte"], rel=1e-5)
    assert record.tokens == trainer.tokens
    weights = {each["step"]: each for each in found if each["kind"] == "weights"}
    for each in record.weights:
        assert each["raw_rms"] == pytest.approx(weights[each["step"]]["raw_rms"], rel=1e-3)
    assert record.weights[-1]["roles"] == weights[80]["roles"]
    assert all("roles" not in each for each in record.weights[:-1])
    readings = {(r.name, r.part): r for r in trainer.monitor.health().readings}
    for each in record.readings:
        expected = readings[each["name"], each["part"]]
        assert each.keys() == asdict(expected).keys()
        assert each["measured"] == pytest.approx(expected.measured, rel=1e-3)


def test_curves_are_thinned_and_keep_both_ends(record):
    for series, most in ((record.train, CURVE_POINTS), (record.held_out, CURVE_POINTS)):
        assert all(len(values) == len(series["step"]) <= most for values in series.values())
    assert (record.train["step"][0], record.train["step"][-1]) == (1, 80)
    assert len(record.train["step"]) == CURVE_POINTS
    assert len(record.weights) == SNAPSHOTS
    assert (record.weights[0]["step"], record.weights[-1]["step"]) == (1, 80)
    assert thinned(list(range(100)), 3) == [0, 50, 99]
    assert thinned([1, 2], 3) == [1, 2]


def test_row_and_column_multipliers_are_kept_five_times_and_scalars_always(record, trainer):
    rows = [each["step"] for each in record.weights if any_of(each, "row")]
    assert len(rows) == VECTORS
    assert (rows[0], rows[-1]) == (1, 80)
    assert record.weights[-1]["multipliers"].keys() == record.weights[-1]["raw_rms"].keys() - {
        "lm_head.weight"
    }
    log = [each for each in read_metrics(trainer.config.out) if each["kind"] == "weights"]
    scalars = {"up": {"scalar": [2.0] * 7}, "down": {"row": [1.0] * 7, "scalar": [3.0] * 7}}
    for each in log:
        each["multipliers"] = scalars
    kept = records._with_few_vectors(log[:12])
    assert all(each["multipliers"]["up"] == scalars["up"] for each in kept)
    assert sum(any_of(each, "row") for each in kept) == VECTORS


def any_of(weights, kind):
    return any(kind in found for found in weights["multipliers"].values())


def test_a_record_has_no_paths_of_the_machine(trainer, record, tmp_path):
    assert str(tmp_path.parent) not in to_line(record).decode()
    assert record.config["data"]["path"] is None


def test_signals_and_drift_are_kept_without_what_is_large_or_known(tmp_path, trainer):
    log = MetricLog(tmp_path, tensorboard=False)
    log.log(1, {"kind": "health", "noise/matrices": 1.0})
    for step in range(2, 40):
        numbers = {"drift/Q and K": step / 3, "drift/largest": step, "noise/matrices": 1.0}
        log.log(step, {"kind": "health", "tokens": step, **numbers, "alarms": []})
    for step in (1, 2, 3):
        log.log(
            step,
            {
                "kind": "signals",
                "tokens": step,
                "activations": {"logits": step / 7},
                "rows": {"up": [1.0]},
                "alignment": {"up": [0.5]},
            },
        )
    log.close()
    found = summarize(
        tmp_path,
        trainer.config,
        outcome="diverged",
        readings=(),
        ledger={},
        seconds=1.0,
        device="cpu",
        data="",
    )
    assert [set(each) for each in found.signals] == [
        {"step", "activations"},
        {"step", "activations"},
        {"step", "activations", "rows", "alignment"},
    ]
    assert found.signals[0]["activations"]["logits"] == 0.1429
    assert found.loss is None
    assert len(found.drift) == SNAPSHOTS
    assert found.drift[0] == {"step": 2, "Q and K": 0.6667, "largest": 2}
    assert found.drift[-1] == {"step": 39, "Q and K": 13.0, "largest": 39}


def diverging(data, out, **changes):
    optimizer = OptimizerConfig(
        placement="none", lr=1e14, weight_decay=0.0, multiplier_weight_decay=0.0
    )
    return small_run(data, out, steps=20, model=LLAMA, optimizer=optimizer, **changes)


@pytest.mark.parametrize("spikes", [SpikeConfig(), SpikeConfig(max_skipped=4)])
def test_a_run_that_diverges_is_a_record_without_a_loss(data, tmp_path, spikes):
    run = Run(labels={"seed": 0}, config=diverging(data, tmp_path / "run", spikes=spikes))
    found = train(Job(experiment="small", run=run, ledger={}), tmp_path / "scratch")
    assert (found.outcome, found.loss, found.bits_per_byte) == ("diverged", None, None)
    assert math.isnan(found.train["loss"][-1])
    assert not (tmp_path / "scratch").exists()
    assert from_line(to_line(found)).outcome == "diverged"


# -- lines -------------------------------------------------------------------------------------


def test_a_record_survives_its_line(record):
    assert from_line(to_line(record)) == record
    assert to_line(record).count(b"\n") == 1


def test_numbers_that_json_lacks_survive_a_line(record):
    curve = {"step": [1.0, 2.0], "loss": [math.nan, -math.inf], "lr": [1.0, math.inf]}
    found = from_line(to_line(replace(record, train=curve, tokens_per_second=math.nan)))
    assert math.isnan(found.train["loss"][0])
    assert (found.train["loss"][1], found.train["lr"][1]) == (-math.inf, math.inf)
    assert math.isnan(found.tokens_per_second)


def changed(record, **changes):
    values = decode_line(to_line(record)) | changes
    return encode_line({name: value for name, value in values.items() if value is not ...})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda record: to_line(record).replace(b'"finished"', b'"finishes"'), "its crc32 does"),
        (lambda record: b'{"some": "JSON"}\n', "does not end with its crc32"),
        (lambda record: b"no JSON\n", "does not end with its crc32"),
        (lambda record: b"\n", "does not end with its crc32"),
        (lambda record: encode_line({"step": 1}), "the record has unknown keys: step"),
        (lambda record: changed(record, extra=1), "the record has unknown keys: extra"),
        (lambda record: changed(record, loss=...), "the record has no: loss"),
        (lambda record: changed(record, loss="low"), "the record.loss is 'low', not a number"),
        (
            lambda record: changed(record, config=record.config | {"sede": 1}),
            "config has unknown keys: sede",
        ),
    ],
)
def test_a_damaged_or_foreign_line_is_rejected_by_file_and_number(record, tmp_path, spoil, says):
    path = tmp_path / "noise.jsonl"
    path.write_bytes(to_line(record) + spoil(record) + to_line(record))
    with pytest.raises(ValueError, match=r"line 2 of .*noise\.jsonl is not a record") as error:
        read_records(tmp_path)
    assert says in str(error.value)


def test_a_setting_added_later_does_not_part_a_record_from_its_run(record):
    older = json.loads(json.dumps(record.config))
    del older["optimizer"]["momentum"], older["spikes"]
    found = from_line(changed(record, config=older))
    assert found.key == record.key == key_of(config_of(record))
    assert found.config == record.config


def test_a_record_from_before_a_field_was_added_is_read(record):
    found = from_line(changed(record, commit=..., ended=...))
    assert found == replace(record, commit=None, ended="")


def test_a_default_that_changes_later_does_not_change_a_record(record, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Later(TrainConfig):
        z_loss: float = 1.0

    monkeypatch.setattr(records, "TrainConfig", Later)
    found = from_line(to_line(record))
    assert found.key == record.key != key_of(replace(config_of(record), z_loss=Later().z_loss))
    assert found.config["z_loss"] == TrainConfig().z_loss


def config_of(record):
    return records.from_dict(records.TrainConfig, record.config)


# -- files -------------------------------------------------------------------------------------


def other(record, seed=0, **changes):
    config = replace(config_of(record), seed=seed)
    values = records.to_dict(config)
    return replace(record, config=values, key=key_of(config), **changes)


def test_of_two_records_of_a_run_the_newer_counts(record, tmp_path):
    for name, loss, ended in (("a", 1.0, "2026-01-02"), ("a", 2.0, "2026-01-03")):
        append(tmp_path / f"{name}.jsonl", replace(record, loss=loss, ended=ended))
    append(tmp_path / "b.jsonl", replace(record, loss=3.0, ended="2026-01-01"))
    append(tmp_path / "b.jsonl", other(record, seed=1))
    found = read_records(tmp_path)
    assert {key: found[key].loss for key in found} == {
        record.key: 2.0,
        other(record, seed=1).key: record.loss,
    }
    assert [each.loss for each in read_file(tmp_path / "a.jsonl")] == [1.0, 2.0]


@pytest.mark.parametrize("kept", [1, 1000, -1])
def test_a_line_cut_off_by_a_kill_is_dropped_and_written_over(record, tmp_path, kept):
    path = tmp_path / "noise.jsonl"
    second = other(record, seed=1)
    path.write_bytes(to_line(record) + to_line(second)[:kept])
    assert read_file(path) == [record]
    append(path, second)
    assert path.read_bytes() == to_line(record) + to_line(second)


def test_a_packed_file_is_read_and_a_damaged_one_refused(record, tmp_path):
    packed = lzma.compress(to_line(record))
    (tmp_path / "a.jsonl.xz").write_bytes(packed)
    append(tmp_path / "a.jsonl", other(record, seed=1))
    assert read_records(tmp_path).keys() == {record.key, other(record, seed=1).key}
    for content in (packed[:-20], b"text", packed[:60] + b"\0" + packed[61:]):
        (tmp_path / "a.jsonl.xz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.jsonl\.xz is damaged"):
            read_records(tmp_path)


def test_a_record_that_cannot_be_written_names_the_file(record, tmp_path):
    with pytest.raises(OSError, match=r"nowhere/a\.jsonl could not be written: No such file"):
        append(tmp_path / "nowhere" / "a.jsonl", record)


def test_a_folder_without_records_has_none(tmp_path):
    assert read_records(tmp_path) == read_records(tmp_path / "nowhere") == {}


def test_records_take_the_labels_of_the_experiment_that_reads_them(record):
    run = Run(labels={"arm": "plain", "seed": 0}, config=config_of(record))
    elsewhere = replace(run.config, out=Path("elsewhere"), data=replace(run.config.data, path=None))
    same = Run(labels={"arm": "control", "seed": 0}, config=elsewhere)
    longer = replace(run, config=replace(run.config, seed=5))
    found = labelled([longer, same, run], {record.key: record})
    assert found == [
        Labelled(labels=same.labels, record=record),
        Labelled(labels=run.labels, record=record),
    ]


def test_a_pipe_in_place_of_records_is_rejected_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "noise.jsonl")
    with pytest.raises(ValueError, match="noise.jsonl is not a plain file"):
        read_records(tmp_path)
