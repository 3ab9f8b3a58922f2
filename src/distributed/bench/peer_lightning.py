"""Lightning's Trainer over the same work: as users have it (bar, logger, `self.log`), and with all of that off."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from distributed.bench.work import Work, make_model, make_optimizer


class _Module(LightningModule):
    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.model, self.loss_fn, self.logs = make_model(), nn.CrossEntropyLoss(), logs

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss: torch.Tensor = self.loss_fn(self.model(inputs), labels)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model.parameters())


def train(work: Work) -> None:
    # TensorBoard's own switch: where TensorFlow is installed, each rank would import all of it.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    logger = TensorBoardLogger if find_spec("tensorboard") else CSVLogger
    _fit(work, logs=True, logger=logger(work.scratch))


def train_silent(work: Work) -> None:
    _fit(work, logs=False, logger=False)


def _fit(work: Work, *, logs: bool, logger: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=work.ranks,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        max_epochs=1,
        logger=logger,
        log_every_n_steps=50,
        enable_progress_bar=logs,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(_Module(logs), work.loader())
