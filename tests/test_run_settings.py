"""Settings of a run that the paper's experiments vary: each does to the numbers what it says."""

from dataclasses import replace

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.config import OptimizerConfig, TrainConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.model.presets import PRESETS, with_falcon_h1_multipliers
from learnable_multipliers.pretrain.rules import parse_rules
from learnable_multipliers.pretrain.trainer.build import make_optimizer, make_plan
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from runs import HYBRID, LLAMA, assert_same, killed_after, small_run, trained

LR, WEIGHT_DECAY = 3e-2, 0.2
SMALL = replace(LLAMA, vocab_size=61)
MIXED = replace(HYBRID, vocab_size=61)
FIXED = with_falcon_h1_multipliers(MIXED)


def on_meta(config) -> HybridLM:
    with torch.device("meta"):
        return HybridLM(config)


def take_steps(model, optimizer, count=4):
    """Train on the same random tokens each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens = torch.randint(61, (2, 17), generator=generator)
        optimizer.zero_grad()
        model.loss(tokens).total.backward()
        optimizer.step()


def with_settings(config: TrainConfig, **changes) -> TrainConfig:
    return replace(config, optimizer=replace(config.optimizer, **changes))


# -- factors by role --------------------------------------------------------------------------


FACTORS = {
    "norm scale": ({"norm_scale": {"head": 8.0, "gate": 0.25}}, (8, 1 / 8), (0.25, 4)),
    "factors": (
        {"lr_factors": {"head": 3.0}, "weight_decay_factors": {"head": 0.5, "gate": 0.0}},
        (3, 0.5),
        (1, 0),
    ),
    "both": (
        {"norm_scale": {"head": 4.0}, "lr_factors": {"gate": 2.0, "head": 0.5}},
        (2, 0.25),
        (2, 1),
    ),
}


def hand_made_groups(model, head, gate):
    """Return groups of torch's for a model: factors on rate and decay of head and gates."""
    groups = []
    for name, parameter in model.named_parameters():
        lr, decay = {"lm_head": head, "gate_proj": gate}.get(name.split(".")[-2], (1, 1))
        decay *= WEIGHT_DECAY if parameter.ndim > 1 else 0
        groups.append({"params": [parameter], "lr": LR * lr, "weight_decay": decay})
    return groups


@pytest.mark.parametrize("name", FACTORS)
def test_factors_by_role_are_those_of_hand_made_groups(name):
    settings, head, gate = FACTORS[name]
    config = OptimizerConfig(
        placement="none", lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=0.0, **settings
    )
    ours, by_hand = build(SMALL).double(), build(SMALL).double()
    optimizer, _ = make_optimizer(ours, config)
    take_steps(ours, optimizer)
    groups = hand_made_groups(by_hand, head, gate)
    take_steps(by_hand, torch.optim.AdamW(groups, betas=config.betas, eps=config.eps))
    for mine, other in zip(ours.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_norm_scale_with_multipliers_is_that_of_rules(kind):
    config = OptimizerConfig(kind=kind, lr=LR, weight_decay=WEIGHT_DECAY)
    scaled = replace(config, norm_scale={"head": 8.0, "down": 0.25})
    by_rules = replace(
        config,
        rules=(
            f". only=head lr_scale=8 weight_decay={WEIGHT_DECAY / 8}",
            f". only=down lr_scale=0.25 weight_decay={WEIGHT_DECAY * 4}",
        ),
    )
    models = [build(MIXED) for _ in range(2)]
    plans = []
    for model, settings in zip(models, (scaled, by_rules), strict=True):
        optimizer, planned = make_optimizer(model, settings)
        plans.append(planned)
        take_steps(model, optimizer)
    assert plans[0] == plans[1]
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, other)
    # Multipliers train at their own rate whatever becomes of the matrix.
    assert {group["multiplier_lr_scale"] for group in optimizer.param_groups} == {1.0}


def test_factors_come_on_top_of_rules():
    config = OptimizerConfig(
        rules=("lm_head lr_scale=3 weight_decay=0.5",),
        lr_factors={"head": 2.0},
        weight_decay_factors={"head": 0.1},
    )
    entry = make_plan(on_meta(MIXED), config)["lm_head.weight"]
    assert (entry.lr_scale, entry.weight_decay) == (6.0, 0.05)


SSM = ("ssm-z", "ssm-x", "ssm-B", "ssm-C", "ssm-dt")


