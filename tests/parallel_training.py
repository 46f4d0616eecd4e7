"""One small training run, in one process and under every parallelism, for comparison."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import learnable_multipliers as lrm
from paths import Toy, toy_plan

STEPS = 10
CLOSE = {"rtol": 1e-8, "atol": 1e-9}
"""Sums in another order, in float64: the last bits differ, and Adam makes steps of them."""


class Net(Toy):
    """The toy, with a pair of matrices to shard by columns and rows, and one with a single row."""

    def __init__(self):
        super().__init__()
        # Ten features: two ranks have five each, which FSDP2 cannot shard evenly.
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.single = nn.Linear(6, 1, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x * (1 + self.single(x))
        x = x + self.down(torch.tanh(self.up(x)))
        h = torch.tanh(self.qkv(self.frozen(x)))
        h = torch.einsum("bti,eoi->bto", h, self.mix) / 3
        # FSDP2 warns of models that return a view.
        return self.head(self.norm(x + self.out(torch.tanh(h)))).clone()


def fresh(kind, dtype=torch.float64):
    torch.manual_seed(0)
    model = Net().to(dtype)
    if kind != "blocks":
        plan = toy_plan(model, kind)
    else:
        split = {"query": 4, "key": 6, "value": 2}
        rules = [
            lrm.Rule("mix", "scalar", role="down"),
            lrm.Rule(r"qkv\.weight", "row+col", split=split, head_dim=2),
            lrm.Rule(r"up|down", "row+col", scale="log"),
            lrm.Rule(r"unused|out|single", "row+col"),
        ]
        plan = lrm.plan(model, "symmetry-aware", rules)
    return model, plan


def batch(step, part=0, parts=1):
    """Return a part of a step's batch; each part has other numbers."""
    whole = torch.randint(0, 13, (12, 7), generator=torch.Generator().manual_seed(step))
    return whole.chunk(parts)[part]


def backward(model, ids, scale=1.0):
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss * scale).backward()


def make(optimizer, model, plan, **more):
    """Make an optimizer by name, with clipping that bites."""
    if optimizer == "wrapped":
        inner = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False
        )
        return lrm.LearnableMultipliers(inner, model, plan, max_grad_norm=0.2, **more)
    if optimizer == "muon by heads":
        optimizer, more = "muon", {"split": "heads", **more}
    kind = {"adamw": lrm.AdamW, "muon": lrm.Muon}[optimizer]
    return kind(lrm.param_groups(model, plan), lr=1e-2, max_grad_norm=0.2, **more)


def train(model, optimizer, part=0, parts=1, *, micro=1, steps=range(STEPS)):
    """Train on a part of each batch, in some micro-batches."""
    for step in steps:
        for which in range(micro):
            backward(model, batch(step, part * micro + which, parts * micro), 1 / micro)
        optimizer.step()
        optimizer.zero_grad()


def reference(optimizer, kind, clip_multipliers=False, **settings):
    """Train in one process; return model and optimizer."""
    model, plan = fresh(kind, **settings)
    made = make(optimizer, model, plan, clip_multipliers=clip_multipliers)
    train(model, made)
    return model, made


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(model, optimizer):
    """Return everything that must not depend on how the work was parallelized."""
    found = {"norm": optimizer.grad_norm}
    inner = getattr(model, "module", model)
    for name, p in inner.named_parameters():
        found[f"{name} weight"] = whole(p.detach())
        kept = optimizer.state.get(p, {})
        for key, value in kept.items():
            if key.startswith("inner.") and not whole(kept["step"]):
                # Loading makes state, of zeros, for what never had a gradient.
                continue
            found[f"{name} {key}"] = whole(value)
    for name, values in lrm.multipliers(optimizer).items():
        for key, value in values.items():
            found[f"{name} multiplier {key}"] = value
    return found


def largest_difference(found, expected, **tolerance):
    """Compare all of two results; return the largest difference."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **(tolerance or CLOSE), msg=lambda m, n=name: f"{n}: {m}"
        )
    return max((found[n] - v).abs().max().item() for n, v in expected.items())


def shard(model, mesh):
    """Shard some matrices by columns and rows; the rest has replicas on all ranks of the mesh."""
    styles = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": RowwiseParallel(input_layouts=Replicate()),
        "embed": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, styles)


@functools.cache
def meshes():
    """Return every mesh the tests use; all four ranks make all of them together."""
    lines = {n: DeviceMesh("cpu", torch.arange(n), mesh_dim_names=("data",)) for n in (1, 2, 3, 4)}
    square = torch.arange(4).view(2, 2)
    return lines | {
        "hsdp": DeviceMesh("cpu", square, mesh_dim_names=("copies", "shards")),
        "fsdp x tp": DeviceMesh("cpu", square, mesh_dim_names=("data", "model")),
    }


def mesh_of(layout):
    """Return the mesh of a layout such as `fsdp 3`; None on ranks that have no part in it."""
    mesh = meshes()[layout if layout in meshes() else int(layout.split()[1])]
    return None if mesh.get_coordinate() is None else mesh


def parallelize(model, layout, **settings):
    """Parallelize a model; return it with this rank's part of the batch."""
    kind, mesh = layout.split()[0], mesh_of(layout)
    if layout == "fsdp x tp":
        shard(model, mesh["model"])
        fully_shard(model, mesh=mesh["data"], **settings)
        return model, mesh["data"].get_local_rank(), 2
    if kind == "tp":
        return shard(model, mesh), 0, 1
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(
            model, process_group=mesh.get_group(), find_unused_parameters=True
        )
    else:
        fully_shard(model, mesh=mesh, **settings)
    return model, mesh.get_rank(), mesh.size()


class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    """Count collectives and their bytes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)]
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.seen.append((function._opname, size))
        return function(*args, **(kwargs or {}))
