"""What a LightningModule sees as `self.trainer` while one of its methods runs: facts of the run, by public names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distributed.adapters.unmapped import UnmappedError
from distributed.core.env import worker_env
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.shares import EpochSplit
from distributed.train.callbacks.calls import Control


class ModuleTrainer:
    """Stands for Lightning's Trainer in a module's code. What it lacks is named in an error."""

    barebones = fast_dev_run = sanity_checking = False
    progress_bar_callback = None
    overfit_batches = 0.0
    limit_train_batches = limit_val_batches = 1.0
    check_val_every_n_epoch = 1
    min_epochs = 0

    def __init__(self, datamodule: Any) -> None:
        self.datamodule = datamodule
        self.plan: Plan | None = None
        self.samples: int | None = None  # of an epoch
        self.run: Control | None = None  # while it trains
        self.stage = ""  # "training", "validating", "testing", "predicting"
        self.batch_idx = 0  # of the batch of the stage
        self.schedulers: list[Any] = []

    def begin_run(self, plan: Plan, samples: int | None) -> None:
        """Nothing of a run before is left, so that it can be sent to ranks."""
        self.plan, self.samples, self.run = plan, samples, None
        self.batch_idx, self.schedulers = 0, []

    def __getattr__(self, name: str) -> Any:
        raise UnmappedError(
            f"self.trainer.{name} is not known here",
            why="the module is trained by distributed.Trainer, which has no such attribute",
            do="use what self.trainer has in docs/switching.md, or a distributed.Callback",
        )

    @property
    def logger(self) -> Any:
        """No AttributeError, which nn.Module would turn into one of the module's own."""
        raise TaskError(
            "self.logger",
            why="a run writes what self.log gives it, and has no logger object",
            do="self.log(…) with tensorboard=True or mlflow_tracking=True",
        )

    loggers = logger

    # ---- where the run stands

    @property
    def current_epoch(self) -> int:
        return self.run.epoch if self.run is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps that are done."""
        return self.run.step if self.run is not None else 0

    @property
    def callback_metrics(self) -> Mapping[str, torch.Tensor]:
        """The newest means over all ranks, by their names in the history."""
        found = self.run.metrics if self.run is not None else {}
        return {name: torch.tensor(value) for name, value in found.items()}

    logged_metrics = callback_metrics

    @property
    def training(self) -> bool:
        return self.stage == "training"

    @property
    def validating(self) -> bool:
        return self.stage == "validating"

    evaluating = validating

    @property
    def testing(self) -> bool:
        return self.stage == "testing"

    @property
    def predicting(self) -> bool:
        return self.stage == "predicting"

    # ---- the ranks

    @property
    def world_size(self) -> int:
        if self.run is not None:
            return self.run.world_size
        env = worker_env()
        if env is not None:
            return env.world_size
        return self._planned("world_size").world_size

    num_devices = world_size

    @property
    def num_nodes(self) -> int:
        return self._planned("num_nodes").num_nodes

    @property
    def global_rank(self) -> int:
        env = worker_env()
        return self.run.rank if self.run is not None else env.rank if env is not None else 0

    @property
    def local_rank(self) -> int:
        env = worker_env()
        return env.local_rank if env is not None else 0

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    # ---- how it trains

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        if self.run is None:
            raise UnmappedError("self.trainer.optimizers", why="the run has not begun, and makes its optimizer then")
        return [self.run.optimizer]

    @property
    def max_epochs(self) -> int:
        return self._planned("max_epochs").epochs

    @property
    def max_steps(self) -> int:
        return self._planned("max_steps").max_steps or -1

    @property
    def accumulate_grad_batches(self) -> int:
        return self._planned("accumulate_grad_batches").batch.at(self.current_epoch).accumulation

    @property
    def gradient_clip_val(self) -> float | None:
        return self._planned("gradient_clip_val").optimizer.clip_norm

    @property
    def num_training_batches(self) -> int | float:
        """Of this rank in an epoch."""
        batch = self._planned("num_training_batches").batch.at(self.current_epoch)
        return float("inf") if self.samples is None else EpochSplit(self.samples, batch, 0).micro_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run."""
        plan = self._planned("estimated_stepping_batches")
        steps = None if self.samples is None else plan.batch.steps(self.samples)
        total = plan.total_steps(steps, self.samples)
        return float("inf") if total is None else total

    @property
    def default_root_dir(self) -> str:
        return self._planned("default_root_dir").run_dir

    @property
    def log_dir(self) -> str:
        return str(Path(self.default_root_dir))

    # ---- what a module may ask for

    @property
    def should_stop(self) -> bool:
        return self.run is not None and bool(self.run.reason)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.run is not None:
            self.run.stop("the module has set trainer.should_stop")

    def _planned(self, name: str) -> Plan:
        if self.plan is None:
            raise UnmappedError(
                f"self.trainer.{name} is not known yet", why="the run is planned in fit", do="read it in a later hook"
            )
        return self.plan
