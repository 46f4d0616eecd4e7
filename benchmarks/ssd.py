"""The scan of Mamba2 on one GPU: time, time of each kernel, and error against float64.

One run, one table, batch 8 of 2048 steps, 24 heads of 64, a state of 128:

    python benchmarks/ssd.py --out results/ssd.json
    python benchmarks/ssd.py --tune --out results/ssd_tuned.json

    python benchmarks/ssd.py --heads 48 --state 256 --peers MAMBA EINOPS --out results/ssd-256.json

Times are medians in milliseconds: `eager` as called from Python, `graph` replayed from a CUDA
graph, which leaves the host out. Peers are the chunked scan in PyTorch under torch.compile, and
mamba-ssm's Triton kernels where `--peers` names the folder they were unpacked into (they need
einops). What fails is printed and left out; the rest is measured all the same.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import triton
from timing import machine, without_host
from torch import Tensor

from learnable_multipliers.pretrain.model import ssd_launch as launch
from learnable_multipliers.pretrain.model.ssd import ssd, ssd_chunked

NAMES = ("y", "x", "dt", "A", "B", "C", "D")
# For each kernel, what to try for each option, one option after another.
CANDIDATES: dict[str, list[dict[str, tuple[int, ...]]]] = {
    "states": [
        {"BLOCK_DIM": (32, 64), "BLOCK_STATE": (64, 128), "num_warps": (4, 8)},
        {"num_stages": (1, 2, 3, 4)},
        {"maxnreg": (0, 128, 168)},
    ],
    "outputs": [
        {"BLOCK_ROWS": (64, 128), "BLOCK_DIM": (32, 64, 128), "num_warps": (4, 8)},
        {"NUM_HEADS": (2, 3, 4, 6, 8, 12, 24)},
        {"num_stages": (1, 2, 3)},
        {"maxnreg": (0, 128, 168)},
    ],
    "scores": [
        {"BLOCK_COLS": (32, 64, 128), "BLOCK_STATE": (32, 64, 128), "num_warps": (4, 8)},
        {"NUM_HEADS": (6, 8, 12, 24)},
        {"num_stages": (1, 2, 3)},
        {"maxnreg": (0, 128, 168)},
    ],
    "c_grads": [
        {"BLOCK_STATE": (32, 64, 128), "num_warps": (4, 8)},
        {"NUM_HEADS": (6, 8, 12, 24)},
        {"num_stages": (1, 2, 3, 4)},
        {"maxnreg": (0, 128, 168)},
    ],
}
CANDIDATES["state_grads"] = CANDIDATES["states"]
CANDIDATES["inputs"] = CANDIDATES["outputs"]
CANDIDATES["b_grads"] = CANDIDATES["c_grads"]


def main() -> None:
    """Measure everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--state", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument(
        "--tune", nargs="*", choices=CANDIDATES, help="kernels to tune; all if bare"
    )
    parser.add_argument("--tune-seconds", type=float, default=300, help="stop tuning after this")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="*", type=Path, default=[], help="folders of packages")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    peers.add_folders(options.peers)
    results: dict[str, Any] = {"machine": machine(), "options": vars(options) | {"out": None}}
    parts = dict.fromkeys(options.only)
    if options.tune is not None:
        parts = {"tune": None} | parts
    for part in parts:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            results[part] = (tune if part == "tune" else PARTS[part])(options)
        except Exception:
            traceback.print_exc()
            results[part] = {"failed": traceback.format_exc(limit=-1)}
        print(f"\n{part}\n{table(results[part])}", flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


def table(results: dict[str, Any]) -> str:
    """Return a line per result."""
    width = max((len(str(name)) for name in results), default=0)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in results.items())


