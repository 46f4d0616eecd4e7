"""Layers that backward computes again train to the bit as layers that are kept, in less memory."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from learnable_multipliers.optim._sharding import local
from learnable_multipliers.pretrain.config import OptimizerConfig, ParallelConfig, RuntimeConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.preflight.doctor import ShortRun
from learnable_multipliers.pretrain.trainer import memory
from learnable_multipliers.pretrain.trainer.build import make_optimizer
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.memory import check_fits, estimate
from learnable_multipliers.pretrain.trainer.train_step import TrainStep
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from ranks import AXES
from runs import HYBRID, LLAMA, assert_same, everything, small_run, trained

MODELS = {
    "hybrid": replace(HYBRID, vocab_size=257),
    "llama": replace(LLAMA, vocab_size=257),
    "tied": replace(HYBRID, vocab_size=257, tie_embeddings=True),
    "state space alone": replace(HYBRID, vocab_size=257, num_heads=0, intermediate_size=0),
}
# The head of the others takes more than a layer.
SIZES = MODELS | {
    "small vocabulary": replace(HYBRID, vocab_size=16),
    "small vocabulary, llama": replace(LLAMA, vocab_size=16),
}
LAYERS = RuntimeConfig(device="cpu", recompute="layers")


def model_of(shape, *, recompute, device="cpu"):
    model = build(shape, 0, device)
    if recompute:
        model.recompute_layers_()
    return model


def some_tokens(sequences, length=33):
    return torch.randint(257, (sequences, length), generator=torch.Generator().manual_seed(0))


def gradients_of(shape, micro, *, recompute, dtype="float32", compiled=False):
    model = model_of(shape, recompute=recompute)
    if compiled:
        model.compile_layers_()
    device = choose_device(RuntimeConfig(device="cpu", dtype=dtype))
    loss = TrainStep(model, device, z_loss=1e-3).gradients(some_tokens(6).split(micro), 6)
    return {"loss": loss} | {name: p.grad for name, p in model.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 2, 4, 6])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_kept_layers_to_the_bit(name, micro, dtype):
    kept, recomputed = (
        gradients_of(MODELS[name], micro, recompute=r, dtype=dtype) for r in (False, True)
    )
    assert_equal(recomputed, kept)


# The compiler has advice to give about float32 products.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled_layers_are_computed_again_by_the_same_code():
    from torch._dynamo.utils import counters

    shape, found, graphs = replace(MODELS["llama"], num_layers=5), [], []
    for recompute in (False, True):
        torch.compiler.reset()
        counters.clear()
        found.append(gradients_of(shape, 2, recompute=recompute, compiled=True))
        graphs.append(counters["stats"]["unique_graphs"])
    assert_equal(*found)
    # One of all layers, one of the loss.
    assert graphs == [2, 2]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("model", [HYBRID, LLAMA], ids=["hybrid", "llama"])
def test_a_run_is_that_of_kept_layers_to_the_bit(data, tmp_path, model, kind):
    runs, losses = [], []
    for runtime in (RuntimeConfig(device="cpu"), LAYERS):
        config = small_run(data, tmp_path / runtime.recompute, model=model, runtime=runtime)
        micro = replace(config.data, micro_batch_sequences=1)
        optimizer = OptimizerConfig(kind=kind, lr=4e-3)
        runs.append(trained(replace(config, data=micro, optimizer=optimizer)))
        records = read_metrics(config.out)
        losses.append([r["loss"] for r in records if r["kind"] in ("train", "eval")])
    assert runs[1].model.model.recomputes_layers
    assert_same(*runs)
    assert losses[0] == losses[1]


def test_a_run_that_is_resumed_may_compute_layers_again(data, tmp_path):
    whole = trained(small_run(data, tmp_path / "whole"))
    config = small_run(data, tmp_path / "run")
    trainer = Trainer(config)
    for step in trainer.steps():
        if step == 5:
            break
    trainer.close()
    assert_same(trained(replace(config, resume=True, runtime=LAYERS)), whole)


def test_a_check_up_computes_layers_again(data, tmp_path):
    config = small_run(data, tmp_path / "run", model=MODELS["llama"], runtime=LAYERS)
    trainer = Trainer(config)
    short = ShortRun(config, trainer.device, trainer.data)
    trainer.close()
    assert short.model.model.recomputes_layers


# -- several ranks ------------------------------------------------------------------------------


def train_here(config):
    """Train a run on this rank with all others; return its losses and all it holds."""
    trainer = Trainer(config)
    losses, found, compute = [], {}, trainer._train_step.gradients

    def gradients(batches, sequences):
        losses.append(compute(batches, sequences))
        return losses[-1]

    trainer._train_step.gradients = gradients
    for step in trainer.steps():
        if step == len(trainer.schedule):
            found = {name: local(value).clone() for name, value in everything(trainer).items()}
    return found | {"losses": torch.stack(losses)}


# Each model and optimizer with some of the layouts: a run on ranks takes seconds.
TRAINED = {
    "DDP": (LLAMA, "muon"),
    "FSDP": (HYBRID, "muon"),
    "HSDP": (LLAMA, "adamw"),
    "FSDP x TP": (HYBRID, "adamw"),
    "DDP x TP": (HYBRID, "muon"),
}


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES)
def test_ranks_compute_layers_again_to_the_bit(ranks, data, tmp_path, axes):
    model, kind = TRAINED[axes]
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    runs = []
    for runtime in (RuntimeConfig(device="cpu"), LAYERS):
        config = small_run(data, tmp_path / runtime.recompute, steps=12, runtime=runtime)
        config = replace(
            config,
            model=replace(model, **heads),
            data=replace(config.data, batch_sequences=8, micro_batch_sequences=1),
            optimizer=OptimizerConfig(kind=kind, lr=4e-3),
            parallel=ParallelConfig(**AXES[axes]),
        )
        runs.append(ranks.run(train_here, config))
    kept, recomputed = runs
    for found, expected in zip(recomputed, kept, strict=True):
        assert len(found["losses"]) == 6
        assert_equal(found, expected)


# -- memory and price ---------------------------------------------------------------------------


def bytes_kept(model, tokens):
    """Return the bytes of a forward pass that autograd keeps, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model.loss(tokens, 1e-4)
    return sum(storage.nbytes() for at, storage in kept.items() if at not in weights)


