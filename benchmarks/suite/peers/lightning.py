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

from distributed.bench.workloads.job import BenchJob


class _Module(LightningModule):
    def __init__(self, job: BenchJob, logs: bool) -> None:
        super().__init__()
        self.model, self.logs = job.make_model(), logs
        self.job = job

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.job.look(index)
        loss = self.job.loss(self.model, batch)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.make_optimizer(self.model.parameters())


def train(job: BenchJob) -> nn.Module:
    # TensorBoard's own switch: where TensorFlow is installed, each rank would import all of it.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    logger = TensorBoardLogger if find_spec("tensorboard") else CSVLogger
    return _fit(job, logs=True, logger=logger(job.scratch))


def train_silent(job: BenchJob) -> nn.Module:
    return _fit(job, logs=False, logger=False)


def _fit(job: BenchJob, *, logs: bool, logger: Any) -> nn.Module:
    backend = "gloo" if job.device.type == "cpu" else "nccl"
    ddp = DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True)
    precision: Any = "32-true" if job.precision == "fp32" else "bf16-mixed"
    trainer = Trainer(
        accelerator=job.device.type,
        devices=job.ranks,
        strategy=ddp if job.ranks > 1 else "auto",
        precision=precision,
        max_epochs=1,
        logger=logger,
        log_every_n_steps=job.log_every,
        enable_progress_bar=logs,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = _Module(job, logs)
    trainer.fit(module, job.loader())
    return module.model
