"""Hugging Face Trainer, and trainers built on it, such as those of TRL and axolotl::

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=dataset,
        optimizer_cls_and_kwargs=(
            OptimizerFactory,
            {"training_args": args, "max_grad_norm": 1.0},
        ),
    )
    MultiplierCallback().attach(trainer)
    trainer.train()

Here `args` has `max_grad_norm=0`: the optimizer clips, not Trainer.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from learnable_multipliers._placement import Placement
from learnable_multipliers._plan import Plan
from learnable_multipliers._planner import plan
from learnable_multipliers._rules import Rule, Train
from learnable_multipliers.equilibrium._monitor import Monitor
from learnable_multipliers.integrations._health import read_health
from learnable_multipliers.integrations._missing import missing_extra
from learnable_multipliers.optim import AdamW, LearnableMultipliers, Muon, unwrap
from learnable_multipliers.optim._base import MultiplierOptimizer
from learnable_multipliers.symmetry import Symmetries

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.utils import logging
except ImportError as error:
    raise missing_extra("transformers") from error

__all__ = ["MultiplierCallback", "OptimizerFactory"]

_logger = logging.get_logger(__name__)
_OURS: dict[str, type[MultiplierOptimizer]] = {"adamw": AdamW, "muon": Muon}


class OptimizerFactory:
    """Makes the optimizer of a Trainer: `optimizer_cls_and_kwargs=(OptimizerFactory, {...})`.

    Trainer gives a factory the model and these keyword arguments:

    Args:
        training_args: Training arguments with learning rate, weight decay, betas and eps, unless
            `settings` has them. axolotl passes them on; with Trainer itself, give them here. Betas
            and eps count only if the optimizer's have that form: Adafactor's eps is a pair.
        optimizer: `"adamw"`, `"muon"`, or a torch optimizer class to wrap.
        placement: As in `lrm.plan`, or a plan; `rules` and `train` are as there.
        settings: Settings of the optimizer: `lr`, `multiplier_lr_scale`, `max_grad_norm`, ...
    """

    def __call__(
        self,
        model: nn.Module,
        training_args: Any = None,
        *,
        optimizer: str | type[Optimizer] = "adamw",
        placement: Placement | Plan = "full",
        rules: Sequence[Rule] = (),
        train: Train = "all",
        **settings: Any,
    ) -> MultiplierOptimizer:
        """Return the optimizer of a model."""
        optimizer_class = _OURS.get(optimizer) if isinstance(optimizer, str) else optimizer
        if not isinstance(optimizer_class, type):
            known = ", ".join(repr(name) for name in _OURS)
            raise ValueError(
                f"unknown optimizer {optimizer!r}; choose from {known} or give a class of torch"
            )
        if training_args is not None:
            _check_clipping(training_args)
            _check_learning_rates(training_args)
            settings = {**_settings_of(training_args, optimizer_class), **settings}
            if "lr" not in settings:
                raise ValueError(
                    f"{optimizer_class.__name__} does not show that it takes lr, so that the "
                    "training arguments would not count: give OptimizerFactory its settings, "
                    '{"lr": args.learning_rate, ...}'
                )
        elif "lr" not in settings:
            raise ValueError(
                "Trainer passes an optimizer factory none of its arguments, so its learning rate "
                'would not count: give OptimizerFactory {"training_args": args}, or {"lr": ...}'
            )
        if train != "all":
            if isinstance(placement, Plan):
                raise ValueError("train is for making a plan, and a plan was given: set it there")
            placement, rules = plan(model, placement, rules, train=train), ()
        if issubclass(optimizer_class, MultiplierOptimizer):
            return optimizer_class.from_model(model, placement, rules=rules, **settings)
        return LearnableMultipliers.from_model(
            optimizer_class, model, placement, rules=rules, **settings
        )


def _check_learning_rates(training_args: Any) -> None:
    """Raise for learning rates of axolotl that it applies to optimizers of its own only."""
    names = ("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_ratio")
    given = [name for name in names if getattr(training_args, name, None) is not None]
    if given:
        raise ValueError(
            f"{given[0]} would have no effect: learning rates of single parameters are given to "
            'OptimizerFactory as rules, {"rules": [lrm.Rule("embed_tokens", lr_scale=0.1)]}'
        )


class MultiplierCallback(TrainerCallback, ExportableState):
    """Adds the health of multipliers to every log of the training loss.

    `MultiplierCallback().attach(trainer)` puts it before TensorBoard and other trackers; in
    `Trainer(callbacks=...)` it comes after them, and its metrics reach only `log_history` and the
    console. They are those of `lrm.Monitor`, with `raw_grad_norm`, the norm that the optimizer
    clips, and `skipped_steps`. Each alarm is logged once. Checkpoints keep the state of the
    monitor. After `load_best_model_at_end` raw weights are recomputed from the model.

    Args:
        symmetries: Symmetries to measure drift along; none by default.
        drift_bound: The factor of drift that raises an alarm.
    """

    def __init__(self, symmetries: Symmetries | None = None, *, drift_bound: float = 10.0):
        self.symmetries, self.drift_bound = symmetries, drift_bound
        self.monitor: Monitor | None = None
        self.seen: dict[str, Any] | None = None
        self._in_front = False
        self._seen_alarms: set[str] = set()

    def attach(self, trainer: Any) -> MultiplierCallback:
        """Put the callback before all others of a trainer; return it."""
        trainer.callback_handler.callbacks.insert(0, self)
        self._in_front = True
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to follow the optimizer, from a checkpoint if there is one."""
        optimizer = unwrap(kwargs["optimizer"])
        _check_clipping(args)
        if not self._in_front and args.report_to:
            warnings.warn(
                f"{', '.join(args.report_to)} sees every log before this callback: attach it with "
                "MultiplierCallback().attach(trainer)",
                stacklevel=2,
            )
        if self.monitor is not None:
            self.monitor.close()
        self.monitor = Monitor(optimizer, self.symmetries, drift_bound=self.drift_bound)
        # Trainer expects an entry here, even if the checkpoint was made without this callback.
        entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step and entry["attributes"]["seen"] is not None:
            self.monitor.load_state_dict(entry["attributes"]["seen"])

    def state(self) -> dict[str, Any]:
        """Return the entry of a checkpoint: the state of the monitor."""
        seen = None if self.monitor is None else self.monitor.state_dict()
        return {"args": {"drift_bound": self.drift_bound}, "attributes": {"seen": seen}}

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add health to a log of the training loss."""
        logs = kwargs["logs"]
        if self.monitor is None or "loss" not in logs:
            return
        optimizer = unwrap(kwargs["optimizer"])
        _, metrics, alarms = read_health(self.monitor, optimizer, self._seen_alarms)
        metrics["skipped_steps"] = optimizer.num_skipped
        logs.update(metrics)
        state.log_history[-1].update(metrics)
        for alarm in alarms:
            if state.is_world_process_zero:
                _logger.warning(str(alarm))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Recompute raw weights if the best model has been loaded."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            unwrap(kwargs["optimizer"]).sync_from_model_()


def _settings_of(args: Any, optimizer: type[Optimizer]) -> dict[str, Any]:
    """Return the training arguments that an optimizer takes."""
    settings = {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    taken = inspect.signature(optimizer).parameters
    return {n: v for n, v in settings.items() if n in taken and _is_meant(n, v, taken[n].default)}


def _is_meant(name: str, value: Any, default: Any) -> bool:
    """Return whether an optimizer's betas or eps are those of Adam: Adafactor's eps is a pair."""
    if name not in ("betas", "eps") or default is inspect.Parameter.empty:
        return True
    if isinstance(value, tuple):
        return isinstance(default, tuple | list) and len(default) == len(value)
    return isinstance(default, int | float)


def _check_clipping(args: Any) -> None:
    """Warn if Trainer clips too, by another norm."""
    if args.max_grad_norm:
        warnings.warn(
            f"Trainer clips the gradients of effective weights at {args.max_grad_norm:g} before "
            "the optimizer sees them: set max_grad_norm=0 in the training arguments, and give "
            "OptimizerFactory max_grad_norm, which clips by the norm of the raw gradients",
            stacklevel=3,
        )