def inputs(options: argparse.Namespace, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return x, dt, A, B, C and D; x, B and C are slices of one tensor, as in a model."""
    torch.manual_seed(0)
    heads, groups = options.heads, options.groups
    sizes = (heads * options.head_dim, groups * options.state, groups * options.state)
    joint = torch.randn(options.batch, options.length, sum(sizes), device="cuda").to(dtype)
    x, keys, queries = joint.split(sizes, -1)
    # As a model starts: dt log-uniform from 0.001 to 0.1, -A from 1 to 16.
    dt = torch.exp(
        torch.empty(options.batch, options.length, heads, device="cuda").uniform_(-7, -2.3)
    )
    tensors = (
        x.unflatten(-1, (heads, options.head_dim)),
        dt,
        -torch.empty(heads, device="cuda").uniform_(1, 16),
        keys.unflatten(-1, (groups, options.state)),
        queries.unflatten(-1, (groups, options.state)),
        torch.randn(heads, device="cuda"),
    )
    return [tensor.detach().requires_grad_() for tensor in tensors]


def with_gradients(scan: Callable[..., Tensor], tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Return the output and all six gradients."""
    y = scan(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy.to(y.dtype))]


def milliseconds(step: Callable[[], Any]) -> float:
    """Return the median time of a step."""
    return round(float(triton.testing.do_bench(step, warmup=25, rep=150, return_mode="median")), 4)


def attempt(measure: Callable[[], Any]) -> Any:
    """Return a measurement, or what went wrong."""
    try:
        return measure()
    except Exception as error:
        torch.cuda.synchronize()
        return f"failed: {type(error).__name__}: {str(error)[:300]}"


# -- parts ----------------------------------------------------------------------------------------


def errors(options: argparse.Namespace) -> dict[str, Any]:
    """Return relative errors in bfloat16 against float64, by output and gradient."""
    tensors = inputs(options)
    dy = torch.randn_like(tensors[0])
    exact = [t.detach().double().requires_grad_() for t in tensors]
    truth = with_gradients(lambda *t: ssd_chunked(*t, options.chunk), exact, dy)
    scans = {
        "triton": lambda *t: ssd(*t, options.chunk, backend="triton"),
        "torch": lambda *t: ssd_chunked(*t, options.chunk),
    }

    def of(scan: Callable[..., Tensor]) -> dict[str, str]:
        found = with_gradients(scan, tensors, dy)
        pairs = zip(NAMES, found, truth, strict=True)
        return {n: f"{float((f.double() - t).norm() / t.norm()):.1e}" for n, f, t in pairs}

    return {name: attempt(lambda scan=scan: of(scan)) for name, scan in scans.items()}


def times(options: argparse.Namespace) -> dict[str, Any]:
    """Return forward, and forward with backward, of the kernels and of their peer."""
    tensors = inputs(options)
    dy = torch.randn_like(tensors[0])
    compiled = torch.compile(ssd_chunked, fullgraph=True, dynamic=False)
    scans: dict[str, Callable[..., Tensor]] = {
        f"triton, chunks of {chunk}": lambda *t, c=chunk: ssd(*t, c, backend="triton")
        for chunk in sorted({options.chunk, 64, 128}, reverse=True)
    }
    scans["torch compiled"] = lambda *t: compiled(*t, options.chunk)
    if options.peers:
        theirs = peers.mamba_scan()
        for chunk in (64, 128, 256):
            scans[f"mamba-ssm, chunks of {chunk}"] = (
                lambda x, dt, A, B, C, D, c=chunk: theirs(x, dt, A, B, C, c, D=D)  # noqa: N803
            )
    results = {}
    for name, scan in scans.items():

        def forward(scan: Callable[..., Tensor] = scan) -> None:
            with torch.no_grad():
                scan(*tensors)

        def both(scan: Callable[..., Tensor] = scan) -> None:
            with_gradients(scan, tensors, dy)

        results[name] = {
            "forward eager": attempt(lambda f=forward: milliseconds(f)),
            "forward graph": attempt(lambda f=forward: milliseconds(without_host(f))),
            "both eager": attempt(lambda f=both: milliseconds(f)),
            "both graph": attempt(lambda f=both: milliseconds(without_host(f))),
        }
        print(f"  {name}: {results[name]}", flush=True)
    return results


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """Return microseconds per call and calls per layer of every kernel, forward and backward."""
    tensors = inputs(options)
    dy = torch.randn_like(tensors[0])
    repeats = 10

    def step() -> None:
        with_gradients(lambda *t: ssd(*t, options.chunk, backend="triton"), tensors, dy)

    step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    spent = {}
    for event in profile.key_averages():
        total = getattr(event, "self_device_time_total", None)
        total = event.self_cuda_time_total if total is None else total
        if total and "CPU" not in str(getattr(event, "device_type", "")):
            spent[event.key[:70]] = (total / repeats, event.count / repeats)
    order = sorted(spent, key=lambda key: -spent[key][0])
    found = {key: f"{spent[key][0]:.1f} us in {spent[key][1]:g} calls" for key in order}
    return found | {"sum": f"{sum(total for total, _ in spent.values()):.1f} us"}


