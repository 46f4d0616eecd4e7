"""What multipliers cost: optimizer step and training step, with and without, on one GPU.

One run, one table. Every figure is a median of times taken with device events after warm-up, in
two repetitions; every ratio is within the run, against a named peer:

    python benchmarks/optimizers.py --out results/optimizers.json

Peers: torch.nn.utils.clip_grad_norm_ + torch.optim.AdamW(fused=True); for bfloat16 parameters the
same on float32 masters with the casts both ways; torch.optim.Muon on the hidden matrices, and
other Muons that are installed or lie in the folders of `--peers`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from llama import Llama, Size
from timing import machine, milliseconds, without_host
from torch import nn

import learnable_multipliers as lrm

SIZES = {
    "432m": Size(),
    "tiny": Size(width=64, hidden=160, heads=4, layers=2, vocabulary=256),
}


def main() -> None:
    """Measure everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="432m")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--pairs", type=int, default=60, help="alternated pairs of training steps")
    parser.add_argument("--repeats", type=int, default=20, help="timed optimizer steps")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="*", type=Path, default=[], help="folders of packages")
    options = parser.parse_args()
    peers.add_folders(options.peers)
    results: dict[str, Any] = {"machine": machine(), "size": options.size}
    size = SIZES[options.size]
    for part in options.only:
        results[part] = PARTS[part](size, options)
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps({part: results[part]}, indent=1), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


# -- timing ---------------------------------------------------------------------------------------


def twice(step: Callable[[], Any], repeats: int) -> list[float]:
    """Return two repetitions of a measurement: their difference is the noise."""
    return [round(milliseconds(step, repeats), 4) for _ in range(2)]


def with_gradients(model: nn.Module) -> nn.Module:
    """Give every parameter a random gradient."""
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return model


def build(size: Size, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model on the GPU with gradients."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(size)
    return with_gradients(model.to(dtype))


def freed() -> None:
    """Drop what the last measurement left behind."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# -- optimizers -----------------------------------------------------------------------------------


def torch_adamw(model: nn.Module, *, capturable: bool = False) -> Callable[[], None]:
    """Clip and step as people do with torch alone."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=capturable
    )

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def torch_adamw_masters(model: nn.Module, *, capturable: bool = False) -> Callable[[], None]:
    """The same for a bfloat16 model with float32 masters."""
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(
        masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=capturable
    )
    grads = [master.grad for master in masters]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(grads, [p.grad for p in parameters])
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        torch._foreach_copy_(parameters, masters)

    return step


def our_adamw(model: nn.Module, placement: str | None) -> Callable[[], None]:
    """Ours, with multipliers or without any."""
    groups = lrm.param_groups(model, planned(model, placement))
    optimizer = lrm.AdamW(groups, lr=1e-4, max_grad_norm=1.0)
    return optimizer.step


def planned(model: nn.Module, placement: str | None) -> lrm.Plan:
    """Return a plan; None is one that gives nothing to any matrix."""
    nothing = [lrm.Rule("norm"), lrm.Rule("weight$", "none")]
    return lrm.plan(model, placement or "full", nothing if placement is None else ())


def adamw(size: Size, options: Any) -> dict[str, Any]:
    """Time AdamW alone, float32 parameters."""
    found: dict[str, Any] = {"copy_tb_per_s": round(copy_bandwidth(), 3)}
    makers = {
        "torch clip + fused": lambda model, graph: torch_adamw(model, capturable=graph),
        "ours, no multipliers": lambda model, graph: our_adamw(model, None),
        "ours, row+col": lambda model, graph: our_adamw(model, "full"),
        "ours, scalar": lambda model, graph: our_adamw(model, "scalar"),
    }
    return found | compared(makers, size, torch.float32, options, "torch clip + fused", 40)


