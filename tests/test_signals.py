"""Signals: every number against plain float64 arithmetic on what hooks see in transformers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.config import OptimizerConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.metrics.signals import (
    Signals,
    common_direction,
    decades,
    gradients,
    row_statistics,
)
from learnable_multipliers.pretrain.model import hugging_face
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.trace import trace
from learnable_multipliers.pretrain.trainer.build import make_optimizer
from learnable_multipliers.pretrain.trainer.run_state import tensors_of
from runs import HYBRID, LLAMA, assert_same, killed_after, small_run, trained

CLOSE = 1e-5
"""A record has six digits."""
VOCAB = 97
FACTORS = {
    **{"mup_embedding": 5.7, "mup_head": 0.4, "mup_attention_in": 1.1, "mup_key": -0.4},
    **{"mup_attention_out": 0.9, "mup_ssm_in": 1.25, "mup_z": 0.35, "mup_x": 0.25},
    **{"mup_B": 0.36, "mup_C": 0.5, "mup_dt": 0.37, "mup_ssm_out": 0.24},
    **{"mup_gate": 0.88, "mup_down": 0.59},
}
SHAPES = {
    "hybrid": replace(HYBRID, vocab_size=VOCAB, **FACTORS),
    "hybrid tied": replace(HYBRID, vocab_size=VOCAB, **FACTORS, tie_embeddings=True),
    "llama": replace(LLAMA, vocab_size=VOCAB),
}
SSM = ("ssm-z", "ssm-x", "ssm-B", "ssm-C", "ssm-dt")
LEAVES = {
    **{"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "attention-out"},
    **{"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "out_proj": "ssm-out"},
}


def some_tokens():
    return torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(2))


def trained_model(config, placement, kind="adamw"):
    """Return a model in float64 after steps that move multipliers well away from 1."""
    model = build(config).double()
    settings = OptimizerConfig(placement=placement, kind=kind, lr=0.03, multiplier_lr_scale=3.0)
    optimizer, plan = make_optimizer(model, settings)
    for _ in range(4):
        model.loss(some_tokens()).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, plan


def some_occurrences():
    some = 10 ** torch.empty(VOCAB, dtype=torch.float64).uniform_(-1.5, 2)
    return torch.cat((torch.zeros(5), torch.tensor([0.1, 1.0], dtype=torch.float64), some[7:]))


def rms(values):
    values = torch.as_tensor(values).detach().double().numpy()
    return float(np.sqrt(np.mean(np.square(values))))


# -- the truth: transformers, with hooks ----------------------------------------------------------


def peer_of(model):
    import transformers

    settings = hugging_face.to_config(model.config)
    kind, name = settings.pop("model_type"), settings.pop("architectures")[0]
    config_class = {"llama": "LlamaConfig", "falcon_h1": "FalconH1Config"}[kind]
    peer = getattr(transformers, name)(getattr(transformers, config_class)(**settings))
    peer = peer.double().eval()
    peer.load_state_dict(hugging_face.to_state_dict(model), strict=False)
    return peer


def seen_by_hooks(peer, tokens):
    """Return input and output of every module of a model by name, and the logits."""
    seen = {}

    def hook(name):
        def note(module, args, kwargs, output):
            given = args[0] if args else kwargs.get("hidden_states")
            seen[name] = given, output[0] if isinstance(output, tuple) else output

        return note

    hooks = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in peer.named_modules()
    ]
    with torch.no_grad():
        logits = peer(tokens, use_cache=False).logits
    for handle in hooks:
        handle.remove()
    return seen, logits


def expected_signals(model, tokens):
    """Return activations, common directions and alignments, by hand."""
    config, peer = model.config, peer_of(model)
    seen, logits = seen_by_hooks(peer, tokens)
    ssm = config.has_ssm
    mlp, final = ("feed_forward", "model.final_layernorm") if ssm else ("mlp", "model.norm")
    sizes = list(config.ssm_block_sizes)
    found = {"embedding": rms(seen["model.layers.0.input_layernorm"][0]), "logits": rms(logits)}
    keys = ("attention_out", "mlp_out", "query_key", "gate", *(("ssm_out", "dt") if ssm else ()))
    activations = {key: [] for key in keys}
    alignment, streams = {}, []

    def align(role, weight, x, y):
        d_out, d_in = weight.shape
        flat = x.reshape(-1, d_in)
        # The ratio is free of any factor on the input.
        torch.testing.assert_close(y.reshape(-1, d_out), flat @ weight.T)
        alignment.setdefault(role, []).append(rms(y) / (d_in * rms(weight) * rms(x)))

    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        streams.append(seen[f"{at}.input_layernorm"][0])
        for name, (x, y) in seen.items():
            if name.startswith(f"{at}.") and (leaf := name.rpartition(".")[2]) in LEAVES:
                align(LEAVES[leaf], peer.get_parameter(f"{name}.weight"), x, y)
        query, key = (rms(seen[f"{at}.self_attn.{name}_proj"][1]) for name in "qk")
        activations["query_key"].append(query * key * abs(config.mup_key))
        out = rms(seen[f"{at}.self_attn"][1]) * config.mup_attention_out
        activations["attention_out"].append(out)
        activations["mlp_out"].append(rms(seen[f"{at}.{mlp}"][1]))
        activations["gate"].append(rms(seen[f"{at}.{mlp}.gate_proj"][1]) * config.mup_gate)
        if ssm:
            x, y = seen[f"{at}.mamba.in_proj"]
            blocks = peer.get_parameter(f"{at}.mamba.in_proj.weight").split(sizes)
            for role, block, part in zip(SSM, blocks, y.split(sizes, -1), strict=True):
                align(role, block, x, part)
            activations["dt"].append(rms(y.split(sizes, -1)[-1]) * config.mup_dt)
            activations["ssm_out"].append(rms(seen[f"{at}.mamba"][1]) * config.mup_ssm_out)
    streams.append(seen[final][0])
    align("head", peer.lm_head.weight, *seen["lm_head"])
    activations["residual"] = [rms(stream) for stream in streams]
    common = []
    for stream in streams:
        positions = stream.reshape(-1, config.hidden_size).numpy()
        power = np.mean(np.sum(positions**2, axis=1))
        common.append(float(np.sum(np.mean(positions, axis=0) ** 2) / power))
    return {**found, **activations}, common, alignment


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=CLOSE), name


# -- the law of each number -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, "no attention", "no MLP"])
def test_the_trace_computes_the_model(shape):
    others = {"no attention": {"num_heads": 0}, "no MLP": {"intermediate_size": 0}}
    config = SHAPES.get(shape) or replace(SHAPES["hybrid"], **others[shape])
    model, *_ = trained_model(config, "full")
    logits = torch.stack([value for name, value in trace(model, some_tokens()) if name == "head"])
    with torch.no_grad():
        torch.testing.assert_close(logits * config.mup_head, model(some_tokens()))


@pytest.mark.parametrize("placement", ["full", "scalar"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_those_that_hooks_see_in_transformers(shape, placement):
    model, optimizer, plan = trained_model(SHAPES[shape], placement)
    found = Signals(model, optimizer, plan, some_tokens(), some_occurrences()).measure()
    activations, common, alignment = expected_signals(model, some_tokens())
    assert_close(found["activations"], activations)
    assert found["common_direction"] == pytest.approx(common, rel=CLOSE)
    assert_close(found["alignment"], alignment)


def test_in_bfloat16_signals_are_the_same_to_its_rounding():
    model = build(SHAPES["hybrid"])
    optimizer, plan = make_optimizer(model, OptimizerConfig())
    signals = Signals(model, optimizer, plan, some_tokens(), some_occurrences())
    whole, half = signals.measure(), signals.measure(torch.autocast("cpu", torch.bfloat16))
    assert half["activations"] != whole["activations"]
    # Rounding of single numbers is 2^-9, and averages out; sums are not taken in bfloat16.
    for name, value in whole["activations"].items():
        assert half["activations"][name] == pytest.approx(value, rel=2e-3), name
    # Weights are read in float32 either way; sums of it may differ in the last digit of a record.
    for role, rows in whole["rows"].items():
        for which, statistics in rows.items():
            assert_close(half["rows"][role][which], statistics)


def naive_rows(weights):
    norms = [np.sqrt(np.mean(np.square(w.detach().numpy()), axis=1)) for w in weights]
    pooled = np.concatenate([n / n.mean() for n in norms])
    return {
        "mean": [n.mean() for n in norms],
        "log_std": [np.std(np.log(n)) for n in norms],
        "pooled": [np.quantile(pooled, q) for q in np.arange(21) / 20],
    }


@pytest.mark.parametrize(
    ("shape", "placement", "kind"),
    [
        ("hybrid", "full", "adamw"),
        ("hybrid tied", "full", "muon"),
        ("llama", "scalar", "adamw"),
        ("llama", "none", "adamw"),
    ],
)
def test_rows_are_those_of_raw_and_effective_weights(shape, placement, kind):
    config = SHAPES[shape]
    model, optimizer, plan = trained_model(config, placement, kind)
    found = Signals(model, optimizer, plan, some_tokens(), some_occurrences()).measure()["rows"]
    learned, state = lrm.multipliers(optimizer), tensors_of(model, optimizer)["optimizer"]
    by_role = {}
    for name, parameter in model.named_parameters():
        leaf = name.split(".")[-2]
        if parameter.ndim != 2:
            continue
        raw, effective = state.get(f"{name}/raw", parameter), parameter
        if name in learned:
            # What the optimizer wrote is what its multipliers make of the raw weight.
            own = learned[name]
            row, col = own.get("row", torch.ones(1)), own.get("col", torch.ones(1))
            scalars = own.get("scalar", torch.ones(1))
            if len(scalars) == 1:
                effective = row[:, None] * raw * col * scalars
                torch.testing.assert_close(effective, parameter.detach())
            else:
                assert leaf == "in_proj"
                effective = parameter
        sizes = list(config.ssm_block_sizes) if leaf == "in_proj" else [len(raw)]
        embedding = "tied-embedding" if config.tie_embeddings else "embedding"
        own_role = {"embed_tokens": embedding, "lm_head": "head"} | LEAVES
        roles = SSM if leaf == "in_proj" else [own_role[leaf]]
        for role, *pair in zip(roles, raw.split(sizes), effective.split(sizes), strict=True):
            by_role.setdefault(role, []).append(pair)
    assert found.keys() == by_role.keys()
    for role, pairs in by_role.items():
        for which, weights in zip(("raw", "effective"), zip(*pairs, strict=True), strict=True):
            assert_close(found[role][which], naive_rows(weights))
    if placement != "none":
        assert found["up"]["raw"] != found["up"]["effective"]


def test_token_rows_lie_in_decades_of_occurrences():
    model, optimizer, plan = trained_model(SHAPES["hybrid"], "full")
    occurrences = some_occurrences()
    found = Signals(model, optimizer, plan, some_tokens(), occurrences).measure()["token_rows"]
    name = "model.embed_tokens.weight"
    raw = tensors_of(model, optimizer)["optimizer"][f"{name}/raw"]
    effective = model.get_parameter(name)
    expected = {"occurrences": [], "share": [], "count": [], "raw": [], "effective": []}
    for decade in range(-2, 2):
        low, high = 10.0**decade, 10.0 ** (decade + 1)
        rows = [i for i, n in enumerate(occurrences.tolist()) if low < n <= high]
        expected["occurrences"].append(math.sqrt(low * high))
        shares = [1 - math.exp(-occurrences[i].item()) for i in rows]
        expected["share"].append(sum(shares) / len(shares))
        expected["count"].append(len(rows))
        expected["raw"].append(rms(raw[rows]))
        expected["effective"].append(rms(effective[rows]))
    assert_close(found, expected)
    # Five tokens never occur.
    assert sum(found["count"]) == VOCAB - 5


def test_decades_end_with_their_power_of_ten():
    shares, members = decades(torch.tensor([1.0, 0.1, 0.1000001, 0.0, 0.05], dtype=torch.float64))
    assert shares == pytest.approx([10**-1.5, 10**-0.5])
    assert members.tolist() == [
        [False, True, False, False, True],
        [True, False, True, False, False],
    ]


@pytest.mark.parametrize("shape", ["hybrid", "llama"])
def test_vectors_are_measured_by_layer(shape):
    config = SHAPES[shape]
    model, optimizer, plan = trained_model(config, "full")
    found = Signals(model, optimizer, plan, some_tokens(), some_occurrences()).measure()
    names = {"input_norm": "input_layernorm.weight", "mlp_norm": "pre_ff_layernorm.weight"}
    if config.has_ssm:
        names |= {"conv1d": "mamba.conv1d.weight", "D": "mamba.D"}
    expected = {
        key: [
            rms(model.get_parameter(f"model.layers.{layer}.{name}"))
            for layer in range(config.num_layers)
        ]
        for key, name in names.items()
    }
    expected["final_norm"] = [rms(model.model.final_layernorm.weight)]
    assert_close(found["parameters"], expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_gradients_after_a_step_are_those_of_the_step(kind):
    model = build(SHAPES["hybrid"]).double()
    settings = OptimizerConfig(placement="none", kind=kind, max_grad_norm=0.0)
    optimizer, plan = make_optimizer(model, settings)
    model.loss(some_tokens()).total.backward()
    expected: dict[str, list[float]] = {}
    for entry in plan.entries:
        if entry.matrix is not None:
            grad = model.get_parameter(entry.name).grad
            sizes = [block.size for block in entry.matrix.blocks]
            for block, part in zip(entry.matrix.blocks, grad.split(sizes), strict=True):
                # Muon averages over the whole of a hidden matrix.
                whole = kind == "muon" and len(sizes) > 1
                square = (grad if whole else part).square().mean()
                expected.setdefault(block.role, []).append(square.sqrt().item())
    optimizer.step()
    found = gradients(optimizer)
    assert found.keys() == expected.keys()
    for role, values in expected.items():
        torch.testing.assert_close(found[role].double().tolist(), values, rtol=CLOSE, atol=0)


def test_common_direction_is_1_for_a_constant_and_1_over_positions_for_noise():
    constant = torch.randn(64, dtype=torch.float64).expand(4, 100, 64)
    assert common_direction(constant).item() == pytest.approx(1, rel=1e-12)
    noise = torch.randn(4, 1000, 512)
    assert common_direction(noise).item() == pytest.approx(1 / 4000, rel=0.2)
    half = noise + 1
    assert common_direction(half).item() == pytest.approx(0.5, abs=0.01)


def test_spread_of_rows_is_that_of_their_logarithm():
    rows = torch.exp(0.3 * torch.randn(2, 20_000, dtype=torch.float64))
    rows = rows * torch.tensor([[1.0], [50.0]])
    found = row_statistics(rows)
    assert found["log_std"].tolist() == pytest.approx([0.3, 0.3], rel=0.02)
    # Pooled over their own layer's mean: the median of both is that of one.
    assert found["pooled"][10].item() == pytest.approx(math.exp(-(0.3**2) / 2), rel=0.02)


# -- runs -----------------------------------------------------------------------------------------


def with_signals(config, every):
    return replace(config, model=LLAMA, log=replace(config.log, signals_every=every))


def signals_of(folder):
    return [record for record in read_metrics(folder) if record["kind"] == "signals"]


def test_a_run_with_signals_is_the_run_without_and_resumes_to_the_same_records(data, tmp_path):
    config = with_signals(small_run(data, tmp_path / "whole", steps=7), 3)
    whole = trained(config)
    without = trained(with_signals(replace(config, out=tmp_path / "without"), 0))
    assert_same(whole, without)
    losses = [
        [r["loss"] for r in read_metrics(tmp_path / name) if "loss" in r]
        for name in ("whole", "without")
    ]
    assert losses[0] == losses[1]
    records = signals_of(tmp_path / "whole")
    assert [record["step"] for record in records] == [1, 3, 6, 7]
    assert signals_of(tmp_path / "without") == []
    parts = replace(config, out=tmp_path / "parts")
    killed_after(parts, 6)
    trained(replace(parts, resume=True))
    assert signals_of(tmp_path / "parts") == records
    # The last one is of the model as it was left.
    assert records[-1]["parameters"]["final_norm"] == [
        pytest.approx(rms(whole.model.model.final_layernorm.weight), rel=CLOSE)
    ]


def test_token_frequencies_are_those_of_the_training_text(data, tmp_path):
    config = with_signals(small_run(data, tmp_path / "run", steps=3), 1)
    trainer = trained(config)
    text = trainer.data.tokens("train")
    counts = np.bincount(text, minlength=300)
    assert trainer.data.token_counts(300, len(text)).tolist() == counts.tolist()
    batch = config.data.batch_sequences * config.data.sequence_length
    occurrences = counts / counts.sum() * batch
    edges = [(10.0**d, 10.0 ** (d + 1)) for d in range(-4, 4)]
    expected = {
        math.sqrt(low * high): n
        for low, high in edges
        if (n := int(((occurrences > low) & (occurrences <= high)).sum()))
    }
    found = signals_of(tmp_path / "run")[-1]["token_rows"]
    assert dict(zip(found["occurrences"], found["count"], strict=True)) == pytest.approx(expected)
    # A sample of a longer text has the same shares, to its sampling error.
    some = trainer.data.token_counts(300, len(text) // 2)
    assert len(text) // 2 - 256 <= some.sum() <= len(text) // 2
    error = np.sqrt(counts / 2).max() * 4
    assert np.abs(some.numpy() - counts / 2).max() < error


def test_the_last_health_record_has_the_reading_of_every_tensor(data, tmp_path):
    trainer = trained(replace(small_run(data, tmp_path / "run", steps=5), model=LLAMA))
    *before, last = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "health"]
    assert all("readings" not in record for record in before)
    readings = trainer.monitor.health().readings
    assert {reading.part for reading in readings} == {"weight", "row", "col"}
    for reading, found in zip(readings, last["readings"], strict=True):
        assert (reading.name, reading.part, reading.role) == tuple(
            found[key] for key in ("name", "part", "role")
        )
        assert found["indicator"] == reading.indicator
        assert found["measured"] == reading.measured
