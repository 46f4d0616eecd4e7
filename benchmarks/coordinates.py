"""Powers of the width in a Llama trained on real text, under every recipe of table 1.

Characters of the Python standard library's own sources, one layer, six widths; norms frozen as in
the paper's width runs. Besides the recipes: nothing scaled at all, and scalar multipliers that
learn (the paper's own experiment). One to two minutes for each on one core.

python benchmarks/coordinates.py --out results/coordinates.json
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import learnable_multipliers as lrm
from learnable_multipliers import mup
from learnable_multipliers.equilibrium import equilibrium_rms
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build

# The widest model is the base: others learn faster under the LR recipe, none slower, so that all
# come into equilibrium.
WIDTHS, BASE = (32, 64, 96, 128, 192, 256), 256
LR, WEIGHT_DECAY = 1.6e-3, 4.0
# Few tokens in a step: the equilibrium of eq. 1 is one of noise.
SEQUENCES, LENGTH = 8, 64
# Rows of the head for characters that hardly occur have gradients of one sign, not noise.
VOCABULARY = 64
LEARNED = "learned"
# Multipliers have to get from 1 to 8 at the narrowest in as many steps.
MULTIPLIER_LR_SCALE = 30.0
TRAINED = {**mup.RECIPES, LEARNED: mup.RECIPES["none"]}
# Multipliers are to learn what the last recipe of table 1 prescribes.
EXPECTED = {**mup.RECIPES, LEARNED: mup.RECIPES["multiplier"]}


def main() -> None:
    """Print a table for each recipe, and write all that was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, help="show what --out wrote, and train nothing")
    parser.add_argument("--only", nargs="+", default=list(EXPECTED), choices=list(EXPECTED))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.read:
        for name, rows in json.loads(options.read.read_text())["recipes"].items():
            show(name, [run_from(row) for row in rows])
        return
    torch.set_num_threads(options.threads)
    text = standard_library()
    recipes = {}
    for name in options.only:
        start = time.perf_counter()
        runs = check(name, text, options.steps, range(options.seeds))
        show(name, runs)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        recipes[name] = [asdict(run) for run in runs]
    if options.out:
        settings = {"torch": torch.__version__, "steps": options.steps, "lr": LR}
        settings |= {"weight_decay": WEIGHT_DECAY, "base": BASE, "characters": len(text)}
        options.out.write_text(json.dumps({**settings, "recipes": recipes}) + "\n")


def show(name: str, runs: Sequence[mup.Run]) -> None:
    """Print what came out of one recipe, and how far weights are from where noise puts them."""
    print(f"\n{name}\n{mup.table(runs, EXPECTED[name])}")
    ratios = []
    for run in (runs[0], runs[-1]):
        scaling = mup.scale_layer(TRAINED[name], run.width, BASE)
        noise = equilibrium_rms(LR * scaling.lr, WEIGHT_DECAY * scaling.weight_decay)
        layers = [f"{row.label} {row.weight / noise:.2f}" for row in run.coordinates]
        ratios.append(f"{', '.join(layers)} ({run.width})")
    print(f"|W| over its equilibrium on noise: {'; '.join(ratios)}")


def run_from(content: dict[str, Any]) -> mup.Run:
    """Return a run from its plain data."""
    rows = tuple(mup.Coordinates(**row) for row in content["coordinates"])
    return mup.Run(**{**content, "coordinates": rows})


def check(recipe: str, text: Tensor, steps: int, seeds: Sequence[int]) -> list[mup.Run]:
    """Train every width under one recipe."""
    learned = recipe == LEARNED

    def scalings(width: int) -> dict[str, mup.Scaling]:
        return mup.scale_roles(TRAINED[recipe], width, BASE)

    def model_of(width: int) -> HybridLM:
        shape = {"hidden_size": width, "num_heads": width // 16, "num_kv_heads": width // 16}
        config = ModelConfig(
            vocab_size=VOCABULARY,
            num_layers=1,
            head_dim=16,
            intermediate_size=2 * width,
            freeze_norms=True,
            **shape,
            **mup.mup_fields(scalings(width)),
        )
        model = build(config, seed=torch.initial_seed())
        model.model.final_layernorm.requires_grad_(False)
        return model

    def prepare(model: nn.Module, width: int) -> mup.Training:
        assert isinstance(model, HybridLM)
        rules = mup.rules(
            scalings(width),
            weight_decay=WEIGHT_DECAY,
            kind="scalar" if learned else "none",
            multipliers="fixed",
        )
        plan = lrm.plan(model, rules=rules)
        start_in_equilibrium_(model, plan)
        groups = lrm.param_groups(model, plan, weight_decay=WEIGHT_DECAY)
        return mup.Training(
            optimizer=lrm.AdamW(groups, lr=LR, eps=1e-15, multiplier_lr_scale=MULTIPLIER_LR_SCALE),
            loss=lambda tokens: model.loss(tokens).total,
            batches=batches(text, torch.initial_seed()),
            probes=probes(model.config),
        )

    return mup.coordinate_check(model_of, prepare, WIDTHS, steps=steps, seeds=seeds)


def probes(config: ModelConfig) -> list[mup.Probe]:
    """Watch what reads a norm, so that |x| = 1."""
    layer = "model.layers.0"
    attention = {"reads": f"{layer}.input_layernorm", "multiplier": config.mup_attention_in}
    gate = {"reads": f"{layer}.pre_ff_layernorm", "multiplier": config.mup_gate}
    head = {"reads": "model.final_layernorm", "multiplier": config.mup_head}
    places: dict[str, tuple[str, dict[str, Any]]] = {
        "query": (f"{layer}.self_attn.q_proj.weight", attention),
        "value": (f"{layer}.self_attn.v_proj.weight", attention),
        "gate": (f"{layer}.feed_forward.gate_proj.weight", gate),
        "head": ("lm_head.weight", head),
    }
    return [mup.Probe(weight=name, label=label, **how) for label, (name, how) in places.items()]


@torch.no_grad()
def start_in_equilibrium_(model: nn.Module, plan: lrm.Plan) -> None:
    """Draw matrices at the rms that noise and decay would give them: less to wait for."""
    for name, parameter in plan.resolve(model).items():
        entry = plan[name]
        if not entry.vector:
            std = equilibrium_rms(LR * entry.lr_scale, entry.weight_decay or WEIGHT_DECAY)
            parameter.normal_(0.0, std)


def batches(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield sequences from anywhere in the text."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(LENGTH + 1)
    while True:
        starts = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=generator)
        yield text[starts + within]


def standard_library(most: int = 4_000_000) -> Tensor:
    """Return the sources beside the interpreter as the most frequent bytes, others as one more."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:most]
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rank = numbers.bincount(minlength=256).argsort(descending=True, stable=True).argsort()
    return rank[numbers].clamp(max=VOCABULARY - 1)


if __name__ == "__main__":
    main()