def adamw_bfloat16(size: Size, options: Any) -> dict[str, Any]:
    """Time AdamW alone, bfloat16 parameters and gradients."""
    makers = {
        "torch masters": lambda model, graph: torch_adamw_masters(model, capturable=graph),
        "ours, no multipliers": lambda model, graph: our_adamw(model, None),
        "ours, row+col": lambda model, graph: our_adamw(model, "full"),
    }
    return compared(makers, size, torch.bfloat16, options, "torch masters", 34)


def compared(
    makers: dict[str, Any], size: Size, dtype: torch.dtype, options: Any, peer: str, bytes_each: int
) -> dict[str, Any]:
    """Time several optimizers on one model, eager and captured."""
    found: dict[str, Any] = {}
    for name, make in makers.items():
        model = build(size, dtype)
        freed()
        before = torch.cuda.memory_allocated()
        eager = make(model, False)
        times = twice(eager, options.repeats)
        number = sum(p.numel() for p in model.parameters())
        state = (torch.cuda.memory_allocated() - before) / number
        replay = without_host(make(model, True))
        found[name] = {
            "eager_ms": times,
            "captured_ms": twice(replay, options.repeats),
            "state_bytes_per_parameter": round(state, 2),
        }
        if "row+col" in name:
            rate = number * bytes_each / min(found[name]["captured_ms"]) / 1e9
            found[name]["tb_per_s"] = round(rate, 3)
        del model, eager, replay
        freed()
    for row in found.values():
        for way in ("eager_ms", "captured_ms"):
            row[way.replace("_ms", "_ratio")] = round(min(row[way]) / min(found[peer][way]), 4)
    return found


