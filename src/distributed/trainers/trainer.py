"""Trainer: the front door of the library."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed.core.config import DistributedConfig, build_config
from distributed.core.env import dry_ranks, worker_env
from distributed.core.errors import TaskError
from distributed.core.history import History
from distributed.core.plan import Decision
from distributed.core.settings.typed import Settings, TrainerSettings
from distributed.data.source import Source, read_source
from distributed.train.callbacks.callback import Callback, check_callbacks
from distributed.train.metrics import check_metrics
from distributed.train.task import Step, Task, check_task, make_task
from distributed.trainers.fitting import FitRequest, fit_alone, fit_in_world
from distributed.trainers.settings import build_fit_config, plain
from distributed.trainers.single_steps import SingleSteps, UnknownData

Loader = DataLoader[Any] | Dataset[Any]


class Trainer:
    """Trains a model on many devices.

    Settings are those of `DistributedConfig`, as keywords, in `config`, or both (keywords win). In a plain script, a
    notebook or a REPL, `fit` starts the ranks itself; in a process that a launcher started, it joins the other ranks.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> trainer = Trainer(nn.Linear(4, 2), num_gpus=1, batch_size=16, epochs=2, progress=False, run_dir=tmp / "run")
    >>> history = trainer.fit(data)
    >>> history.steps
    8
    """

    preset: Mapping[str, Any] = {}
    notes: tuple[Decision, ...] = ()  # what this trainer decided; part of the plan

    def __init__(
        self,
        model: nn.Module | Task,
        config: DistributedConfig | Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
        scheduler: Any = None,
        metrics: Mapping[str, Callable[[Any, Any], torch.Tensor]] | None = None,
        training_step: Step | None = None,
        validation_step: Step | None = None,
        predict_step: Step | None = None,
        configure_optimizers: Callable[[nn.Module], Any] | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[TrainerSettings],
    ) -> None:
        keywords = plain(settings)
        if isinstance(optimizer, str):
            keywords["optimizer"], optimizer = optimizer, None
        given = config.given_values() if isinstance(config, DistributedConfig) else dict(config or {})
        preset = {name: value for name, value in self.preset.items() if name not in keywords and name not in given}
        self.config = build_config(
            [(preset, type(self).__name__, {}), (given, "config", {}), (keywords, "argument", {})]
        )
        steps = {
            "training_step": training_step,
            "validation_step": validation_step,
            "predict_step": predict_step,
            "configure_optimizers": configure_optimizers,
        }
        parts = {"loss_fn": loss_fn, "optimizer": optimizer, "scheduler": scheduler, "metrics": metrics}
        self._task = make_task(model, parts, steps)
        self.model = self._task.model
        self.callbacks = tuple(callbacks)
        self.history: History | None = None
        self._steps: SingleSteps | None = None  # of a loop of the user's own

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that should print: rank 0, or a script that started the ranks itself."""
        world = worker_env()
        return world is None or world.is_main

    @property
    def best_accuracy(self) -> float:
        """Of the last `fit`."""
        return float("nan") if self.history is None else self.history.best_accuracy

    def fit(self, train_loader: Loader, val_loader: Loader | None = None, **settings: Unpack[Settings]) -> History:
        """Train, and afterwards hold the trained weights in `model`.

        `settings` win over the trainer's: `checkpoint_dir=`, `mlflow_experiment=`, `max_steps=`, `epochs=` …
        Ctrl-C ends all ranks at a common step; `model` and `history` then hold what was trained, and
        KeyboardInterrupt is raised. SIGTERM and SIGUSR1 do the same; a rank that srun, mpirun or torchrun started then
        ends with `requeue_exit_code`.
        """
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        config = self._merge(settings)
        check_task(self._task)
        check_metrics(self._task.metrics or {})
        train = read_source(train_loader, "train_loader")
        evaluation = None if val_loader is None else read_source(val_loader, "val_loader")
        check_callbacks(self.callbacks)
        request = FitRequest(config, self._task, train, evaluation, self.notes, self.callbacks)
        ranks = dry_ranks()
        if ranks is not None:
            from distributed.trainers.dry_run import dry_run  # imports much of torch that training does not need

            print(dry_run(request, ranks), flush=True)
            raise SystemExit(0)  # what comes after `fit` expects a trained model
        world = worker_env()
        if world is not None:
            self.history = fit_in_world(request, world)
        else:
            self.history = fit_alone(request)
        if self.history.interrupted:
            if world is not None and not world.is_followed and self.history.stop_signal != signal.SIGINT:
                raise SystemExit(config.requeue_exit_code)  # for Slurm, which started this rank itself
            raise KeyboardInterrupt
        return self.history

    def train_step(self, data: Any, target: Any) -> float:
        """One synchronized step with this rank's batch, in a loop of your own; returns the mean loss over all ranks.

        Every rank calls it as often, under `distributed train`, torchrun or the like, or one process alone does. Shares
        of data, evaluation and checkpoints are the loop's matter: `fit`, or `distributed.start`, takes care of them.

        >>> trainer = Trainer(nn.Linear(4, 2), num_gpus=1, learning_rate=0.1, run_dir=tmp / "steps")
        >>> x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
        >>> first, *_, last = [trainer.train_step(x, y) for _ in range(20)]
        >>> last < first
        True
        """
        if self._steps is None:
            check_task(self._task)
            config = self._merge({})
            source = Source(UnknownData(), batch_size=config.batch_size or 1)  # the loop's batches have any size
            self._steps = SingleSteps(FitRequest(config, self._task, source, None, self.notes))
        return self._steps.take((data, target))

    def save_model(self, path: str | Path) -> None:
        """Write the trained weights to one file: safetensors, or what torch.save writes if its name ends in `.pt`.

        Rank 0 does so, from the last checkpoint, and the other ranks pass: it works for models that no rank holds
        whole. Safetensors need the memory of one tensor, of a large one two runs of 64 MiB at most, and some chunks; a
        `.pt` needs that of the whole model. `fit` itself has put the whole model into `model` before, where the memory
        of rank 0, or of the process that started the ranks, holds it; where it does not, that is said, and this works.
        """
        if not self.is_main:
            return
        if self.history is None:
            raise TaskError(
                "there is no trained model to save",
                why="fit has not run in this process",
                do="call trainer.fit(…) first",
            )
        from distributed.checkpoint.exchange.catalog import open_one  # what training does not need
        from distributed.checkpoint.exchange.export import export_checkpoint

        kind = "pt" if str(path).endswith((".pt", ".pth")) else "safetensors"
        export_checkpoint(open_one(self.history.checkpoint), str(path), kind, force=True)

    def _merge(self, settings: Mapping[str, Any]) -> DistributedConfig:
        """All settings of a `fit`, of every source."""
        return build_fit_config(self.config, settings)
