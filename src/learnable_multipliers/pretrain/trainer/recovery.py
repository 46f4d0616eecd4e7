"""What the losses of a run say: loss spikes, skipped steps and divergence, and the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.tensor_files import Tensors
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.distributed import World
from learnable_multipliers.pretrain.metrics.meters import LossMeter, LossReading
from learnable_multipliers.pretrain.trainer import spikes
from learnable_multipliers.pretrain.trainer.spikes import LossPoint, SpikeState


class Losses:
    """The losses since the last record, the state of the spike detector, the last evaluation."""

    held_out: float | None = None
    """The last loss on held-out text since the run began or was resumed."""

    def __init__(self, config: TrainConfig, device: torch.device):
        self._config, self._device = config.spikes, device
        self._guess = math.log(config.model.vocab_size)
        self.restore(LossReading(), SpikeState())

    def restore(self, reading: LossReading, state: SpikeState) -> None:
        """Continue from the losses and the detector's state of a checkpoint."""
        self.meter, self.spikes = LossMeter(self._device, reading), state
        self.held_out = None

    def observe(self, step: int) -> LossReading:
        """Return the losses since the last record, reset their meter and update the detector."""
        losses = self.meter.read()
        self.meter.reset()
        self.spikes = spikes.observe(self.spikes, LossPoint(step, losses.mean), self._config)
        return losses

    @property
    def is_suspicious(self) -> bool:
        """Whether this may be a spike: no checkpoint may replace a good one."""
        return bool(self.spikes.high) or self._skipped_in_a_row > 0

    def divergence(self) -> str | None:
        """Return why a run that ends here has diverged, else None."""
        return spikes.divergence(
            self.spikes, self._skipped_in_a_row, self.held_out, self._guess, self._config
        )

    def trouble(self) -> str | None:
        """Return a loss spike or too many skipped steps in words, else None."""
        if not self._skips_endlessly and not spikes.is_spike(self.spikes, self._config):
            return None
        return spikes.describe_spike(self.spikes, self._skipped_in_a_row)

    def ignore_spike(self, step: int, saved: Sequence[int]) -> str:
        """Return advice for a run that continues after a spike, from which its detector restarts.

        Raises a DivergenceError if the run cannot continue, as all its steps are skipped.
        """
        if self._skips_endlessly:
            skipped = self._skipped_in_a_row
            raise spikes.DivergenceError(spikes.skipped_steps_message(step, skipped, saved))
        self.spikes = spikes.reset_after_spike(self.spikes)
        return spikes.spike_ignored_message(self._config, saved)

    @property
    def _skipped_in_a_row(self) -> int:
        return self.meter.read().skipped_in_a_row

    @property
    def _skips_endlessly(self) -> bool:
        return 0 < self._config.max_skipped <= self._skipped_in_a_row


def load_before_spike(
    folder: Path, spike: SpikeState, every: int, like: Tensors, world: World
) -> tuple[checkpoints.Checkpoint | None, list[str]]:
    """Return the newest good checkpoint from before a spike, and warnings.

    Args:
        every: Steps between two checkpoints.
    """
    loaded, wrong = checkpoints.load_newest_of(
        lambda: spikes.rollback_steps(checkpoints.steps(folder), spike, every), folder, like, world
    )
    warnings = [f"not used: {problem}" for problem in wrong]
    if loaded is None:
        warnings.append("there is no checkpoint from before the loss spike: cannot roll back")
    return loaded, warnings