@pytest.mark.parametrize("name", MODELS)
def test_several_times_fewer_bytes_are_kept(name):
    shape, tokens = replace(MODELS[name], num_layers=12), some_tokens(4, 129)
    kept, recomputed = (bytes_kept(model_of(shape, recompute=r), tokens) for r in (False, True))
    assert recomputed < kept / 5
    # One more layer is one more input in float32.
    deeper = bytes_kept(model_of(replace(shape, num_layers=13), recompute=True), tokens)
    assert deeper - recomputed == 4 * 4 * 128 * shape.hidden_size


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that are still referred to.

    Weights and gradients are there before.
    """

    def __init__(self, model):
        super().__init__()
        self._live, self._now, self.peak = {}, 0, 0
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            for tensor in (parameter, parameter.grad):
                self._live[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return found

    def _note(self, storage):
        at = storage._cdata
        if at not in self._live:
            self._live[at] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._forget, at)

    def _forget(self, at):
        self._now -= self._live.pop(at)


@pytest.mark.parametrize("recompute", ["none", "layers"])
@pytest.mark.parametrize("num_layers", [2, 12])
@pytest.mark.parametrize("name", SIZES)
def test_the_estimate_is_near_the_peak_of_a_pass(data, tmp_path, name, num_layers, recompute):
    shape = replace(SIZES[name], num_layers=num_layers)
    config = small_run(data, tmp_path / "run", model=shape)
    config = replace(config, runtime=replace(LAYERS, recompute=recompute))
    model = model_of(shape, recompute=recompute == "layers")
    with PeakBytes(model) as counted:
        model.loss(some_tokens(4) % shape.vocab_size, 1e-4).total.backward()
    rows = estimate(config, choose_device(config.runtime)).rows
    found = rows["activations of a micro-batch"] + rows.get("gradients of the logits", 0)
    assert found == pytest.approx(counted.peak, rel=0.15)


def test_the_products_of_layers_are_computed_again_but_the_last():
    shape = replace(MODELS["llama"], num_layers=6)
    tokens, counts = some_tokens(2), []
    for recompute in (False, True):
        model = model_of(shape, recompute=recompute)
        with FlopCounterMode(display=False) as operations:
            model.loss(tokens).total.backward()
        counts.append(operations.get_flop_counts()["Global"][torch.ops.aten.mm])
    # 2 operations per weight and token. Backward needs no output of a layer's last product.
    layer = model.model.layers[0]
    weights = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    weights -= layer.feed_forward.down_proj.weight.numel()
    assert counts[1] - counts[0] == 6 * 2 * weights * 2 * 32
    assert 1.15 < counts[1] / counts[0] < 4 / 3


def test_a_run_that_does_not_fit_is_told_what_helps(data, tmp_path, monkeypatch):
    shape = replace(MODELS["hybrid"], num_layers=12)
    config = small_run(data, tmp_path / "run", model=shape)
    device = choose_device(config.runtime)
    less = replace(config, runtime=LAYERS)
    total = 1.05 * estimate(less, device).peak / 1.25
    assert estimate(config, device).peak > 1.25 * total
    monkeypatch.setattr(memory, "total_memory", lambda _: total)
    with pytest.raises(ValueError, match="or set --runtime.recompute layers, or choose a smaller"):
        check_fits(config, device)
    check_fits(less, device)


# -- on a GPU -----------------------------------------------------------------------------------


# The compiler has advice to give about float32 products.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("name", ["hybrid", "llama"])
def test_a_captured_pass_computes_layers_again(name, micro, compiled):
    losses = []
    for recompute in (False, True):
        torch.compiler.reset()
        model = model_of(MODELS[name], recompute=recompute, device="cuda")
        optimizer, _ = make_optimizer(model, OptimizerConfig(lr=1e-2))
        if compiled:
            model.compile_layers_()
        train_step = TrainStep(model, choose_device(RuntimeConfig(device="cuda")), z_loss=1e-3)
        found = []
        for _ in range(8):
            tokens = some_tokens(4).cuda()
            found.append(train_step.gradients(tokens.split(micro), 4).item())
            optimizer.step()
            train_step.clear()
        assert train_step._graph is not None
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1][-1] < losses[1][0] - 0.3
