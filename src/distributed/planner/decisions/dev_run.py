"""fast_dev_run: the settings of a run that takes a few steps to try all that a whole run does, and keeps nothing."""

from __future__ import annotations

from distributed.core.config import DistributedConfig, build_config
from distributed.core.plan import Decision

_SETTING = "fast_dev_run"
_LEFT_OUT = (  # what such a run writes nothing to, reads nothing from, or decides otherwise
    "checkpoint_dir",
    "checkpoint_frequency",
    "keep_last",
    "keep_every",
    "keep_best",
    "keep_best_k",
    "resume_from_checkpoint",
    "resume_hyperparameters",
    "allow_change",
    "tensorboard",
    "tensorboard_dir",
    "mlflow_tracking",
    "mlflow_experiment",
    "mlflow_tracking_uri",
    "csv",
    "epochs",
    "val_check_interval",
    "limit_train_batches",
    "limit_val_batches",
)


def as_dev_run(config: DistributedConfig, *, evaluates: bool) -> tuple[DistributedConfig, Decision]:
    """The settings of such a run, and what is to be said of it; of another run, call nothing.

    >>> config, said = as_dev_run(DistributedConfig(fast_dev_run=3, epochs=90, tensorboard=True), evaluates=False)
    >>> config.epochs, config.limit_train_batches, config.tensorboard
    (1, 3, False)
    """
    steps, given = int(config.fast_dev_run), config.given_values()
    kept = {name: value for name, value in given.items() if name not in _LEFT_OUT}
    tried = {"epochs": 1, "limit_train_batches": _least(config.limit_train_batches, steps)}
    if evaluates:
        tried["limit_val_batches"] = _least(config.limit_val_batches, steps)
    sources = {name: config.source(name) for name in kept}
    others = [name for name in given if name in _LEFT_OUT and name not in tried]
    amount = f"{steps} step{'s' * (steps > 1)}" + f" and {steps} validation batch{'es' * (steps > 1)}" * evaluates
    unused = f"; not used: {', '.join(others)}" if others else ""
    reason = f"one epoch of {amount}, of which no checkpoint is kept and nothing goes to TensorBoard or MLflow{unused}"
    return build_config([(kept, "", sources), (tried, _SETTING, {})]), Decision("a run to try", reason, _SETTING)


def _least(asked: float | None, steps: int) -> int:
    """A number that was asked for may be smaller."""
    return min(asked, steps) if isinstance(asked, int) else steps
