"""Estimates of memory against what was measured on a GPU, and against what ranks really hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnable_multipliers.optim._sharding import local
from learnable_multipliers.pretrain.config import ParallelConfig, RuntimeConfig
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model import convolution, rotation, ssd
from learnable_multipliers.pretrain.preflight import doctor, machine_checks, memory, trial
from learnable_multipliers.pretrain.preflight.dry_run import describe
from learnable_multipliers.pretrain.preflight.memory import (
    activation_bytes,
    micro_batch,
    rank_bytes,
)
from learnable_multipliers.pretrain.recipes import RECIPES
from learnable_multipliers.pretrain.trainer.device import Device, choose_device
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from ranks import AXES, Ranks
from runs import HYBRID, LLAMA, small_run

CPU = choose_device(RuntimeConfig(device="cpu"))
# Tensors of a CPU, used as a run on a GPU would: in bfloat16, compiled.
LIKE_A_GPU = Device(torch.device("cpu"), torch.bfloat16, True, True, "like a GPU", None)
MEASURED = {
    run["model"]: run["peak_gib"]
    for run in json.loads((Path(__file__).parents[1] / "results/pretrain-h200.json").read_text())[
        "runs"
    ]
    if run["what"].startswith("ours")
}
SIZED = replace(HYBRID, vocab_size=257, num_heads=4, num_kv_heads=2)


@pytest.fixture
def _kernels(monkeypatch):
    """Let the doors choose as on a GPU; the operators behind them say their shapes anywhere."""
    pytest.importorskip("triton")
    for door in (ssd, convolution, rotation):
        monkeypatch.setattr(door, "takes_triton", lambda backend, device, obstacle: not obstacle)


def benchmarked(name):
    """Return the run of the benchmark: 8 sequences of 2048 in one pass."""
    config = RECIPES[name][1]
    return replace(config, data=replace(config.data, batch_sequences=8, micro_batch_sequences=0))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_of_a_compiled_run_is_the_measured_peak(name):
    config = benchmarked(name)
    found = sum(rank_bytes(config, LIKE_A_GPU).values()) / 2**30
    assert found == pytest.approx(MEASURED[name], rel=0.1)
    # Too much rather than too little.
    assert found > MEASURED[name]
    # Without the compiler's choice it was a third too much and more.
    eager = sum(rank_bytes(config, replace(LIKE_A_GPU, compiled=False)).values()) / 2**30
    assert eager > 1.3 * MEASURED[name]


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_are_alike(data, tmp_path, compiled):
    device = replace(CPU, compiled=compiled)
    shape = replace(SIZED, ssm_size=0, num_layers=4)
    config = small_run(data, tmp_path / "run", model=shape)
    # Two of them are traced, the others counted.
    every = memory._kept(config, shape, device, Axes(1, 1, 1))
    assert activation_bytes(config, device) == every


# The compiler has advice to give about float32 products.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_compiled_pass_keeps_what_was_estimated():
    config = benchmarked("20m")
    device = choose_device(RuntimeConfig(device="cuda"))
    expected = activation_bytes(config, device)
    model = trial.build(config.model, device="cuda")
    model.compile_layers_()
    tokens = torch.randint(config.model.vocab_size, (8, 1025), device="cuda")
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        with device.autocast():
            losses = model.loss(tokens, config.z_loss)
        found = torch.cuda.memory_allocated() - before
        losses.total.backward()
    assert found == pytest.approx(expected, rel=0.15)


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
    trainer.world.leave()
    return found


@pytest.fixture(scope="module")
def ranks():
    found = Ranks()
    yield found
    found.stop()


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
    rows = rank_bytes(config, CPU, axes)
    found = ranks.run(held_here, config)
    for name in ("weights", "raw weights", "moments"):
        assert max(rank[name] for rank in found) == rows[name], name
    activations = max(rank["activations"] for rank in found)
    # Tensor parallelism computes both mixers apart, whose products are one product in the estimate.
    limit = 0.06 if axes.tensor > 1 and not llama else 1e-3
    assert rows["activations of a micro-batch"] == pytest.approx(activations, rel=limit)


def test_what_is_exchanged_is_counted():
    config = benchmarked("falcon-h1-0.5b")
    alone, copies, shards, both = (
        rank_bytes(config, CPU, Axes(*axes))
        for axes in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 4, 2))
    )
    assert "gathered weights" not in {*alone, *copies}
    assert copies["gradients on their way"] == copies["gradients"] == alone["gradients"]
    for name in ("weights", "gradients", "raw weights", "moments"):
        assert shards[name] == pytest.approx(alone[name] / 8, rel=1e-3)
        assert shards[name] < both[name] < 1.9 * shards[name]
    # 2 x 32784 x 1024 and a norm outside of the layers.
    outside = 4 * (2 * 32784 * 1024 + 1024)
    layer = (alone["weights"] - outside) / 36
    assert shards["gathered weights"] == outside + 2 * layer
    assert shards["gradients on their way"] == outside
    activations = "activations of a micro-batch"
    assert shards[activations] == copies[activations]
    assert 7 < alone[activations] / shards[activations] < 8


def test_a_degree_that_does_not_divide_is_refused_as_in_a_run():
    config = benchmarked("falcon-h1-0.5b")
    with pytest.raises(ValueError, match=r"parallel.tensor=3 does not divide model.num_kv_heads=2"):
        rank_bytes(config, CPU, Axes(1, 1, 3))


def test_a_dry_run_and_a_check_up_speak_of_one_rank(data, tmp_path, monkeypatch):
    config = small_run(data, tmp_path / "run", model=replace(LLAMA, vocab_size=257))
    config = replace(config, parallel=ParallelConfig(shard=2))
    assert "Memory of each of 2 ranks on cpu (float32):" in describe(config)
    monkeypatch.setattr(trial, "_TIMED", 2)
    found = {finding.about: finding for finding in doctor.examine(config)}
    assert "needed on each of 2 ranks" in found["memory"].text
    assert "evaluation and exchange between ranks left out" in found["speed"].text
    # torchrun says how many there are.
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "Memory of each of 4 ranks" in describe(config)


def test_a_model_that_fits_when_cut_is_not_tried_whole(data, tmp_path, monkeypatch):
    model = replace(LLAMA, vocab_size=257)
    config = small_run(data, tmp_path / "run", model=model)
    config = replace(config, parallel=ParallelConfig(shard=4))
    whole, cut = (sum(rank_bytes(config, CPU, Axes(*a)).values()) for a in ((4, 1, 1), (1, 4, 1)))
    assert cut < 0.8 * whole
    monkeypatch.setattr(machine_checks, "free_memory", lambda device: 0.9 * whole)
    monkeypatch.setattr(trial, "build", lambda *_: pytest.fail("nothing is built"))
    found = {finding.about: finding for finding in doctor.examine(config)}
    assert found["memory"].verdict == "ok"
    assert found["speed"].verdict == "warning"
    assert "cut among ranks" in found["speed"].text


@pytest.mark.parametrize(
    ("where", "free", "verdict"),
    [
        ("cuda", 80, "failed"),
        ("cuda", 95, "warning"),
        ("cuda", 105, "warning"),
        ("cuda", 115, "ok"),
        ("cpu", 95, "failed"),
        ("cpu", 105, "warning"),
        ("cpu", 115, "ok"),
    ],
)
def test_what_is_near_is_a_warning_where_it_can_be_tried(where, free, verdict, monkeypatch):
    monkeypatch.setattr(machine_checks, "free_memory", lambda device: free)
    device = replace(CPU, device=torch.device(where))
    finding = machine_checks.check_memory(device, 100)
    assert finding.verdict == verdict
    assert ("--data.micro-batch-sequences" in finding.advice) == (verdict != "ok")
