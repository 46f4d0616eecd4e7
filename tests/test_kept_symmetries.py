"""The symmetries that a run finds are kept for the next one, exactly."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import learnable_multipliers as lrm
from learnable_multipliers._checksum import add_checksum
from learnable_multipliers.pretrain.config import OptimizerConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer import symmetries as kept
from learnable_multipliers.pretrain.trainer.build import make_optimizer, make_plan
from learnable_multipliers.symmetry import Symmetries
from learnable_multipliers.symmetry._serialization import (
    _members,
    _runs,
    from_json_data,
    to_json_data,
)
from runs import HYBRID, LLAMA

MODELS = {
    name: replace(
        model,
        vocab_size=23,
        hidden_size=10,
        num_layers=1,
        head_dim=4,
        intermediate_size=9,
        ssm_size=size,
        ssm_head_dim=4,
        ssm_state_size=3,
    )
    for name, model, size in [("hybrid", HYBRID, 8), ("llama", LLAMA, 0)]
}


def planned(name: str) -> lrm.Plan:
    return make_plan(build(MODELS[name]), OptimizerConfig())


@pytest.fixture(scope="module")
def searched() -> dict[str, Symmetries]:
    return {name: lrm.find_symmetries(build(MODELS[name]), planned(name)) for name in MODELS}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "symmetries"


@pytest.fixture
def searches(searched, monkeypatch):
    """Answer searches from those made once; return how many there were."""
    count = []

    def search(model, plan):
        count.append(plan)
        return searched["hybrid" if model.config.has_ssm else "llama"]

    monkeypatch.setattr(kept, "find_symmetries", search)
    return count


def everything(symmetries: Symmetries) -> list[object]:
    """Return all there is in them, to compare; tensors compare entry by entry."""
    terms = [
        (s.kind, s.num_members, t.axis, t.power, t.members.dtype, t.members.tolist())
        for s in symmetries
        for t in s.terms
    ]
    counts = [len(s.terms) for s in symmetries]
    silent = list(symmetries.silent.items())
    return [terms, counts, symmetries.nullity, silent, symmetries.unconfirmed]


@given(st.lists(st.integers(-1, 5)))
def test_runs_stand_for_any_numbers(numbers):
    assert _members(_runs(torch.tensor(numbers, dtype=torch.int64))).tolist() == numbers


def test_channels_heads_and_whole_matrices_are_a_run_or_a_few():
    assert _runs(torch.arange(500)) == [[0, 1, 500]]
    assert _runs(torch.zeros(500, dtype=torch.int64)) == [[0, 0, 500]]
    assert _runs(torch.arange(3).repeat_interleave(4)) == [[0, 0, 4], [1, 0, 4], [2, 0, 4]]


@pytest.mark.parametrize("name", MODELS)
def test_symmetries_come_back_from_json_as_they_were(name, searched):
    again = from_json_data(json.loads(json.dumps(to_json_data(searched[name]))))
    assert everything(again) == everything(searched[name])
    assert str(again) == str(searched[name])


def test_entries_that_were_not_reached_and_open_questions_are_kept_too(searched):
    axis = searched["llama"][0].terms[0].axis
    open_ones = replace(searched["llama"], silent={axis: 3}, unconfirmed=("a pair, in layer 1",))
    again = from_json_data(json.loads(json.dumps(to_json_data(open_ones))))
    assert everything(again) == everything(open_ones)


@pytest.mark.parametrize("name", MODELS)
def test_the_next_run_reads_what_the_first_one_found(name, searched, folder, searches):
    first = kept.symmetries_of(MODELS[name], planned(name))
    second = kept.symmetries_of(MODELS[name], planned(name))
    assert len(searches) == 1
    assert everything(first) == everything(second) == everything(searched[name])


@pytest.mark.parametrize("name", MODELS)
def test_drift_along_kept_symmetries_is_the_same_number(name, searched, folder, searches):
    kept.symmetries_of(MODELS[name], planned(name))
    again = kept.symmetries_of(MODELS[name], planned(name))
    optimizer, _ = make_optimizer(build(MODELS[name]), OptimizerConfig())
    fresh, read = lrm.Monitor(optimizer, searched[name]), lrm.Monitor(optimizer, again)
    for state in optimizer.state.values():
        for kind in {"row", "col"} & set(state):
            state[kind].mul_(torch.rand_like(state[kind]) + 0.5)
    numbers = fresh.health().metrics()
    assert numbers["drift/largest"] > 0.1
    assert read.health().metrics() == numbers


def test_the_weights_of_a_run_do_not_matter(searched):
    other = lrm.find_symmetries(build(MODELS["llama"], seed=1), planned("llama"))
    assert everything(other) == everything(searched["llama"])


def damaged(content: bytes) -> bytes:
    return content.replace(b'"power": 1.0', b'"power": 2.0', 1)


def cut_off(content: bytes) -> bytes:
    return content[: len(content) // 2]


def of_another_model(content: bytes) -> bytes:
    return json.dumps(add_checksum({"key": "0" * 64, "symmetries": {}})).encode()


def no_json(content: bytes) -> bytes:
    return b"\x80\x04"


@pytest.mark.parametrize("wrong", [damaged, cut_off, of_another_model, no_json])
def test_a_file_that_is_wrong_is_replaced(wrong, searched, folder, searches):
    kept.symmetries_of(MODELS["llama"], planned("llama"))
    (path,) = folder.iterdir()
    good = path.read_bytes()
    path.write_bytes(wrong(good))
    assert path.read_bytes() != good
    again = kept.symmetries_of(MODELS["llama"], planned("llama"))
    assert (len(searches), path.read_bytes()) == (2, good)
    assert everything(again) == everything(searched["llama"])


def test_a_cache_that_cannot_be_written_to_costs_a_search(searched, folder, searches):
    folder.parent.write_text("a file where the cache folder would be")
    for _ in range(2):
        again = kept.symmetries_of(MODELS["llama"], planned("llama"))
        assert everything(again) == everything(searched["llama"])
    assert len(searches) == 2


def test_several_runs_at_once_leave_one_whole_file(searched, folder, searches):
    with ThreadPoolExecutor(8) as pool:
        plans = [planned("llama")] * 16
        results = list(pool.map(kept.symmetries_of, [MODELS["llama"]] * 16, plans))
    assert all(everything(result) == everything(searched["llama"]) for result in results)
    assert len(list(folder.iterdir())) == 1
    count = len(searches)
    kept.symmetries_of(MODELS["llama"], planned("llama"))
    assert len(searches) == count


def test_model_multipliers_and_code_make_another_search_and_rates_do_not(
    folder, searches, monkeypatch
):
    model, plan = MODELS["llama"], planned("llama")
    kept.symmetries_of(model, plan)
    rates = [replace(entry, lr_scale=2.0, weight_decay=0.3) for entry in plan.entries]
    kept.symmetries_of(model, replace(plan, entries=tuple(rates)))
    assert len(searches) == 1
    kept.symmetries_of(replace(model, freeze_norms=True), plan)
    assert len(searches) == 2
    kept.symmetries_of(model, make_plan(build(model), OptimizerConfig(placement="scalar")))
    assert len(searches) == 3
    monkeypatch.setattr(kept, "_source", lambda: "another version")
    kept.symmetries_of(model, plan)
    assert len(searches) == 4
    assert len(list(folder.iterdir())) == 4
