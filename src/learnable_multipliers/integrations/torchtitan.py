"""torchtitan: an optimizers container with multipliers, and health in its metrics::

    def llama3_8b_multipliers():
        return with_multipliers(llama3_8b(), weight_decay=0.1)

`torchrun ... -m torchtitan.train --module my_configs --config llama3_8b_multipliers` trains it.
Checkpoints are torchtitan's own, with raw weights and multipliers in the optimizer's part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from torch import nn

from learnable_multipliers._rules import Rule
from learnable_multipliers.equilibrium._monitor import Health, Monitor
from learnable_multipliers.integrations._health import read_health
from learnable_multipliers.integrations._missing import missing_extra
from learnable_multipliers.optim import AdamW, Muon

try:
    import tyro
    from torchtitan.components import metrics, optimizer
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise missing_extra("torchtitan") from error

__all__ = ["MetricsProcessor", "OptimizersContainer", "with_multipliers"]

_MONITOR = "lrm_monitor"
"""Key of the monitor in the optimizer's part of a checkpoint."""


def with_multipliers(
    config: Trainer.Config,
    name: Literal["AdamW", "Muon"] = "AdamW",
    placement: str = "full",
    *,
    rules: Sequence[Rule] = (),
    **settings: Any,
) -> Trainer.Config:
    """Return a trainer's config whose optimizer trains multipliers.

    torchtitan's clipping, by the norm of effective gradients, is switched off; its `max_norm`
    becomes our `max_grad_norm` unless `settings` has one. `settings` are those of `lrm.AdamW` or
    `lrm.Muon`; `lr`, `betas`, `eps` and `weight_decay` default to those of the config's AdamW, if
    it has one group for all parameters.
    """
    if math.isfinite(config.training.max_norm):
        settings.setdefault("max_grad_norm", config.training.max_norm)
    config.training.max_norm = math.inf
    groups = config.optimizer.param_groups
    if len(groups) == 1 and groups[0].optimizer_name == "AdamW":
        shared = ("lr", "betas", "eps", "weight_decay")
        given = groups[0].optimizer_kwargs
        settings = {key: given[key] for key in shared if key in given} | settings
    config.optimizer = OptimizersContainer.Config(
        name=name, placement=placement, rules=list(rules), settings=settings
    )
    kept = {each.name: getattr(config.metrics, each.name) for each in fields(config.metrics)}
    config.metrics = MetricsProcessor.Config(**kept)
    return config


class OptimizersContainer(optimizer.OptimizersContainer):
    """One optimizer of this library for the model, made after it is parallelized."""

    @dataclass(kw_only=True, slots=True)
    class Config(optimizer.OptimizersContainer.Config):
        """The optimizer and placement; `settings` are the optimizer's."""

        name: Literal["AdamW", "Muon"] = "AdamW"
        placement: str = "full"
        rules: Annotated[list[Any], tyro.conf.Suppress] = field(default_factory=list)
        settings: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups:
            raise ValueError(
                "param_groups make optimizers without multipliers: give rules and settings, as "
                "with_multipliers does"
            )
        part = model_parts[0]
        ends = (getattr(part, name, part) for name in ("tok_embeddings", "lm_head"))
        if len(model_parts) != 1 or any(end is None for end in ends):
            raise ValueError(
                "pipeline parallelism is not supported: a plan and the clip norm are those of the "
                "whole model. Set pipeline_parallel_degree=1"
            )
        make = {"AdamW": AdamW, "Muon": Muon}[config.name]
        ours = make.from_model(part, config.placement, rules=config.rules, **config.settings)  # pyright: ignore[reportArgumentType]
        self.optimizers, self.model_parts = [ours], model_parts
        self._monitor: Monitor | None = None
        trained = [p for group in ours.param_groups for p in group["params"]]
        self._post_init(trained)
        logger.info("lrm.%s: %s", config.name, ours.plan.summary)

    @property
    def monitor(self) -> Monitor:
        """The monitor of the run, from its first step or from the checkpoint that it resumed."""
        if self._monitor is None:
            self._monitor = Monitor(self.optimizers[0])
        return self._monitor

    # torchtitan declares closures but rejects them.
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step. The monitor is created before the first, after weights have been loaded."""
        _ = self.monitor
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, as torchtitan keeps it, and the monitor's."""
        return {**super().state_dict(), _MONITOR: self.monitor.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both."""
        super().load_state_dict(state_dict)
        self.monitor.load_state_dict(state_dict[_MONITOR])


class MetricsProcessor(metrics.MetricsProcessor):
    """torchtitan's metrics, with health and the raw gradient norm among them."""

    @dataclass(kw_only=True, slots=True)
    class Config(metrics.MetricsProcessor.Config):
        """As torchtitan's."""

    health: Health | None = None

    def __init__(self, config: Config, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._seen_alarms: set[str] = set()
        run = settings.get("config_dict") or {}
        if math.isfinite(run.get("training", {}).get("max_norm", math.inf)):
            logger.warning(
                "training.max_norm clips by the norm of effective gradients, not the raw norm: "
                "set it to inf, and max_grad_norm in the settings of with_multipliers"
            )

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Add the health of the run, read on all ranks."""
        extra = dict(extra_metrics or {})
        if isinstance(self.optimizers, OptimizersContainer):
            self.health, metrics, alarms = read_health(
                self.optimizers.monitor, self.optimizers.optimizers[0], self._seen_alarms
            )
            extra.update(metrics)
            for alarm in alarms:
                logger.warning(str(alarm))
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