def resources(options: argparse.Namespace) -> dict[str, Any]:
    """Return registers, spills and shared memory of every kernel compiled so far, if told."""
    tensors = inputs(options)
    with_gradients(
        lambda *t: ssd(*t, options.chunk, backend="triton"), tensors, torch.randn_like(tensors[0])
    )
    found: dict[str, Any] = {}
    for name in ("states", "rows", "scores", "bc_grad", "dt_grad", "decays", "reduce_parts"):
        function = getattr(launch, f"{name}_kernel")

        def read(function: Any = function, name: str = name) -> None:
            for cache in function.device_caches.values():
                for index, built in enumerate(cache[0].values()):
                    found[f"{name} {index}"] = {
                        "registers": getattr(built, "n_regs", None),
                        "spills": getattr(built, "n_spills", None),
                        "shared": built.metadata.shared,
                        "warps": built.metadata.num_warps,
                    }

        failure = attempt(read)
        if failure is not None:
            found[name] = failure
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "errors": errors,
    "times": times,
    "kernels": kernels,
    "resources": resources,
}


# -- tuning ---------------------------------------------------------------------------------------


def tune(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fastest setting of each kernel, one option at a time, and leave it in place."""
    deadline = time.monotonic() + options.tune_seconds
    steps = launchers(options)
    results = {}
    for name in options.tune or list(CANDIDATES):
        setting = launch.SETTINGS[name][2]
        start = copy.copy(setting)
        first = best = attempt(lambda step=steps[name]: milliseconds(step))
        tried: dict[str, Any] = {str(start): first}
        print(f"  {name}: {start} {first}", flush=True)
        for axes in CANDIDATES[name]:
            winner = copy.copy(setting)
            for choice in product(axes):
                trial = {k: v for k, v in (winner | choice).items() if v}
                if str(trial) in tried or time.monotonic() > deadline:
                    continue
                setting.clear()
                setting.update(trial)
                found = attempt(lambda step=steps[name]: milliseconds(step))
                tried[str(trial)] = found
                print(f"  {name}: {trial} {found}", flush=True)
                if isinstance(found, float) and (not isinstance(best, float) or found < best):
                    best, winner = found, trial
            setting.clear()
            setting.update(winner)
        results[name] = {"setting": dict(setting), "ms": best, "from": start, "ms before": first}
    return results


def product(axes: dict[str, tuple[int, ...]]) -> list[dict[str, int]]:
    """Return every combination of the options' values."""
    choices: list[dict[str, int]] = [{}]
    for name, values in axes.items():
        choices = [choice | {name: value} for choice in choices for value in values]
    return choices


def launchers(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return a call of each kernel by itself; those that leave parts, with the sum of the parts."""
    x, dt, rates, keys, queries, skip = (t.detach() for t in inputs(options))
    dy = torch.randn_like(x)
    scan = launch.Scan(x, dt, rates, keys, options.chunk)
    states = scan.states("states", x, keys)
    grads = scan.states("state_grads", dy, queries)

    def with_sums(step: Callable[[], tuple[Tensor, ...]]) -> Callable[[], Any]:
        def run() -> None:
            partials = step()[-1]
            launch.add_parts(partials, partials[:1], torch.bfloat16)

        return run

    return {
        "states": lambda: scan.states("states", x, keys),
        "state_grads": lambda: scan.states("state_grads", dy, queries),
        "outputs": lambda: scan.rows("outputs", x, queries, keys, states, skip),
        "inputs": lambda: scan.rows("inputs", dy, keys, queries, grads, skip),
        "scores": with_sums(lambda: scan.scores(x, dy, keys, queries)),
        "c_grads": with_sums(lambda: scan.bc_grads("c_grads", dy, queries, states, grads)),
        "b_grads": with_sums(lambda: scan.bc_grads("b_grads", x, keys, states, grads)),
    }


if __name__ == "__main__":
    main()
