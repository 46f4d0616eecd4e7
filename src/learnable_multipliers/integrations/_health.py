"""What every adapter logs: the metrics of a monitor, the raw gradient norm, and new alarms."""

from __future__ import annotations

from learnable_multipliers.equilibrium._monitor import Alarm, Health, Monitor
from learnable_multipliers.optim._base import MultiplierOptimizer


def read_health(
    monitor: Monitor, optimizer: MultiplierOptimizer, seen: set[str]
) -> tuple[Health, dict[str, float], list[Alarm]]:
    """Return the health of a run, the metrics to log, and the alarms about new problems.

    Args:
        seen: Problems of earlier alarms; those of the new ones are added.
    """
    health = monitor.health()
    metrics = health.metrics()
    if optimizer.grad_norm is not None:
        metrics["raw_grad_norm"] = float(optimizer.grad_norm)
    alarms = [alarm for alarm in health.alarms if alarm.about not in seen]
    seen.update(alarm.about for alarm in alarms)
    return health, metrics, alarms
