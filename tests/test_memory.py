"""Memory estimates against the peaks measured on a GPU and the bytes that ranks hold."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from learnable_multipliers.optim._sharding import local
from learnable_multipliers.pretrain.config import ParallelConfig, RuntimeConfig
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.preflight import checks, doctor
from learnable_multipliers.pretrain.preflight.checks import run_check
from learnable_multipliers.pretrain.preflight.dry_run import describe
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.device import Device, choose_device
from learnable_multipliers.pretrain.trainer.memory import estimate, micro_batch
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from ranks import AXES, Ranks
from runs import HYBRID, LLAMA, small_run

CPU = choose_device(RuntimeConfig(device="cpu"))
GPU = Device(torch.device("cuda"), torch.bfloat16, True, True, "a GPU", None)
MEASURED = {
    run["model"]: run["peak_gib"]
    for run in json.loads((Path(__file__).parents[1] / "results/pretrain-h200.json").read_text())[
        "runs"
    ]
    if run["what"].startswith("ours")
}
SIZED = replace(HYBRID, vocab_size=257, num_heads=4, num_kv_heads=2)


def benchmarked(name, sequences=8):
    """Return a recipe with a batch of one pass, as in the benchmark."""
    config = RECIPES[name][1]
    data = replace(config.data, batch_sequences=sequences, micro_batch_sequences=0)
    return replace(config, data=data)


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_near_the_peak_of_the_benchmark(name):
    pytest.importorskip("triton")
    assert estimate(benchmarked(name), GPU).peak / 2**30 == pytest.approx(MEASURED[name], rel=0.15)


# GiB allocated at most in a step of some sequences on an H200, with torch 2.11.
PEAKS = {
    ("20m", True): {2: 0.75, 8: 1.57},
    ("20m-llama", True): {2: 0.59, 8: 1.39},
    ("llama-0.5b", True): {8: 20.73},
    ("20m", False): {2: 0.71, 8: 1.70},
    ("20m-llama", False): {2: 0.65, 8: 1.42},
    ("llama-0.5b", False): {8: 21.60},
    # With chunks of logits of 64 MB, not 256.
    ("falcon-h1-0.5b", True): {2: 14.44, 8: 35.14},
    ("falcon-h1-0.5b", False): {2: 16.76, 8: 39.83},
}


@pytest.mark.parametrize(("name", "compiled"), PEAKS)
def test_the_estimate_is_near_the_peak_of_a_step(name, compiled):
    pytest.importorskip("triton")
    for sequences, peak in PEAKS[name, compiled].items():
        config = benchmarked(name, sequences)
        found = estimate(config, replace(GPU, compiled=compiled)).peak / 2**30
        assert found == pytest.approx(peak, rel=0.16), sequences


def test_memory_grows_with_layers_tokens_and_vocabulary():
    config = benchmarked("llama-0.5b")

    def activations(**changes):
        model = replace(config.model, **{k: v for k, v in changes.items() if k != "length"})
        length = changes.get("length", config.data.sequence_length)
        changed = replace(config, model=model, data=replace(config.data, sequence_length=length))
        return estimate(changed, GPU).rows["activations of a micro-batch"]

    layers = [activations(num_layers=n) for n in (1, 2, 4)]
    assert layers[2] - layers[1] == 2 * (layers[1] - layers[0])
    # The head's weight in bfloat16, its gradient in both precisions; its logits are computed a
    # chunk at a time.
    more = activations(vocab_size=2 * 32784) - activations()
    assert more == (2 + 4 + 2) * 32784 * 1536
    lengths = [activations(length=n) for n in (512, 1024, 2048)]
    assert lengths[2] - lengths[1] == 2 * (lengths[1] - lengths[0])


# The compiler has advice to give about float32 products.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["20m", "20m-llama"])
def test_two_layers_foretell_the_peak_of_all(name):
    config = benchmarked(name)
    device = replace(choose_device(RuntimeConfig(device="cuda")), captured=False)
    length, vocab_size = config.data.sequence_length, config.model.vocab_size
    data = SimpleNamespace(
        batch=lambda start, size, device: torch.randint(
            vocab_size, (size, length + 1), device=device
        )
    )
    expected = doctor._peak_with_layers(config, device, data, config.model.num_layers)
    assert doctor.measure(config, device, data) == pytest.approx(expected, rel=0.05)
    assert estimate(config, device).peak == pytest.approx(expected, rel=0.15)


# -- several ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro", "dp_degree", "sequences"), [(0, 1, 8), (0, 4, 2), (1, 4, 1), (4, 4, 2), (0, 16, 1)]
)
def test_a_rank_computes_its_share_of_a_batch(data, tmp_path, micro, dp_degree, sequences):
    config = small_run(data, tmp_path / "run")
    data_config = replace(config.data, batch_sequences=8, micro_batch_sequences=micro)
    assert micro_batch(replace(config, data=data_config), dp_degree) == sequences


def held_here(config):
    """Train two steps on this rank with all others; return the bytes that it holds."""
    trainer = Trainer(config)
    going = trainer.steps()
    next(going), next(going)
    found = {"weights": sum(local(p).nbytes for p in trainer.model.parameters())}
    found |= {"raw weights": 0, "moments": 0}
    for state in trainer.optimizer.state.values():
        for key, value in state.items():
            if key == "raw":
                found["raw weights"] += local(value).nbytes
            elif key.partition("_")[0] not in ("row", "col", "scalar"):
                found["moments"] += local(value).nbytes
    kept = {}

    def note(tensor):
        storage = local(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    own = trainer.world.share(config.data.batch_sequences)
    tokens = trainer.data.batch(own.start, len(own), torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        trainer._train_step._parallel.loss(tokens, config.z_loss)
    weights = {local(p).untyped_storage().data_ptr() for p in trainer.model.parameters()}
    # What FSDP gathers for a layer is let go of after it: nothing is left in its storage.
    found["activations"] = sum(s.nbytes() for at, s in kept.items() if at not in weights)
    trainer.close()
    trainer.world.destroy()
    return found


@pytest.fixture(scope="module")
def ranks():
    found = Ranks()
    yield found
    found.stop()


@pytest.mark.slow
@pytest.mark.parametrize("llama", [False, True], ids=["hybrid", "llama"])
@pytest.mark.parametrize("layout", AXES)
def test_ranks_hold_what_was_estimated(data, tmp_path, ranks, layout, llama):
    model = replace(SIZED, ssm_size=0) if llama else SIZED
    config = small_run(data, tmp_path / "run", model=model)
    config = replace(
        config,
        data=replace(config.data, batch_sequences=8),
        parallel=ParallelConfig(**AXES[layout]),
    )
    axes = Axes(**{"data": 1, "shard": 1, "tensor": 1, **AXES[layout]})
    rows = estimate(config, CPU, axes).rows
    found = ranks.run(held_here, config)
    for name in ("weights", "raw weights", "moments"):
        assert max(rank[name] for rank in found) == rows[name], name
    activations = max(rank["activations"] for rank in found)
    assert rows["activations of a micro-batch"] == pytest.approx(activations, rel=0.15)


def test_what_is_exchanged_is_counted():
    config = benchmarked("falcon-h1-0.5b")
    alone, copies, shards, both = (
        estimate(config, CPU, Axes(*axes)).rows
        for axes in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 4, 2))
    )
    assert "gathered weights" not in {*alone, *copies}
    assert copies["gradient buckets"] == copies["gradients"] == alone["gradients"]
    for name in ("weights", "gradients", "raw weights", "moments"):
        assert shards[name] == pytest.approx(alone[name] / 8, rel=1e-3)
        assert shards[name] < both[name] < 1.9 * shards[name]
    # 2 x 32784 x 1024 and a norm outside of the layers.
    outside = 4 * (2 * 32784 * 1024 + 1024)
    layer = (alone["weights"] - outside) / 36
    assert shards["gathered weights"] == outside + 2 * layer
    assert shards["gradient buckets"] == outside
    activations = "activations of a micro-batch"
    assert shards[activations] == copies[activations]
    assert 7 < alone[activations] / shards[activations] < 8


def test_a_degree_that_does_not_divide_is_rejected_as_in_a_run():
    config = benchmarked("falcon-h1-0.5b")
    with pytest.raises(ValueError, match=r"parallel.tensor=3 does not divide model.num_kv_heads=2"):
        estimate(config, CPU, Axes(1, 1, 3))


def test_a_dry_run_and_a_check_up_speak_of_one_rank(data, tmp_path, monkeypatch):
    config = small_run(data, tmp_path / "run", model=replace(LLAMA, vocab_size=257))
    config = replace(config, parallel=ParallelConfig(shard=2))
    assert "Memory of each of 2 ranks on cpu (float32), estimated" in describe(config)
    monkeypatch.setattr(doctor, "_TIMED", 2)
    found = {result.name: result for result in doctor.run_checks(config)}
    assert "needed on each of 2 ranks" in found["memory"].text
    assert "without evaluation and communication" in found["speed"].text
    # torchrun says how many there are.
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "Memory of each of 4 ranks" in describe(config)


def test_a_model_that_fits_only_when_sharded_is_not_tried_whole(data, tmp_path, monkeypatch):
    model = replace(LLAMA, vocab_size=257, hidden_size=128)
    config = small_run(data, tmp_path / "run", model=model)
    config = replace(config, parallel=ParallelConfig(shard=4))
    whole, sharded = (estimate(config, CPU, Axes(*a)).peak for a in ((4, 1, 1), (1, 4, 1)))
    assert sharded < 0.7 * whole
    monkeypatch.setattr(checks, "free_memory", lambda device: 0.9 * whole)
    monkeypatch.setattr(doctor, "build_model", lambda *_: pytest.fail("nothing is built"))
    found = {result.name: result for result in doctor.run_checks(config)}
    assert found["memory"].verdict == "ok"
    assert found["speed"].verdict == "warning"
    assert "sharded over ranks" in found["speed"].text


@pytest.mark.parametrize(
    ("where", "free", "verdict"),
    [
        ("cuda", 80, "failed"),
        ("cuda", 90, "warning"),
        ("cuda", 105, "warning"),
        ("cuda", 120, "ok"),
        ("cpu", 95, "failed"),
        ("cpu", 110, "warning"),
        ("cpu", 120, "ok"),
    ],
)
def test_what_is_near_is_a_warning_where_it_can_be_tried(where, free, verdict, monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda device: free)
    device = replace(CPU, device=torch.device(where))
    result = run_check("memory", lambda: checks.check_memory(device, 100, "estimated"), "")
    assert result.verdict == verdict
    assert ("--data.micro-batch-sequences" in result.advice) == (verdict != "ok")
