"""Checks before a run: machine, data, settings, memory, a few steps, a checkpoint, the speed.

The checks are independent: a failure is reported, and the others still run.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learnable_multipliers._formats import count, duration, size
from learnable_multipliers._plan import Plan
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData, cache_folder
from learnable_multipliers.pretrain.distributed import Axes, resolve_axes
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.preflight import checks
from learnable_multipliers.pretrain.preflight.checks import (
    CheckError,
    CheckResult,
    run_check,
    skipped,
)
from learnable_multipliers.pretrain.preflight.resume_check import compare
from learnable_multipliers.pretrain.trainer.build import (
    build_model,
    make_optimizer,
    make_plan,
    resolve_config,
)
from learnable_multipliers.pretrain.trainer.compile_cache import set_compile_cache
from learnable_multipliers.pretrain.trainer.device import (
    Device,
    choose_device,
    performance_warnings,
)
from learnable_multipliers.pretrain.trainer.memory import estimate, micro_batch, state_bytes
from learnable_multipliers.pretrain.trainer.run_folder import check_unused
from learnable_multipliers.pretrain.trainer.run_state import restore_, tensors_of
from learnable_multipliers.pretrain.trainer.schedule import Schedule
from learnable_multipliers.pretrain.trainer.train_step import TrainStep

_DATA = "prepare data (lrm data prepare) and name them: --data.path"
_PLAN = "lrm plan MODEL shows the plan; optimizer.rules can change it"
_SETTINGS = "change the setting it names; lrm train RECIPE --help explains every setting"
_INSTALL = "pip install 'learnable-multipliers[pretrain]'"
_FOLDER = "make it writable, or choose another folder: --out"
_SHARED = "raise it in a container (--shm-size 1g): runs of several processes need it"
_BUG = "report this list: it is a bug in this package or in torch"
_NEAR = 1.0
"""Maximum difference between the first loss and that of guessing, in nats."""
_MISSING = {
    "device": "there is no device to compute on",
    "data": "there are no data",
    "config": "the settings are not valid",
    "plan": "there is no plan",
    "one rank": "the model is not known to fit into memory",
    "short run": "the model is not known to fit into memory",
}
"""Reasons for skipping a check that needs the result of an earlier one."""
_TIMED, _SECONDS = 5, 10.0
"""Number of timed steps, and the maximum time for them."""


def run_checks(config: TrainConfig) -> Iterator[CheckResult]:
    """Yield the result of each check as it completes."""
    run = _Preflight(config)
    for name, check, needs, advice in (
        ("packages", checks.check_packages, (), _INSTALL),
        ("device", run.check_device, (), "choose another: --runtime.device cpu"),
        ("versions", checks.check_versions, ("device",), _INSTALL),
        ("compiler", checks.check_compiler, ("device",), "--runtime.compile off"),
        ("folder", run.check_folder, (), _FOLDER),
        ("shared memory", checks.check_shared_memory, (), _SHARED),
        ("data", run.check_data, (), _DATA),
        ("checksums", check_checksums, ("data",), "copy the data again, or prepare them again"),
        ("settings", run.check_settings, ("data",), _SETTINGS),
        ("plan", run.check_plan, ("config",), _PLAN),
        ("fast paths", check_fast_paths, ("config", "device"), _SETTINGS),
        ("memory", run.check_memory, ("plan", "device", "config", "data"), checks.MEMORY_ADVICE),
        ("disk", check_disk, ("plan", "config"), "free some space, or choose another disk: --out"),
        (
            "step with lr 0",
            run.check_zero_step,
            ("one rank", "config", "data"),
            checks.MEMORY_ADVICE,
        ),
        ("speed", check_speed, ("short run",), checks.MEMORY_ADVICE),
        ("save and load", check_save_and_load, ("short run",), f"check the disk of {config.out}"),
        ("checkpoints", run.check_checkpoints, (), "restore one, or start a new run"),
    ):
        yield run_check(name, partial(run.call, check, needs), advice)


def summary(results: Sequence[CheckResult]) -> str:
    """Return how many checks passed, warned and failed."""
    counts = {v: sum(r.verdict == v for r in results) for v in ("ok", "warning", "failed")}
    named = {"ok": "ok", "warning": "to look at", "failed": "failed"}
    parts = [f"{counts[v]} {what}" for v, what in named.items() if counts[v] or v == "ok"]
    return f"{len(results)} checks: {', '.join(parts)}"


class _Preflight:
    """The checks of one run, and the results that later checks need, by name."""

    def __init__(self, config: TrainConfig):
        self._config = config
        self._results: dict[str, Any] = {}
        self._missing = dict(_MISSING)

    def call(self, check: Callable[..., str], needs: Sequence[str]) -> str:
        """Call a check with the results that it needs, or skip it if one of them is missing."""
        for need in needs:
            if need not in self._results:
                raise skipped(self._missing[need])
        return check(*(self._results[need] for need in needs))

    def check_device(self) -> str:
        self._results["device"] = device = choose_device(self._config.runtime)
        cold_start = set_compile_cache(cache_folder()) if device.compiles else None
        threads = f", {torch.get_num_threads()} threads" if device.device.type == "cpu" else ""
        text = f"{device.name} in {device.precision}{threads}"
        if cold_start is not None:
            raise CheckError(f"{text}; {cold_start.text}", cold_start.advice, "warning")
        return text

    def check_folder(self) -> str:
        text = checks.check_folder(self._config.out)
        try:
            if not self._config.resume:
                check_unused(self._config.out)
        except ValueError as error:
            problem, _, advice = str(error).rpartition(": ")
            raise CheckError(problem, advice, "warning") from error
        return text

    def check_data(self) -> str:
        config = self._config
        data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
        self._results["data"] = data
        return f"{count(data.num_tokens)} tokens at {data.folder}"

    def check_settings(self, data: TrainingData) -> str:
        self._results["config"] = resolve_config(self._config, data)
        return "valid"

    def check_plan(self, config: TrainConfig) -> str:
        # Names and shapes are enough.
        with torch.device("meta"):
            model = HybridLM(config.model)
        plan = make_plan(model, config.optimizer)
        self._results["plan"] = model, plan
        return f"{plan.num_multipliers:,} multipliers beside {model.num_parameters:,} parameters"

    def check_memory(
        self, _plan: tuple[HybridLM, Plan], device: Device, config: TrainConfig, data: TrainingData
    ) -> str:
        axes = _axes(config)
        compare = partial(_compare_memory, config, device, data)
        result = run_check("memory", lambda: compare(axes), checks.MEMORY_ADVICE)
        if result.verdict != "failed":
            # The short run is a single process with the whole model.
            whole = Axes(axes.dp_degree)
            if axes == whole or run_check("", lambda: compare(whole), "").verdict != "failed":
                self._results["one rank"] = device.for_world_size(math.prod(axes))
            else:
                reason = "only a model sharded over ranks fits into memory; not one process"
                self._missing |= {"one rank": reason, "short run": reason}
        if result.verdict != "ok":
            raise CheckError(result.text, result.advice, result.verdict)
        return result.text

    def check_zero_step(self, device: Device, config: TrainConfig, data: TrainingData) -> str:
        run = ShortRun(config, device, data, _axes(config).dp_degree)
        self._results["short run"] = run
        return check_zero_step(run)

    def check_checkpoints(self) -> str:
        folder = self._config.out / "checkpoints"
        if not checkpoints.steps(folder):
            return "none yet"
        newest, wrong = checkpoints.load_newest(folder)
        if wrong:
            advice = f"resuming continues from step {newest.step}; check the disk"
            raise CheckError("; ".join(wrong), advice, "warning")
        return f"the newest, of step {newest.step:,}, is good"


def check_checksums(data: TrainingData) -> str:
    """Check that the data have the checksums of their manifest."""
    data.verify()
    return "tokens are as the manifest says"


def check_fast_paths(config: TrainConfig, device: Device) -> str:
    """Check that kernels and CUDA graphs serve the run."""
    if device.device.type != "cuda":
        return "only CUDA devices have kernels and CUDA graphs"
    if slow := performance_warnings(config, device.for_world_size(math.prod(_axes(config)))):
        text, advice = ("; ".join(parts) for parts in zip(*slow, strict=True))
        raise CheckError(text, advice, "warning")
    return "every kernel and CUDA graphs serve this run"


def check_disk(plan: tuple[HybridLM, Plan], config: TrainConfig) -> str:
    """Check that the disk has room for the checkpoints."""
    state = state_bytes(config, *plan)
    # A checkpoint holds all state that persists between steps.
    checkpoint = sum(state.values()) - state["gradients"]
    return checks.check_disk(config.out, checkpoint, config.checkpoint.keep)


def _axes(config: TrainConfig) -> Axes:
    parallel = config.parallel
    return resolve_axes(parallel.data, parallel.shard, parallel.tensor)


def _compare_memory(config: TrainConfig, device: Device, data: TrainingData, axes: Axes) -> str:
    """Compare what a run needs with what is free: estimated, or measured in a close case."""
    ranks = math.prod(axes)
    needed = estimate(config, device, axes).peak
    estimated = partial(checks.check_memory, device, needed, "estimated from shapes", ranks)
    on_gpu = device.device.type == "cuda" and ranks == 1
    if not on_gpu or run_check("", estimated, "").verdict == "failed":
        return estimated()
    needed = measure(config, device, data)
    return checks.check_memory(device, needed, "measured with 1 and 2 layers")


# -- a few steps ------------------------------------------------------------------------------


class ShortRun:
    """Model and optimizer as a run would make them, and one micro-batch to try them on.

    Of a run on several ranks this is what one of them does, with a whole model and without any
    communication.
    """

    def __init__(self, config: TrainConfig, device: Device, data: TrainingData, dp_degree: int = 1):
        self.config, self.device, self.dp_degree = config, device, dp_degree
        self.model = build_model(config, device.device)
        self.optimizer, self.plan = make_optimizer(self.model, config.optimizer)
        if device.compiled:
            self.model.compile_layers_()
        if config.runtime.recompute == "layers":
            self.model.recompute_layers_()
        self._train_step = TrainStep(self.model, device, config.z_loss)
        self.sequences = micro_batch(config, dp_degree)
        self._tokens = data.batch(0, self.sequences, device.device)

    def gradients(self, repeats: int = 1) -> float:
        """Compute the gradients of the micro-batch, added up over repeats; return its loss."""
        batches = [self._tokens] * repeats
        loss = self._train_step.gradients(batches, self.sequences * repeats)
        self.optimizer.found_inf = ~loss.isfinite()
        return loss.item()

    def step(self, lr: float) -> None:
        """Take an optimizer step with the current gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._train_step.clear()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of effective and raw weights and multipliers, on the host."""
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        weights |= {f"{n} (raw)": raw for n, raw in self.optimizer.raw_weights().items()}
        for name, parts in self.optimizer.multipliers().items():
            weights |= {f"{name} ({part})": value for part, value in parts.items()}
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}

    def timed(self, what: Callable[[], object]) -> float:
        """Return the seconds of a function on the device."""
        self.device.synchronize()
        began = time.perf_counter()
        what()
        self.device.synchronize()
        return time.perf_counter() - began


def measure(config: TrainConfig, device: Device, data: TrainingData) -> int:
    """Return the peak of a run in one process on a CUDA device, in bytes.

    Measured on models of one and of two layers with the widths of the run, and extrapolated to its
    number of layers.
    """
    one, two = (_peak_with_layers(config, device, data, layers) for layers in (1, 2))
    return one + (config.model.num_layers - 1) * (two - one)


def _peak_with_layers(config: TrainConfig, device: Device, data: TrainingData, layers: int) -> int:
    before = torch.cuda.memory_allocated(device.device)
    config = replace(config, model=replace(config.model, num_layers=layers))
    # A captured graph needs the memory of the pass it captures.
    run = ShortRun(config, replace(device, captured=False), data)
    for _ in range(2):
        # The first step compiles, which takes additional memory.
        torch.cuda.reset_peak_memory_stats(device.device)
        run.gradients(repeats=1 if run.sequences == config.data.batch_sequences else 2)
        run.step(config.optimizer.lr)
    return torch.cuda.max_memory_allocated(device.device) - before


def check_zero_step(run: ShortRun) -> str:
    """Check that a step with learning rate 0 changes no bit, and that the model starts guessing."""
    before = run.weights()
    loss = run.gradients()
    run.step(0.0)
    changed = compare("weights", before, run.weights()).differences
    guessing = math.log(run.config.model.vocab_size)
    text = f"loss {loss:.3f}, guessing {guessing:.3f}"
    if not math.isfinite(loss):
        advice = "try --runtime.dtype float32, and the model's mup_* factors nearer to 1"
        raise CheckError(text, advice)
    if changed:
        text = f"{len(changed)} of {len(before)} tensors changed, among them {changed[0]}"
        raise CheckError(text, _BUG)
    if abs(loss - guessing) > _NEAR:
        advice = "a new model should guess: look at model.init_std and the mup_* factors"
        raise CheckError(text, advice, "warning")
    return f"{text}; no bit changed"


def check_save_and_load(run: ShortRun) -> str:
    """Save a checkpoint where the run would, load it into a new model, and compare everything."""
    config = run.config
    expected = tensors_of(run.model, run.optimizer)
    with tempfile.TemporaryDirectory(
        prefix=".lrm-doctor-", dir=checks.nearest_folder(config.out)
    ) as folder:
        began = time.perf_counter()
        path = checkpoints.save(Path(folder), checkpoints.Checkpoint(1, {}, expected), keep=2)
        written = sum(file.stat().st_size for file in path.iterdir())
        loaded = checkpoints.load(path)
        seconds = time.perf_counter() - began
        # On the host, since a device may not have memory for two.
        model = build_model(replace(config, seed=config.seed + 1))
        optimizer, _ = make_optimizer(model, config.optimizer)
        # State is created on first use, and bound to the model again after loading.
        optimizer.raw_weights()
        restore_(model, optimizer, loaded)
        optimizer.raw_weights()
        restored = tensors_of(model, optimizer)
    changed = [
        difference
        for file in expected
        for difference in compare(file, expected[file], restored[file]).differences
    ]
    if changed:
        text = f"not every tensor came back: {len(changed)} differ, among them {changed[0]}"
        raise CheckError(text, f"check the disk of {config.out}, or {_BUG}")
    return f"{size(written)} in {duration(seconds)}; every bit came back"


def check_speed(run: ShortRun) -> str:
    """Time gradients and optimizer steps, and estimate how long the run takes."""
    data, lr = run.config.data, run.config.optimizer.lr
    backward: list[float] = []
    updates: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(updates) < _TIMED and (len(updates) < 2 or time.perf_counter() < until):
        backward.append(run.timed(run.gradients))
        updates.append(run.timed(lambda: run.step(lr)))
    # The first ones warm up.
    micro_batch_seconds, update = min(backward[1:]), min(updates[1:])
    num_micro_batches = math.ceil(data.batch_sequences / run.dp_degree / run.sequences)
    per_step = num_micro_batches * micro_batch_seconds + update
    planned = Schedule.of_run(run.config)
    tokens = data.batch_sequences * data.sequence_length
    speed = tokens / per_step
    whole = planned.tokens_before(len(planned)) / speed
    without = "evaluation" if run.dp_degree == 1 else "evaluation and communication"
    return (
        f"{per_step:.3g} s per step of {count(tokens)} tokens, {count(speed)} tokens/s; the whole "
        f"run takes about {duration(whole)}, without {without}"
    )