def muon(size: Size, options: Any) -> dict[str, Any]:
    """Time Muon on the hidden matrices alone: no clipping, no AdamW beside it."""
    theirs = hidden_only(size)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    peer = torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw").step
    found: dict[str, Any] = {
        "matrices": len(matrices),
        "torch.optim.Muon": {"eager_ms": twice(peer, max(3, options.repeats // 4))},
    }
    for label, other in peers.muons(matrices).items():
        found[label] = {"eager_ms": twice(other, max(3, options.repeats // 4))}
    del theirs, matrices, peer
    freed()
    steps = {}
    for name, placement, coefficients in (
        ("ours, no multipliers", None, "quintic"),
        ("ours, row+col", "full", "quintic"),
        ("ours, row+col, polar express", "full", "polar-express"),
    ):
        model = hidden_only(size)
        groups = lrm.param_groups(model, planned(model, placement))
        steps[name] = lrm.Muon(groups, lr=1e-3, coefficients=coefficients).step
        found[name] = {"eager_ms": twice(steps[name], options.repeats)}
    replays = {name: without_host(step) for name, step in steps.items()}
    for name, replay in replays.items():
        found[name]["captured_ms"] = twice(replay, options.repeats)
    least = min(found["torch.optim.Muon"]["eager_ms"])
    for name in steps:
        found[name]["ratio"] = round(min(found[name]["eager_ms"]) / least, 4)
    # Newton-Schulz heats the chip: differences hold only between neighbours in time.
    for way, both in (("eager", steps), ("captured", replays)):
        plain, carried = both["ours, no multipliers"], both["ours, row+col"]
        extra = [
            milliseconds(carried, 1, warmup=0) - milliseconds(plain, 1, warmup=0)
            for _ in range(2 * options.repeats)
        ]
        found[f"extra_of_multipliers_{way}_ms"] = round(statistics.median(extra), 4)
    return found


def hidden_only(size: Size) -> nn.Module:
    """Return the model without its ends, and with nothing but matrices to train."""
    model: Any = build(size)
    del model.embed_tokens, model.lm_head
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return model


# -- training steps -------------------------------------------------------------------------------


def training(size: Size, options: Any) -> dict[str, Any]:
    """Time whole training steps of 16k tokens, alternating: plain, ours, explicit."""
    ids = torch.randint(0, size.vocabulary, (8, 2048), device="cuda")
    steps: dict[str, Callable[[], None]] = {}
    models = {}
    for name in ("plain", "ours", "explicit"):
        model = models[name] = build(size)
        if name == "plain":
            parameters = list(model.parameters())
            optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
        elif name == "ours":
            plan = lrm.plan(model, "full")
            optimizer = lrm.AdamW(lrm.param_groups(model, plan), lr=1e-4, max_grad_norm=1.0)
        else:
            plan = lrm.plan(model, "full")
            lrm.reparametrize(model, plan)
            parameters = list(model.parameters())
            groups = lrm.param_groups(model, plan)
            optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

        def step(
            model: Any = model, optimizer: Any = optimizer, clips: bool = name != "ours"
        ) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids)
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    for step in steps.values():
        milliseconds(step, 3, warmup=5)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(options.pairs):
        order = list(steps) if pair % 2 else list(reversed(steps))
        for name in order:
            if name == "explicit" and pair % 4:
                continue
            times[name].append(milliseconds(steps[name], 1, warmup=0))
    found: dict[str, Any] = {
        name: {"ms": round(statistics.median(t), 3), "steps": len(t)} for name, t in times.items()
    }
    ratios = sorted(o / p - 1 for o, p in zip(times["ours"], times["plain"], strict=True))
    low, high = median_interval(ratios)
    found["ours_over_plain_percent"] = {
        "median": round(100 * statistics.median(ratios), 3),
        "interval_95": [round(100 * low, 3), round(100 * high, 3)],
        "pairs": len(ratios),
    }
    explicit = found["explicit"]["ms"] / found["plain"]["ms"] - 1
    found["explicit_over_plain_percent"] = round(100 * explicit, 2)
    return found


def median_interval(ordered: list[float]) -> tuple[float, float]:
    """Return a 95% confidence interval of the median, from order statistics."""
    n = len(ordered)
    half = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - half))], ordered[min(n - 1, int(n / 2 + half))]


def large_batch(size: Size, options: Any) -> dict[str, Any]:
    """Time a step of 256k tokens, 16 micro-batches, and what multipliers add to it."""
    ids = torch.randint(0, size.vocabulary, (8, 2048), device="cuda")
    model = build(size)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        for _ in range(16):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids) / 16
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Any] = {"plain_step_ms": round(milliseconds(step, 3, warmup=1), 2)}
    optimizer.state.clear()
    freed()
    with_gradients(model)
    plain = torch_adamw(model)
    ours = our_adamw(build(size), "full")
    milliseconds(plain, 5), milliseconds(ours, 5)
    extra = [
        milliseconds(ours, 1, warmup=0) - milliseconds(plain, 1, warmup=0)
        for _ in range(options.repeats)
    ]
    found["extra_optimizer_ms"] = round(statistics.median(extra), 4)
    percent = 100 * found["extra_optimizer_ms"] / found["plain_step_ms"]
    found["extra_percent_of_step"] = round(percent, 4)
    return found


def copy_bandwidth() -> float:
    """Return measured TB/s of a large copy, bytes read and written together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), 20) / 1e9


def memory(size: Size, options: Any) -> dict[str, Any]:
    """Measure what training keeps per parameter: weight, gradient and optimizer state."""
    found = {}
    for name in ("plain float32", "ours float32", "ours bfloat16"):
        freed()
        start = torch.cuda.memory_allocated()
        model = build(size, torch.bfloat16 if "bfloat16" in name else torch.float32)
        step = torch_adamw(model) if "plain" in name else our_adamw(model, "full")
        step()
        number = sum(p.numel() for p in model.parameters())
        found[name] = round((torch.cuda.memory_allocated() - start) / number, 3)
        del model, step
        freed()
    return found


PARTS: dict[str, Callable[[Size, Any], dict[str, Any]]] = {
    "adamw": adamw,
    "adamw_bfloat16": adamw_bfloat16,
    "muon": muon,
    "training": training,
    "large_batch": large_batch,
    "memory": memory,
}


if __name__ == "__main__":
    main()
