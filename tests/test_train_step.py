"""Train step: micro-batches add up to the batch, and a replayed graph equals an eager step."""

from dataclasses import replace

import pytest
import torch

from learnable_multipliers.pretrain.config import OptimizerConfig, RuntimeConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.build import make_optimizer
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.train_step import TrainStep
from runs import HYBRID

SHAPE = replace(HYBRID, vocab_size=64)


def batches(count, sequences, device):
    generator = torch.Generator().manual_seed(0)
    size = (count, sequences, 33)
    return torch.randint(SHAPE.vocab_size, size, generator=generator).to(device).unbind()


def gradients_of(micro, sequences):
    model = build(SHAPE).double()
    device = replace(choose_device(RuntimeConfig(device="cpu")), dtype=torch.float32)
    train_step = TrainStep(model, device, z_loss=1e-3)
    (tokens,) = batches(1, sequences, "cpu")
    loss = train_step.gradients(tokens.split(micro), sequences)
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro", [1, 2, 4, 6])
def test_micro_batches_add_up_to_the_batch(micro):
    loss, found = gradients_of(micro, 6)
    whole, expected = gradients_of(6, 6)
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_with_another_rate_does_not_wait_for_the_device(kind):
    model = build(SHAPE, 0, "cuda")
    optimizer, _ = make_optimizer(model, OptimizerConfig(kind=kind, lr=1e-2))
    device = choose_device(RuntimeConfig(device="cuda", cuda_graph="off", dtype="float32"))
    train_step = TrainStep(model, device, z_loss=1e-3)
    (tokens,) = batches(1, 4, "cuda")
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        train_step.gradients([tokens], 4)
        # The first steps make state and tables, and compile kernels.
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        train_step.clear()


# The compiler has advice to give about float32 products.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("micro", "sequences"), [(4, 4), (2, 4), (3, 4)])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_recorded_passes_train_as_computed_ones(micro, sequences, kind):
    losses = {}
    for graph in ("on", "off"):
        model = build(SHAPE, 0, "cuda")
        optimizer, _ = make_optimizer(model, OptimizerConfig(kind=kind, lr=1e-2))
        model.compile_layers_()
        device = choose_device(RuntimeConfig(device="cuda", cuda_graph=graph, dtype="float32"))
        train_step = TrainStep(model, device, z_loss=1e-3)
        losses[graph] = []
        # The same few batches again and again, so that the loss falls; a batch of another size
        # in the middle has to be recorded anew.
        data = [*batches(2, sequences, "cuda") * 8, *batches(2, 2 * sequences, "cuda") * 8]
        for tokens in data:
            loss = train_step.gradients(tokens.split(micro), len(tokens))
            losses[graph].append(loss.item())
            optimizer.step()
            train_step.clear()
        assert (train_step._graph is not None) == (graph == "on" and sequences % micro == 0)
    torch.testing.assert_close(
        torch.tensor(losses["on"]), torch.tensor(losses["off"]), rtol=2e-3, atol=2e-3
    )
    assert losses["on"][15] < losses["on"][0] - 0.3
