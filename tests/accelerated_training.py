"""Training loops with Accelerate that tests run on ranks, and what is compared of them."""

import os

import torch
from torch import nn

import learnable_multipliers as lrm

STEPS, BATCH = 4, 4


class Model(nn.Module):
    """Matrices, a norm and biases."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.down_proj = nn.Linear(12, 8)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.norm(self.up_proj(x))))


def build(kind, **settings):
    """Return a model and its optimizer: `adamw` and `muon` of ours, torch's by their names."""
    torch.manual_seed(0)
    model = Model()
    settings = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05, **settings}
    if kind in ("adamw", "muon"):
        made = {"adamw": lrm.AdamW, "muon": lrm.Muon}[kind].from_model(model, **settings)
    else:
        inner = getattr(torch.optim, kind)
        if kind == "SGD":
            settings["momentum"] = 0.9
        made = lrm.LearnableMultipliers.from_model(inner, model, **settings)
    return model, made


def batches():
    return torch.randn(STEPS, BATCH, 8, generator=torch.Generator().manual_seed(3))


def loss_of(model, batch):
    return (model(batch) - batch.flip(-1)).square().mean()


def snapshot(model, optimizer):
    """Return weights, raw weights and multipliers as full tensors by name."""
    ours = lrm.unwrap(optimizer)
    found = {f"weight {n}": _full(p) for n, p in model.named_parameters()}
    found |= {f"raw {name}": _full(raw) for name, raw in ours.raw_weights().items()}
    for name, parts in lrm.multipliers(optimizer).items():
        found |= {f"{part} {name}": value for part, value in parts.items()}
    found["norm"] = torch.as_tensor(_full(ours.grad_norm))
    return found


def _full(tensor):
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def plain(kind, steps=STEPS):
    """Train in a plain loop on one process."""
    model, optimizer = build(kind)
    for batch in batches()[:steps]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


def fsdp2(kind, folder, save_at=None, resume=False):
    """Train with Accelerate's FSDP2, each rank on its part of the batch."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    # Accelerate takes the plugin on GPUs alone; all its code for FSDP2 runs on a CPU as well.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model, optimizer = accelerator.prepare(*build(kind))
    monitor = lrm.Monitor(optimizer)
    if resume:
        accelerator.load_state(folder)
    for step in range(2 if resume else 0, STEPS):
        part = batches()[step].chunk(world)[rank]
        accelerator.backward(loss_of(model, part))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            accelerator.save_state(folder)
            # As killed: nothing after the checkpoint.
            break
    num_sharded = sum(hasattr(p, "full_tensor") for p in model.parameters())
    return snapshot(model, optimizer), monitor.health().metrics(), num_sharded
