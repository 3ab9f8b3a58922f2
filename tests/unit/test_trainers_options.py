"""Every trainer takes the steps, callbacks and tasks that Trainer takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback, DistributedConfig, HorovodTrainer, PyTorchDDPTrainer, RayTrainer, Task, Trainer
from distributed.callbacks import EMA, SWA
from distributed.core.errors import ConfigError, TaskError


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).mean()


class OwnTask(Task):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return step(model, batch)


@pytest.mark.parametrize("kind", [PyTorchDDPTrainer, HorovodTrainer, RayTrainer])
def test_trainer_of_a_framework_takes_steps_and_callbacks(kind: type[Trainer]) -> None:
    callback = Callback()
    parts = {"one": nn.Linear(4, 2), "other": nn.Linear(2, 1)}
    trainer = kind(parts, training_step=step, validation_step=step, callbacks=[callback], num_gpus=2, epochs=3)
    assert trainer._task.has_own_step
    assert trainer._task.has_own_validation
    assert trainer.callbacks == (callback,)
    assert list(trainer.model) == ["one", "other"]  # type: ignore[call-overload]
    assert kind(OwnTask(nn.Linear(4, 2)), num_gpus=2)._task.has_own_step


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_momentum_of_zero_is_refused_of_optimizers_without_one(optimizer: str) -> None:
    with pytest.raises(ConfigError, match="momentum is set, but would have no effect"):
        Trainer(nn.Linear(4, 2), optimizer=optimizer, momentum=0.0)
    assert DistributedConfig(optimizer="sgd", momentum=0.0).momentum == 0.0


@pytest.mark.parametrize("second", [EMA(0.5), SWA(0, evaluates=True)])
def test_two_averages_that_are_evaluated_are_refused(second: Callback) -> None:
    """The second one would take the first one's averages for the model's own weights, and put them back as these."""
    with pytest.raises(TaskError, match="evaluates=False"):
        Trainer(nn.Linear(4, 2), callbacks=[EMA(0.9), second])
    assert Trainer(nn.Linear(4, 2), callbacks=[EMA(0.9), EMA(0.5, evaluates=False), SWA(0)]).callbacks
