"""A real training run, small enough for a test: a hybrid on Python source, byte by byte."""

import ast
import dataclasses
import difflib
import inspect
import tarfile
import typing
from pathlib import Path

import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.models.config import ModelConfig
from learnable_multipliers.pretrain.models.hybrid import build

STEPS, BATCH, LENGTH = 2000, 16, 17
SETTINGS = {
    # Rates and decays at which 2 wd sum(lr) is 4.3; scalars like a rate several times as high.
    "adamw": {"lr": 2e-3, "weight_decay": 0.75, "multiplier_lr_scale": 6.0},
    "muon": {"lr": 2e-3, "weight_decay": 0.75, "multiplier_lr_scale": 6.0},
}


def text():
    """Return some of the standard library as small numbers, and how many different ones."""
    modules = (ast, difflib, inspect, tarfile, typing)
    content = b"".join(Path(module.__file__).read_bytes() for module in modules)
    used, numbers = torch.tensor(list(content)).unique(return_inverse=True)
    return numbers, len(used)


def warmup_constant_decay(peak, steps):
    """A tenth of warmup, half of it constant, then an eightfold decay."""
    warmup, decay = steps // 10, steps * 2 // 5
    return [
        peak * min(1.0, (t + 1) / warmup) * 8 ** (-max(0, t + 1 - (steps - decay)) / decay)
        for t in range(steps)
    ]


@dataclasses.dataclass
class Run:
    optimizer: torch.optim.Optimizer
    lrs: list
    start: lrm.Diagnosis
    frequency: torch.Tensor
    placement: str
    loss: float

    def diagnosis(self, lrs=None):
        return lrm.diagnose(
            self.optimizer, lrs=lrs or self.lrs, start=self.start, frequency=self.frequency
        )


def train(kind="adamw", placement="scalar", steps=STEPS, seed=0):
    numbers, vocabulary = text()
    config = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=128,
    )
    model = build(config, seed)
    rules = [lrm.Rule("", "none")] if placement == "none" else []
    plan = lrm.plan(model, "full" if placement == "none" else placement, rules)
    settings = dict(SETTINGS[kind])
    groups = lrm.param_groups(model, plan, weight_decay=settings.pop("weight_decay"))
    optimizer_class = {"adamw": lrm.AdamW, "muon": lrm.Muon}[kind]
    optimizer = optimizer_class(groups, max_grad_norm=1.0, **settings)
    start = lrm.diagnose(optimizer)
    lrs = warmup_constant_decay(settings["lr"], steps)
    generator = torch.Generator().manual_seed(seed)
    seen, losses = torch.zeros(vocabulary), []
    for lr in lrs:
        for group in optimizer.param_groups:
            group["lr"] = lr
        begin = torch.randint(len(numbers) - LENGTH, (BATCH, 1), generator=generator)
        tokens = numbers[begin + torch.arange(LENGTH)]
        seen[tokens[:, :-1].unique()] += 1
        loss = model.loss(tokens).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(optimizer, lrs, start, seen / steps, placement, sum(losses[-100:]) / 100)
