"""How far multipliers drift along the symmetries of a small Llama, and what holds them.

One layer, width 16, tokens that depend at random on the two before them; row and column multipliers
everywhere. Four runs from one start: nothing holds the multipliers; the paper's decay; no decay but
a rebalance every 100 steps, and the same by powers of two. Two minutes for each on one core.

python benchmarks/drift.py --out results/drift.json
python benchmarks/drift.py --lr 3e-3 --out results/drift-far.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import learnable_multipliers as lrm
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build

VOCABULARY, LENGTH, SEQUENCES = 16, 16, 4
WEIGHT_DECAY = 0.1
EVERY = 100
"""Steps from one rebalance to the next; drift is looked at as often, before it is taken back."""
ARMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "decay": {"multiplier_weight_decay": 2e-3},
    "rebalance": {"rebalance": True},
    "powers of two": {"rebalance": True, "powers_of_two": True},
}


def main() -> None:
    """Print a table, and write the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, help="show what --out wrote, and train nothing")
    parser.add_argument("--steps", type=int, default=24_000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.read:
        print(table(json.loads(options.read.read_text())))
        return
    torch.set_num_threads(1)
    settings = {"torch": torch.__version__, "steps": options.steps, "seed": options.seed}
    settings |= {"lr": options.lr, "weight_decay": WEIGHT_DECAY, "every": EVERY}
    runs = {}
    for name, arm in ARMS.items():
        start = time.perf_counter()
        runs[name] = train(options.steps, options.lr, options.seed, **arm)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    content = {**settings, "runs": runs}
    print(table(content))
    if options.out:
        options.out.write_text(json.dumps(content) + "\n")


def table(content: dict[str, Any]) -> str:
    """Return drift by quarter of the runs, how much logits changed, and the loss at the end."""
    quarter = content["steps"] // 4
    ends = [quarter * (i + 1) for i in range(4)]
    heads = [*(f"-{end}" for end in ends), "largest", "exact", "all", "loss"]
    lines = [f"{'':13}{''.join(f'{head:>8}' for head in heads)}"]
    for name, run in content["runs"].items():
        quarters = [
            [i for i, step in enumerate(run["step"]) if end - quarter < step <= end] for end in ends
        ]
        drifts = [f"{mean(run['rms'][i] for i in within):8.3f}" for within in quarters]
        moved = "rebalance" in ARMS[name]
        changes = [f"{run['change'][w]:.0e}" if moved else "-" for w in ("exact", "all")]
        loss = mean(run["loss"][i] for i in quarters[-1])
        lines.append(
            f"{name:13}{''.join(drifts)}{max(run['largest']):8.2f}"
            f"{''.join(f'{change:>8}' for change in changes)}{loss:8.4f}"
        )
    return "\n".join(lines)


def train(
    steps: int,
    lr: float,
    seed: int,
    *,
    multiplier_weight_decay: float = 0.0,
    rebalance: bool = False,
    powers_of_two: bool = False,
) -> dict[str, Any]:
    """Train one model; return drift, loss, and how much moving back changed the logits.

    Those of normalization are moved along last: they are exact only up to the norms' constant.
    """
    model = small_model(seed)
    plan = lrm.plan(model, "full")
    text = chains(seed)
    tokens = text[:, :LENGTH]
    symmetries = lrm.find_symmetries(model, plan, tokens[:8])
    exact = [one for one in symmetries if one.kind != "normalization"]
    opt = lrm.AdamW(
        lrm.param_groups(model, plan, weight_decay=WEIGHT_DECAY),
        lr=lr,
        multiplier_weight_decay=multiplier_weight_decay,
    )
    data = batches(text, seed)
    curve: dict[str, list[float]] = {"step": [], "rms": [], "largest": [], "loss": []}
    changes, losses = {"exact": 0.0, "all": 0.0}, []
    for step in range(1, steps + 1):
        loss = model.loss(next(data)).total
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
        if step % EVERY:
            continue
        rms, largest = pooled(lrm.drift(opt, symmetries))
        numbers = (step, rms, largest, float(torch.stack(losses).mean()))
        for key, number in zip(curve, numbers, strict=True):
            curve[key].append(float(f"{number:.4g}") if key != "step" else step)
        losses.clear()
        for which, along in (("exact", exact), ("all", symmetries)) if rebalance else ():
            change = moved_back(model, opt, along, tokens, powers_of_two)
            changes[which] = max(changes[which], change)
    return {**thinned(curve), "change": changes}


def moved_back(
    model: HybridLM,
    opt: lrm.AdamW,
    symmetries: Iterable[lrm.Symmetry],
    tokens: Tensor,
    powers_of_two: bool,
) -> float:
    """Rebalance; return the largest change of a logit over the largest logit."""
    with torch.no_grad():
        before = model(tokens)
        lrm.rebalance_(opt, symmetries, powers_of_two=powers_of_two)
        after = model(tokens)
    return float((after - before).abs().max() / before.abs().max())


def pooled(drifts: Sequence[Any]) -> tuple[float, float]:
    """Return rms and largest over the members of all symmetries."""
    members = [one.symmetry.num_members for one in drifts]
    square = sum(count * one.rms**2 for count, one in zip(members, drifts, strict=True))
    return math.sqrt(square / sum(members)), max(one.largest for one in drifts)


def thinned(curve: dict[str, list[float]], most: int = 200) -> dict[str, list[float]]:
    """Keep the last point of each of some spans, with the largest drift within it."""
    span = max(1, len(curve["step"]) // most)
    kept = {key: values[span - 1 :: span] for key, values in curve.items()}
    largest = curve["largest"]
    kept["largest"] = [max(largest[i : i + span]) for i in range(0, span * len(kept["step"]), span)]
    return kept


def small_model(seed: int) -> HybridLM:
    """Return a Llama of one layer with two query heads for one key head."""
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_length=LENGTH,
    )
    return build(config, seed=seed)


def chains(seed: int) -> Tensor:
    """Draw texts in which a token depends on the two before it, by a table that is drawn once."""
    generator = torch.Generator().manual_seed(seed)
    table = (2 * torch.randn((VOCABULARY,) * 3, generator=generator)).softmax(-1)
    text = list(torch.randint(VOCABULARY, (2, 256), generator=generator))
    while len(text) < 1000:
        text.append(torch.multinomial(table[text[-2], text[-1]], 1, generator=generator)[:, 0])
    return torch.stack(text, 1)


def batches(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield sequences from anywhere in the texts."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(LENGTH + 1)
    while True:
        which = torch.randint(len(text), (SEQUENCES, 1), generator=generator)
        starts = torch.randint(text.shape[1] - LENGTH, (SEQUENCES, 1), generator=generator)
        yield text[which, starts + within]


if __name__ == "__main__":
    main()
