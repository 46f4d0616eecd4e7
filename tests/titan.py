"""torchtitan's own trainer and debug model on CPU ranks, on tokens made up as they are asked for.

torchtitan 0.3.0 takes CUDA and a later torch for granted: which device it trains on, what memory
that has, a call to change timeouts, and sums of gradients that are scaled on the way. That is
replaced here, and flex attention by torch's own. All else is torchtitan's.
"""

import os
import types
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

import learnable_multipliers as lrm

VOCABULARY, BATCH, LENGTH, STEPS, CLIP = 2048, 2, 16, 4, 0.5
SETTINGS = {"multiplier_lr_scale": 20.0, "rules": [lrm.Rule("lm_head", "scalar")]}
"""Multipliers that move far enough in four steps to tell raw from effective norms, also that of the
head, whose gradient is most of the norm."""


def _devices():
    functions = {name: getattr(torch.cpu, name) for name in ("set_device", "synchronize")}
    return types.SimpleNamespace(
        **functions,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=2**34),
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )


def _tokens(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def _components():
    """Import torchtitan for a CPU; return its trainer and what it reads from."""
    warnings.simplefilter("ignore")
    if "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", _devices()
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None
    import torchtitan.trainer as trainer
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    # It waits for other ranks at the end of a run.
    trainer.time = types.SimpleNamespace(perf_counter=lambda: 0.0, sleep=lambda seconds: None)

    class Tokenizer(BaseTokenizer):
        """Nothing to encode."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, *, tokenizer_path):
            super().__init__()

        def encode(self, *arguments, **settings):
            return []

        def decode(self, *arguments, **settings):
            return ""

        def get_vocab_size(self):
            return VOCABULARY

    class DataLoader(BaseDataLoader):
        """Counts the batches it gave; that is its state."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_rank, **settings):
            self.rank, self.step = dp_rank, 0

        def __iter__(self):
            while True:
                tokens = _tokens(self.step, self.rank)
                self.step += 1
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state_dict):
            self.step = state_dict["step"]

    return Tokenizer.Config(), DataLoader.Config()


def _small(config):
    """Change a debug config to two of its layers and to what a CPU and torch 2.13 can do."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    model = config.model_spec.model
    model.layers = model.layers[:2]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    # Its other backends shard plain tensors on a mesh of several dimensions: not in torch 2.13.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed = 1
    config.activation_checkpoint = None
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    return config


def main():
    """Do what `torchtitan.train` does on its command line, with the debug model made small."""
    _components()
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.llama3 import config_registry
    from torchtitan.train import main as torchtitan_main

    full = config_registry.llama3_debugmodel
    config_registry.llama3_debugmodel = lambda: _small(full())
    # Documents are told apart by flex attention alone.
    Decoder.get_attention_masks = lambda self, positions: None
    torchtitan_main()


def debug_config(folder):
    """Return torchtitan's debug config with two of its layers, on CPU and made-up tokens."""
    tokenizer, dataloader = _components()
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = _small(llama3_debugmodel())
    config.tokenizer, config.dataloader, config.dump_folder = tokenizer, dataloader, str(folder)
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = BATCH, LENGTH, STEPS
    training.max_norm = CLIP
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.metrics.enable_tensorboard = True
    return config


def _result(trainer):
    """Return weights, raw weights, multipliers and health, whole on every rank."""
    model, optimizer = trainer.model_parts[0], lrm.unwrap(trainer.optimizers)
    health = getattr(trainer.metrics_processor, "health", None)
    return {
        "weights": {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()},
        "raw": {name: value.clone() for name, value in optimizer.raw_weights().items()},
        "multipliers": lrm.multipliers(trainer.optimizers),
        "grad_norm": float(optimizer.grad_norm) if optimizer.grad_norm is not None else None,
        "health": health.metrics() if health else None,
        "monitor": trainer.optimizers.monitor.state_dict(),
        "step": trainer.step,
    }


def train(folder, stop=STEPS, name="AdamW"):
    """Train to the end, or die after some steps; return the start and where it got."""
    config = debug_config(folder)
    # Not above: torchtitan is prepared for the CPU before anything imports it.
    from learnable_multipliers.integrations.torchtitan import with_multipliers

    config = with_multipliers(config, name, **SETTINGS)
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            # Gloo sums, and divides by nothing on the way.
            module.set_force_sum_reduction_for_comms(True)
    start = _result(trainer)
    trainer.should_continue_training = lambda: trainer.step < stop
    trainer.train()
    trainer.close()
    return start, _result(trainer)


def stock(folder):
    """Return what our container says to groups without multipliers, and to two model parts."""
    config = debug_config(folder)
    from learnable_multipliers.integrations.torchtitan import OptimizersContainer, with_multipliers

    said = []
    groups = config.optimizer.param_groups
    model = torch.nn.Linear(2, 2)
    for made, parts in (
        (OptimizersContainer.Config(param_groups=groups), [model]),
        (with_multipliers(config).optimizer, [model, model]),
    ):
        try:
            made.build(model_parts=parts)
        except ValueError as error:
            said.append(str(error))
    return said


def plain(start, rates, make, settings):
    """Train the same model, not parallel, by a plain loop from the same start."""
    _components()
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel").model
    config.layers = config.layers[:2]
    for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    model = config.build()
    with torch.no_grad():
        model.init_weights()
    model.load_state_dict(start, strict=False)
    optimizer = make.from_model(model, max_grad_norm=CLIP, **SETTINGS, **settings)
    monitor, steps = lrm.Monitor(optimizer), []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = torch.cat([_tokens(step, rank) for rank in range(dist.get_world_size())])
        output = model(tokens[:, :-1])
        F.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        effective = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
        steps.append((float(optimizer.grad_norm), effective, monitor.health().metrics()))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    raw = {name: value.clone() for name, value in optimizer.raw_weights().items()}
    return {"weights": weights, "raw": raw, "multipliers": lrm.multipliers(optimizer)}, steps


if __name__ == "__main__":
    main()
