"""PyTorch Lightning: clip by the raw norm, and log the health of the multipliers::

    class Model(MultiplierClipping, LightningModule):
        def configure_optimizers(self):
            return lrm.AdamW.from_model(self, lr=1e-3)

    Trainer(gradient_clip_val=1.0, callbacks=[MultiplierCallback()]).fit(Model(), data)

Fabric does not need this module: give `max_grad_norm=` to the optimizer, or call
`lrm.clip_grad_norm_(optimizer, 1.0)` instead of `fabric.clip_gradients`.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from learnable_multipliers.equilibrium._monitor import Health, Monitor
from learnable_multipliers.integrations._health import read_health
from learnable_multipliers.integrations._missing import missing_extra
from learnable_multipliers.optim import unwrap

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_warn
except ImportError as error:
    raise missing_extra("lightning") from error

__all__ = ["MultiplierCallback", "MultiplierClipping"]


class MultiplierClipping:
    """Mixin, named before `LightningModule`: `gradient_clip_val` clips the norm of raw gradients.

    The optimizer clips as part of its step. Lightning alone would clip by the norm of the
    gradients of effective weights.
    """

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Set the norm that the next step clips at."""
        if gradient_clip_val is None:
            return
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(
                f"gradient_clip_algorithm={str(gradient_clip_algorithm)!r} would clip effective "
                'gradients; raw ones are clipped by their norm: "norm"'
            )
        unwrap(optimizer).max_grad_norm = float(gradient_clip_val) or None


class MultiplierCallback(Callback):
    """Log health metrics, multipliers and the raw gradient norm to the trainer's loggers.

    The metrics are also in `trainer.callback_metrics`, and the last health is `callback.health`.
    A new alarm becomes a warning. Checkpoints keep the state of the monitor.

    Args:
        every: Optimizer steps between two readings; the trainer's `log_every_n_steps` by default.
        matrices: Also log the smallest and largest multiplier of each matrix.
        monitor: Settings of `lrm.Monitor`: `symmetries`, `drift_bound`.
    """

    def __init__(self, every: int | None = None, *, matrices: bool = False, **monitor: Any):
        self.every, self.matrices, self._settings = every, matrices, monitor
        self.health: Health | None = None
        self._monitor: Monitor | None = None
        self._saved: dict[str, Any] = {}
        self._seen_alarms: set[str] = set()
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to follow the run, or continue from its checkpoint."""
        self._optimizer = unwrap(_only(trainer.optimizers))
        self._monitor = Monitor(self._optimizer, **self._settings)
        if self._saved:
            self._monitor.load_state_dict(self._saved)
        self._last = trainer.global_step
        if trainer.gradient_clip_val and not isinstance(pl_module, MultiplierClipping):
            rank_zero_warn(
                "gradient_clip_val clips by the norm of the effective weights' gradients: derive "
                "the module from MultiplierClipping to clip by the raw norm"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log after every so many optimizer steps; on all ranks, as sharded tensors require."""
        step = trainer.global_step
        # Set by the trainer's logger connector, where a type checker does not see it.
        every = self.every or getattr(trainer, "log_every_n_steps")  # noqa: B009
        if step == self._last or not every or step % every:
            return
        self._last = step
        metrics = self._read()
        # The step number that Lightning uses for metrics that the module logs in this step.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step - 1)
        pl_module.log_dict(metrics, logger=False, on_step=True, on_epoch=False)

    def _read(self) -> dict[str, float]:
        assert self._monitor is not None
        self.health, metrics, alarms = read_health(
            self._monitor, self._optimizer, self._seen_alarms
        )
        if self.matrices:
            for matrix in self.health.ranges:
                metrics[f"multipliers/{matrix.name}.{matrix.part}/smallest"] = matrix.smallest
                metrics[f"multipliers/{matrix.name}.{matrix.part}/largest"] = matrix.largest
        for alarm in alarms:
            rank_zero_warn(str(alarm))
        return metrics

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop following the optimizer."""
        if self._monitor is not None:
            self._saved = self._monitor.state_dict()
            self._monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor for a resumed run."""
        return self._saved if self._monitor is None else self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts, when the optimizer has been loaded."""
        self._saved = state_dict


def _only(optimizers: list[Optimizer]) -> Optimizer:
    if len(optimizers) != 1:
        raise ValueError(
            f"MultiplierCallback follows one optimizer, not {len(optimizers)}: lrm.Muon trains "
            "vectors and embeddings too, in one optimizer"
        )
    return optimizers[0]