def test_a_fused_matrix_takes_one_factor_for_all_its_roles():
    everywhere = OptimizerConfig(norm_scale=dict.fromkeys(SSM, 4.0), weight_decay=0.2)
    entry = make_plan(on_meta(MIXED), everywhere)["model.layers.0.mamba.in_proj.weight"]
    assert (entry.lr_scale, entry.weight_decay) == (4.0, 0.05)
    with pytest.raises(ValueError, match=r"in_proj.weight is one stored matrix .* \(ssm-z, ssm-x,"):
        make_plan(on_meta(MIXED), OptimizerConfig(norm_scale={"ssm-z": 4.0}))


REFUSED = {
    "absent role": (
        {"norm_scale": {"ssm-x": 2.0}},
        "optimizer.norm_scale: the model has no matrix of the role ssm-x; it has embedding, query, "
        "key, value, attention-out, gate, up, down, head",
    ),
    "absent name": ({"rules": ("lm_haed kind=row",)}, "matches no parameter; closest names: lm_"),
    "large decay": (
        {"weight_decay_factors": {"up": 4000.0}},
        "up_proj.weight: lr times weight_decay is 1.6: .* or the factors of the rules and roles",
    ),
    "large decay by rule": (
        {"rules": ("lm_head weight_decay=300",)},
        "lm_head.weight: lr times weight_decay is 1.2: one step would",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_the_model_is_rejected_before_there_is_a_folder(data, tmp_path, name):
    settings, message = REFUSED[name]
    config = with_settings(small_run(data, tmp_path / "run", model=LLAMA), **settings)
    with pytest.raises(ValueError, match=message):
        Trainer(config)
    assert not (tmp_path / "run").exists()


# -- multipliers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_absolute_rate_of_multipliers_is_the_ratio_bit_for_bit(data, tmp_path, kind):
    config = with_settings(small_run(data, tmp_path / "ratio", steps=4), kind=kind)
    absolute = with_settings(replace(config, out=tmp_path / "absolute"), multiplier_lr=1e-2)
    assert_same(trained(with_settings(config, multiplier_lr_scale=2.5)), trained(absolute))
    assert absolute.optimizer.multiplier_ratio == 2.5


def test_rules_from_a_file_are_rules_from_words(data, tmp_path):
    words = (". only=head kind=scalar", "up_proj kind=none", "q_proj scale=log lr_scale=0.5")
    file = tmp_path / "rules.txt"
    file.write_text("# of an experiment\n" + "\n".join(words))
    config = small_run(data, tmp_path / "words", steps=3, name="run")
    first = trained(with_settings(config, rules=words))
    second = trained(with_settings(replace(config, out=tmp_path / "file"), rules=(f"@{file}",)))
    assert_same(first, second)
    assert second.config.optimizer.rules == words
    found = [(tmp_path / out / "plan.json").read_bytes() for out in ("words", "file")]
    assert found[0] == found[1]
    assert second.plan["lm_head.weight"].multipliers == "scalar"
    # The file is no part of the run any more.
    file.unlink()
    config = replace(second.config, resume=True)
    assert trained(config).step == 3
    with pytest.raises(ValueError, match="these differ: optimizer.rules: "):
        Trainer(with_settings(config, rules=words[:2]))


@pytest.mark.parametrize("placement", ["full", "scalar", "symmetry-aware"])
def test_the_log_scale_is_that_of_rules(placement):
    config = OptimizerConfig(placement=placement, multiplier_scale="log")
    model = on_meta(MIXED)
    expected = lrm.plan(model, placement, [lrm.Rule(".", scale="log")])
    assert make_plan(model, config) == expected
    assert {e.matrix.scale for e in expected.entries if e.matrix and e.carries} == {"log"}
    # Rules about something else keep it, and one may say otherwise.
    found = make_plan(model, replace(config, rules=("gate kind=row", "up_proj scale=linear")))
    assert found["model.layers.0.feed_forward.gate_proj.weight"].matrix.scale == "log"
    assert found["model.layers.0.feed_forward.up_proj.weight"].matrix.scale == "linear"


@pytest.mark.parametrize("placement", ["full", "scalar", "symmetry-aware"])
def test_learned_multipliers_start_at_the_fixed_factors(placement):
    plain, folded = build(FIXED).double(), build(FIXED).double()
    tokens = torch.randint(61, (2, 17))
    _, planned = make_optimizer(folded, OptimizerConfig(placement=placement))
    torch.testing.assert_close(folded(tokens), plain(tokens), rtol=1e-12, atol=1e-12)
    inits = {
        (entry.name.rpartition("layers.0.")[2], block.role): block.init
        for entry in planned.entries
        if entry.matrix is not None
        for block in entry.matrix.blocks
    }
    assert inits["feed_forward.down_proj.weight", "down"] == FIXED.mup_down
    assert folded.config.mup_down == 1.0
    # No multiplier on the head: its factor stays.
    assert folded.config.mup_head == FIXED.mup_head != 1.0


@pytest.mark.parametrize("placement", ["none", "full", "scalar", "symmetry-aware"])
def test_the_paper_s_model_can_be_planned_with_its_factors(placement):
    config = PRESETS["falcon-h1-0.5b"]
    planned = make_plan(on_meta(config), OptimizerConfig(placement=placement))
    folded = dict(planned.folds)
    if placement == "none":
        assert folded == {}
    else:
        assert folded["mup_embedding"] == config.mup_embedding
        assert folded["mup_gate"] == config.mup_gate


def test_without_multipliers_fixed_factors_stay():
    model = build(FIXED)
    make_optimizer(model, OptimizerConfig(placement="none"))
    assert model.config == FIXED
    # Those of a rule take over theirs alone.
    only_head = OptimizerConfig(placement="none", rules=(". only=head kind=scalar",))
    _, planned = make_optimizer(model, only_head)
    assert model.config == replace(FIXED, mup_head=1.0)
    assert planned["lm_head.weight"].matrix.blocks[0].init == FIXED.mup_head


def test_blocks_that_share_columns_keep_their_fixed_factors():
    rules = ("in_proj kind=col",)
    planned = make_plan(on_meta(FIXED), OptimizerConfig(rules=rules))
    assert not {"mup_z", "mup_ssm_in"} & dict(planned.folds).keys()
    assert "mup_z stays fixed" in str(planned)


# -- the model --------------------------------------------------------------------------------


@pytest.mark.parametrize("scalar", [False, True])
def test_a_frozen_final_norm_stays_at_one(data, tmp_path, scalar):
    model = replace(LLAMA, freeze_final_norm=True)
    config = small_run(data, tmp_path / "run", steps=3, model=model)
    rules = (". only=head kind=scalar",) if scalar else ()
    trainer = trained(with_settings(config, rules=rules))
    assert (trainer.model.model.final_layernorm.weight == 1).all()
    assert (trainer.model.model.layers[0].input_layernorm.weight != 1).all()
    learned = trainer.optimizer.multipliers().get("lm_head.weight", {})
    assert {name: value.numel() for name, value in learned.items()} == (
        {"scalar": 1} if scalar else {}
    )
    if scalar:
        assert learned["scalar"].item() != 1


def test_the_embedding_starts_at_its_own_size():
    usual, wide = build(SMALL), build(replace(SMALL, embedding_std=1.0))
    for (name, one), other in zip(usual.named_parameters(), wide.parameters(), strict=True):
        if name == "model.embed_tokens.weight":
            torch.testing.assert_close(other, one * (1.0 / SMALL.init_std))
            assert other.std().item() == pytest.approx(1.0, rel=0.05)
        else:
            assert torch.equal(one, other)
    tied = build(replace(SMALL, embedding_std=1.0, tie_embeddings=True))
    assert tied.lm_head.weight.std().item() == pytest.approx(1.0, rel=0.05)


def test_rules_may_not_contradict_each_other_within_a_stored_matrix():
    model = on_meta(MIXED)
    with pytest.raises(ValueError, match="different scale: log, linear"):
        lrm.plan(model, "scalar", parse_rules([". only=ssm-z scale=log"]))
    agreed = lrm.plan(model, "scalar", parse_rules([". only=ssm-z scale=log"]), scale="log")
    assert agreed == lrm.plan(model, "scalar", scale="log")


def test_a_run_counts_multipliers_in_its_clip_norm_where_asked_to(data, tmp_path):
    config = small_run(data, tmp_path / "out", model=replace(HYBRID, init_std=0.2))
    config = with_settings(config, max_grad_norm=0.0)
    without = killed_after(config, 1).optimizer
    counting = with_settings(replace(config, out=tmp_path / "in"), clip_multipliers=True)
    # After one step without clipping the first moment is a tenth of the gradient.
    grads = [
        value / (1 - config.optimizer.betas[0])
        for state in without.state.values()
        for name, value in state.items()
        if name in ("row_exp_avg", "col_exp_avg")
    ]
    expected = torch.nn.utils.get_total_norm([without.grad_norm, *grads])
    torch.testing.assert_close(killed_after(counting, 1).optimizer.grad_norm, expected)
    assert expected > 1.001 * without.grad_norm
