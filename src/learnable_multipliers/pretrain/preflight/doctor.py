"""A check-up before a run: machine, data, model, one step, a checkpoint and the speed.

Each check stands by itself: one that fails, or raises, is told, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from learnable_multipliers._formats import count
from learnable_multipliers._plan import Plan
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.distributed import Axes, planned_axes
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.preflight import machine_checks as machine
from learnable_multipliers.pretrain.preflight import trial
from learnable_multipliers.pretrain.preflight.check_result import Finding, NotTriedError, examined
from learnable_multipliers.pretrain.preflight.memory import rank_bytes, state_bytes
from learnable_multipliers.pretrain.trainer.device import Device, choose_device
from learnable_multipliers.pretrain.trainer.optimizer import make_plan
from learnable_multipliers.pretrain.trainer.run_folder import check_unused
from learnable_multipliers.pretrain.trainer.slow_paths import slow_paths
from learnable_multipliers.pretrain.trainer.trainer import resolved

_CHECK_SETTINGS = "change what it names; lrm train RECIPE --help explains every setting"
_LESS_MEMORY = "give --data.micro-batch-sequences a smaller number"


def examine(config: TrainConfig) -> Iterator[Finding]:
    """Yield one finding after another, as they come."""
    case = _Case(config)
    for about, check, advice in (
        ("packages", machine.check_packages, machine.INSTALL),
        ("device", case.device_works, "choose another: --runtime.device cpu"),
        ("versions", lambda: machine.check_versions(case.device), machine.INSTALL),
        ("compiler", lambda: machine.check_compiler(case.device), "--runtime.compile off"),
        ("folder", case.folder_is_free, "choose another folder: --out"),
        ("shared memory", machine.check_shared_memory, "several processes need it, one does not"),
        ("data", case.data_open, "prepare data (lrm data prepare) and name them: --data.path"),
        ("settings", case.settings_work, _CHECK_SETTINGS),
        ("plan", case.plan_fits, "lrm plan MODEL shows the plan; rules can be given in Python"),
        ("fast paths", case.paths_are_fast, _CHECK_SETTINGS),
        ("memory", case.memory_suffices, _LESS_MEMORY),
        ("disk", case.disk_suffices, "choose another folder: --out"),
        ("a step without rate", lambda: trial.check_zero_step(case.trial), _LESS_MEMORY),
        ("speed", lambda: trial.check_speed(case.trial), _LESS_MEMORY),
        (
            "save and load",
            lambda: trial.check_save_and_load(case.trial),
            f"see to the disk of {config.out}",
        ),
        ("checkpoints", case.checkpoints_are_good, "lrm train RECIPE --resume names the good ones"),
    ):
        yield examined(about, check, advice)


class _Case:
    """What checks find out and later ones need."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self._device: Device | None = None
        self._data: TrainingData | None = None
        self._planned: tuple[HybridLM, Plan] | None = None
        self._settled = self._fits = False
        self._too_large = "there is no model that is known to fit into memory"
        self._trial: trial.Trial | None = None

    @property
    def device(self) -> Device:
        if self._device is None:
            raise NotTriedError("there is no device to compute on")
        return self._device

    @property
    def data(self) -> TrainingData:
        if self._data is None:
            raise NotTriedError("there are no data")
        return self._data

    @property
    def planned(self) -> tuple[HybridLM, Plan]:
        if self._planned is None:
            raise NotTriedError("there is no plan")
        return self._planned

    @property
    def axes(self) -> Axes:
        parallel = self.config.parallel
        return planned_axes(parallel.data, parallel.shard, parallel.tensor)

    @property
    def trial(self) -> trial.Trial:
        if not self._fits:
            raise NotTriedError(self._too_large)
        if self._trial is None:
            # Once only: what fails now would fail again.
            self._fits = False
            device = self.device.of_rank(self.axes.size)
            dp_degree = self.axes.dp_degree
            self._trial = trial.Trial(self.config, device, self.data, dp_degree)
            self._fits = True
        return self._trial

    def device_works(self) -> Finding:
        self._device = choose_device(self.config.runtime)
        return machine.check_device(self._device)

    def data_open(self) -> Finding:
        config = self.config
        self._data = TrainingData.open(config.data, config.model.vocab_size, config.seed)
        self._data.verify()
        tokens = count(self._data.num_tokens)
        return Finding("data", "ok", f"{tokens} tokens at {self._data.folder}, checksums are right")

    def settings_work(self) -> Finding:
        config = resolved(self.config, self.data)
        config.check()
        self.config, self._settled = config, True
        return Finding("settings", "ok", "they work together")

    def plan_fits(self) -> Finding:
        if not self._settled:
            raise NotTriedError("the settings do not work")
        # Names and shapes do.
        with torch.device("meta"):
            model = HybridLM(self.config.model)
        plan = make_plan(model, self.config.optimizer)
        self._planned = model, plan
        text = f"{plan.num_multipliers:,} multipliers beside {model.num_parameters:,} parameters"
        return Finding("plan", "ok", text)

    def paths_are_fast(self) -> Finding:
        about = "fast paths"
        if not self._settled:
            raise NotTriedError("the settings do not work")
        if self.device.device.type != "cuda":
            return Finding(about, "ok", "kernels and recorded passes are for CUDA devices")
        found = slow_paths(self.config, self.device.of_rank(self.axes.size))
        if found:
            text = "; ".join(path.text for path in found)
            return Finding(about, "warning", text, "; ".join(path.advice for path in found))
        return Finding(about, "ok", "the kernels serve this model, and passes can be recorded")

    def memory_suffices(self) -> Finding:
        if self._planned is None:
            raise NotTriedError("there is no plan")
        found = self._room_for(self.axes)
        self._fits = found.verdict != "failed"
        if self._fits and max(self.axes.shard, self.axes.tensor) > 1:
            # The trial is made by one process, with a model that is not cut.
            whole = self._room_for(Axes(self.axes.dp_degree, 1, 1))
            self._fits = whole.verdict != "failed"
            self._too_large = (
                "the model fits into memory cut among ranks alone; this is one process"
            )
        return found

    def _room_for(self, axes: Axes) -> Finding:
        needed = sum(rank_bytes(self.config, self.device, axes).values())
        return machine.check_memory(self.device, needed, axes.size)

    def folder_is_free(self) -> Finding:
        found = machine.check_folder(self.config.out)
        if found.verdict != "ok" or self.config.resume:
            return found
        try:
            check_unused(self.config.out)
        except ValueError as error:
            text, _, advice = str(error).rpartition(": ")
            return Finding("folder", "warning", text, advice)
        return found

    def disk_suffices(self) -> Finding:
        kept = state_bytes(self.config, *self.planned)
        # Everything that lasts from step to step.
        checkpoint = sum(kept.values()) - kept["gradients"]
        return machine.check_space(self.config.out, checkpoint, self.config.checkpoint.keep)

    def checkpoints_are_good(self) -> Finding:
        folder = self.config.out / "checkpoints"
        found = checkpoints.steps(folder)
        if not found:
            return Finding("checkpoints", "ok", "none yet")
        kept, wrong = checkpoints.load_newest(folder)
        if wrong:
            advice = f"resuming goes on from step {kept.step}; look after the disk"
            return Finding("checkpoints", "warning", "; ".join(wrong), advice)
        return Finding("checkpoints", "ok", f"the newest, of step {kept.step:,}, is good")


def in_words(findings: Sequence[Finding]) -> str:
    """Return the counts of a check-up in words."""
    counts = {v: sum(f.verdict == v for f in findings) for v in ("ok", "warning", "failed")}
    told = [f"{counts['ok']} ok"]
    told += [f"{counts['warning']} to look at"] if counts["warning"] else []
    told += [f"{counts['failed']} failed"] if counts["failed"] else []
    return f"{len(findings)} checks: {', '.join(told)}"
