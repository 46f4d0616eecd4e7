"""Exponents over width are read from the runs, and judge muP's."""

from functools import partial
from random import Random
from typing import Any

import pytest

from learnable_multipliers.experiments import width_mup, width_scales
from learnable_multipliers.experiments.run import Labels
from learnable_multipliers.experiments.width_mup import WIDTHS
from shuffling import made_up, verdicts

_ROLES = ("query", "key", "value", "attention-out", "gate", "up", "down", "embedding", "head")
_SSM = ("ssm-z", "ssm-dt", "ssm-out")


def _world(
    labels: Labels,
    noise: Random,
    *,
    scalar: float = -0.9,
    alignment: float = -0.1,
    raw: float = 0.0,
) -> dict[str, Any]:
    """A world in which each of these goes as a power of width, and the output as their product."""
    width, hybrid = float(labels["width"]), labels["family"] == "hybrid"
    near = 1 + noise.gauss(0, 0.01)
    weight, multiplier = 0.05 * width**raw * near, 30 * width**scalar * near
    aligned = width**alignment / near
    output = multiplier * width * aligned * weight
    names = _ROLES + (_SSM if hybrid else ())
    activations = {
        "logits": output,
        "query_key": [output**2] * 2,
        "embedding": 1.0,
        "attention_out": [1.0, 2.0],
        "mlp_out": [1.0, 2.0],
        **({"dt": [output, output]} if hybrid else {}),
    }
    rows = {"raw": {"mean": [weight]}, "effective": {"mean": [multiplier * weight]}}
    return {
        "signals": [
            {"step": 1, "activations": activations},
            {
                "step": 10,
                "activations": activations,
                "alignment": {role: [aligned] for role in names},
                "rows": dict.fromkeys(names, rows),
            },
        ],
        "weights": [
            {"step": 1, "raw_rms": {}},
            {
                "step": 10,
                "roles": {name: name for name in names},
                "raw_rms": dict.fromkeys(names, weight),
            },
        ],
    }


RIGHT = _world


@pytest.mark.parametrize("exponents", [(-0.9, -0.1, 0.0), (-1.3, 0.2, 0.1), (0.0, -1.0, 0.0)])
def test_exponents_are_those_of_the_world(exponents: tuple[float, float, float]):
    scalar, alignment, raw = exponents
    world = partial(_world, scalar=scalar, alignment=alignment, raw=raw)
    found = width_mup.analyse(made_up(width_mup, world))
    output = scalar + alignment + 1 + raw
    expected = {
        "C10.raw": abs(raw),
        **{"C10.logits": abs(output), "C10.qk": abs(2 * output), "C10.dt": abs(output)},
        **{"C10.s_head": scalar, "C10.s_qk": 2 * scalar, "C10.s_dt": scalar},
        **{"C24.head": alignment, "C24.qk": alignment, "C24.dt": alignment},
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert set(found[name]) == {0, 1, 2}, name
        assert list(found[name].values()) == pytest.approx([value] * 3, abs=0.05), name


@pytest.mark.parametrize(
    ("exponents", "c10", "c24"),
    [
        ({}, "reproduced", "reproduced"),
        ({"scalar": 0.3, "alignment": 0.2}, "contradicted", "contradicted"),
        # Alignment makes up for the width, and multipliers have nothing to do.
        ({"scalar": 0.0, "alignment": -1.0}, "not at this scale", "reproduced"),
        ({"scalar": -1.0, "alignment": 0.0}, "reproduced", "not at this scale"),
        # Raw weights adapt by themselves.
        ({"scalar": 0.0, "raw": -0.9}, "contradicted", "reproduced"),
    ],
)
def test_verdicts_follow_the_world(exponents: dict[str, float], c10: str, c24: str):
    records = made_up(width_mup, partial(_world, **exponents))
    assert verdicts(width_mup, records) == {"C10": c10, "C24": c24}


def test_a_seed_without_all_widths_is_left_out():
    records = made_up(width_mup, RIGHT)
    missing = {"family": "llama", "width": 256, "seed": 1}
    found = width_mup.analyse([one for one in records if one.labels != missing])
    assert set(found["C10.s_head"]) == set(found["C10.raw"]) == {0, 2}
    assert set(found["C10.s_dt"]) == {0, 1, 2}


@pytest.mark.parametrize("preset", ["cpu", "gpu", "paper"])
def test_widths_differ_in_width_alone(preset):
    found = width_mup.runs(preset)
    assert found == width_scales.runs(preset)
    assert max(WIDTHS[preset]) >= 8 * min(WIDTHS[preset])
    for run in found:
        config, model = run.config, run.config.model
        assert model.hidden_size == run.labels["width"]
        assert model.has_ssm == (run.labels["family"] == "hybrid")
        assert model.freeze_norms
        assert model.freeze_final_norm
        assert config.optimizer.placement == "scalar"
        assert config.optimizer.rules == (". only=head kind=scalar",)
    for family in width_mup.FAMILIES[preset]:
        narrow, *others = [run.config for run in found if run.labels["family"] == family]
        for config in others:
            assert (config.data, config.schedule) == (narrow.data, narrow.schedule)
            assert config.optimizer == narrow.optimizer
            assert config.model.num_layers == narrow.model.num_layers
            assert config.model.head_dim == narrow.model.head_dim
            ratio = config.model.hidden_size // narrow.model.hidden_size
            for size in ("intermediate_size", "num_heads", "ssm_size"):
                assert getattr(config.model, size) == ratio * getattr(narrow.model, size), size
