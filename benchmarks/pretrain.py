"""Training speed of the presets on one GPU, beside Hugging Face's own model.

    python benchmarks/pretrain.py --peers MAMBA EINOPS --out results/pretrain-h200.json

Its scan is PyTorch's without the package mamba-ssm, which `--peers` names the folder of (it needs
einops); then it is timed eager and compiled.

Whole training steps in bfloat16: forward, backward, clipping, optimizer with multipliers. MFU
counts 6 floating-point operations per parameter and token against `--peak` TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import peers
import torch

from learnable_multipliers.pretrain.config import OptimizerConfig, RuntimeConfig
from learnable_multipliers.pretrain.model.hugging_face import to_config
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.trainer.build import make_optimizer
from learnable_multipliers.pretrain.trainer.device import choose_device
from learnable_multipliers.pretrain.trainer.train_step import TrainStep

LENGTH = 2048


def main() -> None:
    """Measure what was asked for, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="*", default=["falcon-h1-0.5b", "llama-0.5b"])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s")
    parser.add_argument("--no-graph", action="store_true", help="launch kernels one by one")
    parser.add_argument(
        "--recompute", action="store_true", help="measure each preset with recomputed layers too"
    )
    parser.add_argument(
        "--bfloat16", action="store_true", help="measure with matrices stored in bfloat16 too"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave Hugging Face out")
    parser.add_argument("--peers", nargs="*", type=Path, default=[], help="folders of packages")
    parser.add_argument("--profile", type=Path, help="write a table of kernels here")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for preset in options.presets:
        ways = [""] + ["recompute"] * options.recompute + ["bfloat16"] * options.bfloat16
        for way in ways:
            rows.append(ours(preset, options, way))
            show(rows[-1])
    if not options.no_peer:
        rows += hugging_faces("falcon-h1-0.5b", options)
        first = next(row for row in rows if row["model"] == "falcon-h1-0.5b")
        theirs = [row for row in rows if row["what"].startswith("transformers")]
        best = max(row.get("tokens_per_second", 0) for row in theirs)
        if best:
            print(f"ours / the best of Hugging Face's: {first['tokens_per_second'] / best:.2f}x")
    if options.out:
        device = torch.cuda.get_device_name()
        result = {"device": device, "torch": torch.__version__, "runs": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    print({key: value for key, value in row.items() if key != "times_ms"}, flush=True)


def ours(preset: str, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Measure one of the presets; `way` is what differs from the default."""
    fresh()
    start = time.perf_counter()
    model = build(PRESETS[preset], 0, "cuda")
    if way == "bfloat16":
        model.store_matrices_(torch.bfloat16, torch.bfloat16)
    optimizer, _ = make_optimizer(model, OptimizerConfig(kind="adamw", placement="full", lr=1e-4))
    model.compile_layers_()
    if way == "recompute":
        model.recompute_layers_()
    graph = "off" if options.no_graph else "auto"
    passes = TrainStep(model, choose_device(RuntimeConfig(cuda_graph=graph)), z_loss=1e-4)
    tokens = random_tokens(options.sequences, PRESETS[preset].vocab_size)

    def step() -> None:
        passes.gradients([tokens], options.sequences)
        optimizer.step()
        passes.clear()

    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    which = {"": "ours", "recompute": "layers recomputed", "bfloat16": "matrices in bfloat16"}[way]
    row = {"model": preset, "what": f"{which}, AdamW with full multipliers, compiled by layer"}
    row |= timed(step, options, options.sequences, model.num_parameters)
    if options.profile:
        options.profile.parent.mkdir(parents=True, exist_ok=True)
        profile(step, options.profile.with_suffix(f".{preset}{way and '-' + way}.txt"))
    return row | {"first_step_s": round(first, 1)}


def hugging_faces(preset: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure transformers' class as it comes, or with mamba-ssm's scan, eager and compiled."""
    ways = [("its PyTorch path", False)]
    if options.peers:
        peers.add_folders(options.peers)
        peers.put_scan_into_hugging_face(peers.mamba_scan())
        ways = [("mamba-ssm's scan, eager", False), ("mamba-ssm's scan, compiled", True)]
    rows = []
    for way, compiled in ways:
        rows.append(hugging_face(preset, options, way, compiled))
        show(rows[-1])
    return rows


def hugging_face(
    preset: str, options: argparse.Namespace, way: str, compiled: bool
) -> dict[str, Any]:
    """Measure one way with the largest batch that fits, checkpointing if it must."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    settings = to_config(PRESETS[preset])
    what = f"transformers FalconH1ForCausalLM, {way}"
    row: dict[str, Any] = {"model": preset, "what": what}
    for recompute in (False, True):
        for sequences in (8, 4, 2, 1):
            fresh()
            start = time.perf_counter()
            try:
                with torch.device("cuda"):
                    model = FalconH1ForCausalLM(FalconH1Config(**settings)).train()
                if recompute:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                if compiled:
                    model.compile()
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
                tokens = random_tokens(sequences, settings["vocab_size"])[:, :-1]

                def step() -> None:
                    with torch.autocast("cuda", torch.bfloat16):
                        # With a cache the fused operator is not called.
                        loss = model(tokens, labels=tokens, use_cache=False).loss  # noqa: B023
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: B023
                    optimizer.step()  # noqa: B023
                    optimizer.zero_grad()  # noqa: B023

                step()
                torch.cuda.synchronize()
            except torch.OutOfMemoryError:
                model = optimizer = None
                continue
            row["first_step_s"] = round(time.perf_counter() - start, 1)
            # The PyTorch path takes seconds a step.
            slow = argparse.Namespace(**{**vars(options), "warmup": 1, "steps": 5})
            count = sum(parameter.numel() for parameter in model.parameters())
            found = timed(step, options if options.peers else slow, sequences, count)
            return row | {"sequences": sequences, "recomputes": recompute} | found
    return row | {"what": f"{what}: one sequence does not fit"}


def timed(step: Any, options: argparse.Namespace, sequences: int, parameters: int) -> Any:
    """Return the median time of a step and what follows from it."""
    for _ in range(options.warmup):
        step()
    torch.cuda.synchronize()
    # As in training, the host does not wait for the device between steps.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:], strict=False)]
    median = statistics.median(times)
    speed = sequences * LENGTH / median * 1e3
    return {
        "parameters": parameters,
        "ms": round(median, 2),
        "tokens_per_second": round(speed),
        "mfu": round(6 * parameters * speed / options.peak / 1e12, 4),
        # A recorded pass keeps its memory without allocating again, so the start counts too.
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "spread_ms": [round(min(times), 2), round(max(times), 2)],
        "times_ms": [round(t, 3) for t in times],
    }


def profile(step: Any, path: Path) -> None:
    """Write which kernels two steps spend their time in."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    table = found.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90
    )
    path.write_text(table)


def random_tokens(sequences: int, vocab_size: int) -> torch.Tensor:
    """Return a batch of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (sequences, LENGTH + 1), generator=generator).cuda()


def fresh() -> None:
    """Let go of the model before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
