"""A real training run, small enough for a test: a Llama on Python source, byte by byte.

    python tests/small_training.py --placement scalar --seed 0

prints its diagnosis, and the medians of |log(measured / predicted)|.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import statistics
import tarfile
import typing
from pathlib import Path

import torch

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import build

STEPS, BATCH, LENGTH = 1500, 16, 17
LR, WEIGHT_DECAY = 2e-3, 1.0
"""2 wd sum(lr) is 4.3 over the run."""


def text():
    """Return some of the standard library as small numbers, and how many different ones."""
    modules = (ast, difflib, inspect, tarfile, typing)
    content = b"".join(Path(module.__file__).read_bytes() for module in modules)
    used, numbers = torch.tensor(list(content)).unique(return_inverse=True)
    return numbers, len(used)


def warmup_constant_decay(peak, steps):
    """A tenth of warmup, half of it constant, then an eightfold decay."""
    warmup, decay = max(steps // 10, 1), max(steps * 2 // 5, 1)
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
    loss: float
    """Over the last hundred steps, nats per byte."""
    weight_decay: float = WEIGHT_DECAY

    def diagnosis(self, lrs=None):
        return lrm.diagnose(
            self.optimizer, lrs=lrs or self.lrs, start=self.start, frequency=self.frequency
        )


def train(kind="adamw", placement="scalar", steps=STEPS, seed=0, ssm_size=0):
    """Train a Llama, or a hybrid, on Python source."""
    numbers, vocabulary = text()
    config = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=128,
        ssm_size=ssm_size,
    )
    model = build(config, seed)
    rules = [lrm.Rule("", "none")] if placement == "none" else []
    plan = lrm.plan(model, "full" if placement == "none" else placement, rules)
    groups = lrm.param_groups(model, plan, weight_decay=WEIGHT_DECAY)
    # Scalars like a rate several times as high as matrices.
    optimizer = {"adamw": lrm.AdamW, "muon": lrm.Muon}[kind](
        groups, lr=LR, multiplier_lr_scale=6.0, max_grad_norm=1.0
    )
    start = lrm.diagnose(optimizer)
    lrs = warmup_constant_decay(LR, steps)
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
    loss = sum(losses[-100:]) / len(losses[-100:])
    return Run(optimizer, lrs, start, seen / steps, loss)


ENDS = ("embedding", "head")


def median_departure(diagnosis, kind):
    """Return the median of |log(measured / predicted)| over hidden matrices, or multipliers."""
    departures = [
        abs(reading.log_ratio)
        for reading in diagnosis.readings
        if reading.kind == kind and (kind == "multiplier" or reading.role not in ENDS)
    ]
    return statistics.median(departures) if departures else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--placement", default="scalar")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = train(options.optimizer, options.placement, seed=options.seed)
    diagnosis = run.diagnosis()
    constant = run.diagnosis([max(run.lrs)] * len(run.lrs))
    print(diagnosis)
    print(
        f"loss {run.loss:.3f}; hidden matrices {median_departure(diagnosis, 'matrix'):.3f}, under "
        f"a constant rate {median_departure(constant, 'matrix'):.3f}; multipliers",
        median_departure(diagnosis, "multiplier"),
    )


if __name__ == "__main__":
    main()
