"""Configs: plain data and back, and nothing that is no setting gets through."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from learnable_multipliers._serialization import from_dict, to_dict
from learnable_multipliers.pretrain.config import (
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.recipes import RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_survives_the_round_trip(recipe):
    config = replace(RECIPES[recipe][1], data=DataConfig(path=Path("some/where")))
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_rules_and_factors_survive_the_round_trip():
    optimizer = OptimizerConfig(
        rules=(". only=head kind=scalar", r"mlp\\.up kind=none"),
        norm_scale={"head": 8.0, "gate": 0.25},
        lr_factors={"up": 3.0},
    )
    config = TrainConfig(optimizer=optimizer)
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_works(recipe):
    RECIPES[recipe][1].check()


def changed(where: str, value: object) -> dict:
    """Return the plain data of a config with one value replaced."""
    values = to_dict(TrainConfig())
    *path, key = where.split(".")
    place = values
    for step in path:
        place = place[step]
    place[key] = value
    return values


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("optimizer.learning_rate", 1, r"config.optimizer has unknown keys: learning_rate"),
        ("optimizer.kind", "adam", r"config.optimizer.kind is 'adam', not one of adamw, muon"),
        ("optimizer.lr", "fast", r"config.optimizer.lr is 'fast', not a number"),
        ("optimizer.betas", [0.9], r"config.optimizer.betas is \[0.9\], not a list of 2"),
        ("optimizer.betas", [0.9, "b"], r"config.optimizer.betas\[1\] is 'b', not a number"),
        ("model.hidden_size", 32.0, r"config.model.hidden_size is 32.0, not a whole number"),
        ("model.hidden_size", True, r"config.model.hidden_size is True, not a whole number"),
        ("model.ssm_norm", 1, r"config.model.ssm_norm is 1, not true or false"),
        ("model", [], r"config.model is \[\], not a mapping"),
        ("out", None, r"config.out is None, not a path"),
        ("name", 3, r"config.name is 3, not a string"),
    ],
)
def test_data_that_are_no_config_are_rejected(where, value, message):
    with pytest.raises(ValueError, match=message):
        from_dict(TrainConfig, changed(where, value))


def test_what_a_file_leaves_out_is_not_guessed():
    values = to_dict(ModelConfig())
    del values["rope_theta"], values["norm_eps"]
    with pytest.raises(ValueError, match="model has no: norm_eps, rope_theta"):
        from_dict(ModelConfig, values, "model")


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        # Whatever is not AdamW used to be Muon.
        ("optimizer", {"kind": "adam"}, "optimizer.kind is 'adam', not one of adamw, muon"),
        ("optimizer", {"multiplier_init": "folded"}, "not one of one, fold"),
        ("optimizer", {"lr": float("nan")}, "lr must be a positive number, got nan"),
        ("optimizer", {"lr": 0.0}, "lr must be a positive number, got 0"),
        (
            "optimizer",
            {"betas": (1.0, 0.95)},
            r"optimizer\.betas: beta1 must lie in \[0, 1",
        ),
        ("optimizer", {"betas": (0.9, 1.5)}, r"beta2 must lie in \[0, 1\), got 1.5"),
        ("optimizer", {"weight_decay": -0.1}, "weight_decay must be a number from 0"),
        ("optimizer", {"lr": 2.0, "weight_decay": 0.5}, "optimizer.lr times weight_decay is 1:"),
        (
            "optimizer",
            {"lr": 0.5, "weight_decay": 0.0, "multiplier_lr_scale": 1e3},
            "lr times multiplier_lr_scale and multiplier_weight_decay is 1: one step would",
        ),
        (
            "optimizer",
            {"multiplier_lr": 1000.0},
            "optimizer.multiplier_lr times multiplier_weight_decay is 2: one step would",
        ),
        (
            "optimizer",
            {"multiplier_lr": 0.01, "multiplier_lr_scale": 2.0},
            "multiplier_lr is 0.01 and optimizer.multiplier_lr_scale 2: set .* not both",
        ),
        ("optimizer", {"multiplier_lr": -0.1}, "multiplier_lr must be a number from 0"),
        ("optimizer", {"multiplier_scale": "exp"}, "not one of linear, log"),
        ("optimizer", {"rules": "head kind=row"}, "optimizer.rules is .*, not a list"),
        ("optimizer", {"rules": (3,)}, r"optimizer.rules\[0\] is 3, not a string"),
        ("optimizer", {"rules": ("head",)}, "optimizer.rules: rule 'head' sets nothing"),
        ("optimizer", {"rules": ("@nowhere",)}, "optimizer.rules: the rules in nowhere cannot"),
        ("optimizer", {"lr_factors": {"head": 0.0}}, "lr_factors: head must have a number from"),
        ("optimizer", {"norm_scale": {"head": -8.0}}, "norm_scale: head must have a number from"),
        ("optimizer", {"norm_scale": {"head": float("nan")}}, "norm_scale: head must have a"),
        ("optimizer", {"norm_scale": {"haed": 8.0}}, "norm_scale: unknown role 'haed'; .* head"),
        ("optimizer", {"norm_scale": {3: 8.0}}, "a key of .*norm_scale is 3, not a string"),
        ("optimizer", {"weight_decay_factors": {"head": -1.0}}, "head must have a number from 0"),
        ("optimizer", {"weight_decay_factors": {"head": "much"}}, "head is 'much', not a number"),
        ("optimizer", {"momentum": -0.5}, r"optimizer.momentum must lie in \[0, 1\), got -0.5"),
        ("optimizer", {"momentum": 1.0}, r"optimizer.momentum must lie in \[0, 1\), got 1"),
        ("optimizer", {"split": "heads"}, "optimizer.split=heads is for Muon: set"),
        ("optimizer", {"adamw_lr_scale": 2.0}, "AdamW trains everything at one rate; set"),
        ("optimizer", {"split": "rows"}, "not one of blocks, heads"),
        # 0 / 0 for a token that did not occur.
        ("optimizer", {"eps": 0.0}, "optimizer.eps must be at least 1.2e-38, got 0.0: below"),
        ("optimizer", {"eps": 1e-50}, "optimizer.eps must be at least 1.2e-38, got 1e-50"),
        ("optimizer", {"eps": float("nan")}, "optimizer.eps must be"),
        ("optimizer", {"max_grad_norm": float("nan")}, "optimizer.max_grad_norm must be a number"),
        ("optimizer", {"multiplier_lr_scale": float("inf")}, "multiplier_lr_scale must be"),
        ("optimizer", {"lr": 1e38}, r"optimizer.lr must be a number from 0 to 1e\+15, got 1e\+38"),
        ("model", {"norm_eps": 0.0}, "model.norm_eps must be a positive number, got 0"),
        ("model", {"norm_eps": 1e-50}, "model.norm_eps must be a positive number, got 1e-50"),
        ("model", {"init_std": 0.0}, "model.init_std must be a positive number, got 0"),
        ("model", {"init_std": float("inf")}, "model.init_std must be a positive number, got inf"),
        ("model", {"embedding_std": -1.0}, "model.embedding_std must be a positive number, or 0"),
        ("model", {"embedding_std": float("inf")}, "model.embedding_std must be a positive"),
        ("model", {"rope_theta": -1.0}, "model.rope_theta must be a positive number, got -1"),
        ("model", {"mup_key": float("nan")}, "model.mup_key must be a finite number, got nan"),
        ("schedule", {"decay_shape": "step"}, "not one of exponential, linear, cosine"),
        ("log", {"evaluate_tokens": -1}, "log.evaluate_tokens must be a number of at least 0"),
        ("log", {"signals_every": -1}, "log.signals_every must be a number of at least 0"),
        ("log", {"every": -2}, "log.every must be a number of at least 0"),
        ("checkpoint", {"every": -5}, "checkpoint.every must be a number of at least 0"),
        ("checkpoint", {"keep": 1}, "keep must be at least 2"),
        ("data", {"sequence_length": 4096}, "model.max_length, which goes into exported models"),
        ("data", {"batch_sequences": 0}, "data.batch_sequences must be a number of at least 1"),
        ("runtime", {"num_threads": -1}, "runtime.num_threads must be a number of at least 0"),
    ],
)
def test_settings_that_cannot_work_are_rejected(section, changes, message):
    config = TrainConfig()
    TrainConfig().check()
    with pytest.raises(ValueError, match=message):
        replace(config, **{section: replace(getattr(config, section), **changes)}).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_loss": float("inf")}, "z_loss must be"),
        ({"seed": 1 << 64}, "fit into 64 bits"),
        *(
            ({"log": LogConfig(signals_every=5), "parallel": ParallelConfig(**sharded)}, "whole")
            for sharded in ({"shard": 2}, {"tensor": 2})
        ),
    ],
)
def test_settings_of_the_whole_that_cannot_work_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TrainConfig(), **changes).check()
