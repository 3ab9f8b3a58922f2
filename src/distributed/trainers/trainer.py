"""Trainer: the front door of the library."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed.core.config import DistributedConfig, build_config
from distributed.core.engines.engine import stages_of
from distributed.core.env import WorkerEnv, dry_ranks, finding_in_env, worker_env
from distributed.core.errors import ConfigError, DataError, TaskError
from distributed.core.history import History
from distributed.core.plan import Decision
from distributed.core.run_dir import RunDir
from distributed.core.settings.typed import Settings, TrainerSettings
from distributed.data.named_sources import NamedSources, read_sources
from distributed.data.source import Source, read_source
from distributed.runtime.torch_module_compat import without_compile_wrapper
from distributed.train.callbacks.callback import Callback, check_callbacks
from distributed.train.evaluation_job import check_target
from distributed.train.given.tasks import check_evaluated, check_model, check_task, make_task
from distributed.train.metrics import check_metrics
from distributed.train.task import Step, Task
from distributed.trainers.dev_run import without_checkpoint
from distributed.trainers.evaluation.evaluating import EvaluationRequest, evaluate_alone, evaluate_in_world
from distributed.trainers.evaluation.settings import build_evaluation_config
from distributed.trainers.fitting import FitRequest, fit_alone, fit_in_world
from distributed.trainers.monitored import check_monitored
from distributed.trainers.settings import build_fit_config, plain, values_of
from distributed.trainers.single_steps import SingleSteps, UnknownData
from distributed.trainers.summary.asked import print_summary
from distributed.trainers.trained.loading import carried_settings, checkpoints_of, find_checkpoint
from distributed.trainers.trained.weights import TrainedWeights

if TYPE_CHECKING:
    from distributed.trainers.finding.finding import BatchSizes
    from distributed.trainers.finding.rate_curve import LearningRateCurve
    from distributed.trainers.summary.model_summary import ModelSummary

Loader: TypeAlias = DataLoader[Any] | Dataset[Any]
Loaders: TypeAlias = Loader | Sequence[Loader] | Mapping[str, Loader]


class Trainer(TrainedWeights):
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
        model: nn.Module | Mapping[str, nn.Module] | Task,
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
        given = values_of(config)
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
        self.notes = (*self.notes, *_without_compile(self._task))
        self.model = self._task.model
        self.callbacks = check_callbacks(callbacks)
        self.history: History | None = None
        self._steps: SingleSteps | None = None  # of a loop of the user's own
        self._weights = ""  # the checkpoint that was loaded since the last fit

    @classmethod
    def from_run(
        cls,
        run_dir: str | Path,
        model: nn.Module | Task,
        checkpoint: str | int | Path = "last",
        *,
        config: DistributedConfig | Mapping[str, Any] | None = None,
        **how: Any,
    ) -> Self:
        """A trainer whose `model` has the weights of an earlier run: of its "last" or "best" checkpoint, or of a step.

        It takes over the settings on which predictions depend, such as `mixed_precision`, and not where the run
        trained; `config` and keywords, those of the trainer, win.
        """
        given = values_of(config)
        carried = {name: value for name, value in carried_settings(run_dir).items() if name not in how}
        trainer = cls(model, config=carried | given, **how)
        trainer.load_checkpoint(find_checkpoint(checkpoint, checkpoints_of(run_dir)).path)
        past = RunDir(run_dir).history
        trainer.history = History.load(past) if past.exists() else None
        return trainer

    @property
    def best_accuracy(self) -> float:
        """Of the last `fit`."""
        return float("nan") if self.history is None else self.history.best_accuracy

    def fit(self, train_loader: Loader, val_loader: Loaders | None = None, **settings: Unpack[Settings]) -> History:
        """Train, and afterwards hold the trained weights in `model`.

        The metrics of one `val_loader` begin with `val_`. Of several, in a dict or a list, they begin with their name
        or place, as `val_clean_loss` and `val_0_loss`, and there is no `val_loss`.
        `settings` win over the trainer's: `checkpoint_dir=`, `mlflow_experiment=`, `max_steps=`, `epochs=` …
        Ctrl-C ends all ranks at a common step; `model` and `history` then hold what was trained, and
        KeyboardInterrupt is raised. SIGTERM and SIGUSR1 do the same; a rank that srun, mpirun or torchrun started then
        ends with `requeue_exit_code`.
        """
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        request = self._request(train_loader, val_loader, settings)
        config = request.config
        if (finding := finding_in_env()) is not None:
            self._find(finding, request)
            raise SystemExit(0)  # what comes after `fit` expects a trained model
        if config.model_summary and self.is_main:
            print_summary(self._task, config, request.train)
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
        self._weights = ""
        if config.fast_dev_run:
            self.history = without_checkpoint(self.history, is_main=self.is_main)
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
        return self._take_step(data, target)

    def _take_step(self, data: Any, target: Any, *, measure: bool = False) -> float:
        if self._steps is None:
            check_task(self._task)
            config = self._merge({})
            source = Source(UnknownData(), batch_size=config.batch_size or 1)  # the loop's batches have any size
            request = FitRequest(config, self._task, source, {}, self.notes)
            self._steps = SingleSteps(request, (*self._task.callbacks, *self.callbacks))
        return self._steps.take((data, target), measure=measure)

    def validate(self, val_loader: Loaders, **settings: Unpack[Settings]) -> dict[str, float]:
        """The metrics of the model on a set, or on several, without training; the same on every rank.

        Their names are those of a `fit`: `val_loss`, or `val_clean_loss` of a set called clean. It takes the ranks and
        the parallelism that the settings name, and the weights that `model` has.

        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
        >>> trainer = Trainer(nn.Linear(4, 2), num_gpus=1, batch_size=4, progress=False)
        >>> sorted(trainer.validate(data))
        ['val_accuracy', 'val_loss']
        """
        return self._measure("validate", "val", val_loader, settings)

    def test(self, test_loader: Loaders, **settings: Unpack[Settings]) -> dict[str, float]:
        """The same of data that is kept for the end, under names that begin with `test_`; by `validation_step`."""
        return self._measure("test", "test", test_loader, settings)

    def predict(self, loader: Loader, to: str | Path | None = None, **settings: Unpack[Settings]) -> Any:
        """The prediction for every row of a dataset once, in its order; a shuffling loader is read in sequence.

        What `predict_step` returns for its batches is put together: tensors along their first dimension (a list of
        rows where their shapes differ), lists, tuples and dicts of these. On several ranks, each of them returns all.
        With `to`, a folder or a URL, the ranks write shards as they go, and `Predictions` of it are returned, which
        yield row after row.
        """
        sources = read_sources(loader, "predict_loader", reads_all=True)
        if list(sources) != [""]:
            why = "the rows of several would have no order"
            raise DataError(f"predict got {len(sources)} sets", why=why, do="predict one after the other")
        check_model(self._task)
        place = "" if to is None else os.fspath(to)
        if place:
            check_target(place, run=(worker_env() or WorkerEnv()).run_dir)
        return self._evaluate("predict", sources, "predict_loader", settings, to=place)

    def _measure(self, call: str, prefix: str, loader: Loaders, settings: Mapping[str, Any]) -> dict[str, float]:
        sets = read_sources(loader, f"{prefix}_loader")
        check_model(self._task)
        check_evaluated(self._task, trains=False)
        check_metrics(self._task.metrics or {})
        found: dict[str, float] = self._evaluate(call, sets, f"{prefix}_loader", settings)
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def _evaluate(self, call: str, sets: NamedSources, role: str, settings: Mapping[str, Any], to: str = "") -> Any:
        if dry_ranks() is not None:
            raise ConfigError(f"{call} in a dry run", why="tensors of a dry run hold nothing", do="call fit before it")
        if stages_of(self.model):
            raise TaskError(
                f"{call} of a PipelineModule of DeepSpeed",
                why="each process has the layers of its stage alone, and they are called in a training only",
                do="evaluate in fit(train_loader, val_loader), or give the layers as nn.Sequential(…)",
            )
        config = build_evaluation_config(self.config, settings, call)
        weights, run_dir = self._known_checkpoint, "" if self.history is None else self.history.run_dir
        request = EvaluationRequest(config, self._task, sets, call, role, to=to, weights=weights, run_dir=run_dir)
        world = worker_env()
        return evaluate_alone(request) if world is None else evaluate_in_world(request, world)

    def find_learning_rate(
        self,
        train_loader: Loader,
        *,
        low: float = 1e-7,
        high: float = 10.0,
        steps: int = 100,
        **settings: Unpack[Settings],
    ) -> LearningRateCurve:
        """The loss over growing learning rates, from `low` to `high`, and the rate to begin with, as `suggestion`.

        A short trial in processes of its own, on as many ranks as the run will have; it ends where the loss diverges.
        Model, optimizer, data and random numbers of this process stay as they are.

            curve = trainer.find_learning_rate(train_loader)
            curve.save_picture("rates.svg")
            trainer.fit(train_loader, learning_rate=curve.suggestion)
        """
        from distributed.trainers.finding.finding import find_learning_rate  # what training does not need

        return find_learning_rate(self._request(train_loader, None, settings, is_trial=True), low, high, steps)

    def find_batch_size(
        self,
        train_loader: Loader,
        *,
        start: int = 1,
        steps: int = 3,
        limit_bytes: int | None = None,
        **settings: Unpack[Settings],
    ) -> BatchSizes:
        """The largest `batch_size` a device that its memory holds, as `largest`, by trials of some steps each.

        Sizes are doubled from `start` until one takes too much, then halved in between. On a GPU, a trial that runs out
        of memory shows that; on CPUs, the memory of the host is not filled: what a size will take follows from those
        before. `limit_bytes` is for each rank. Nothing of this process changes.

            size = trainer.find_batch_size(train_loader, start=8).largest
        """
        from distributed.trainers.finding.finding import find_batch_size  # what training does not need

        request = self._request(train_loader, None, settings, is_trial=True)
        return find_batch_size(request, start, steps, limit_bytes)

    def summary(self, data: Loader | None = None, *, depth: int = 2) -> ModelSummary:
        """The model's layers to some depth, with parameters, shapes, FLOPs and the memory of a step, as a table.

        Of the data one batch is read; without, shapes, FLOPs and activations are not known. No memory is allocated for
        the model, which may be on the meta device, and nothing of it changes.

        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> summary = Trainer(model).summary([(torch.zeros(4), 1)] * 8, depth=1)
        >>> summary.parameters, [layer.shape for layer in summary.layers], summary.flops
        (58, ['[1, 2]', '[1, 8]', '[1, 8]', '[1, 2]'], 96)
        """
        from distributed.trainers.summary.summarizing import summarize  # what training does not need

        check_model(self._task)
        source = None if data is None else read_source(data, "data")
        return summarize(self._task, self._merge({}), source, depth)

    def _request(
        self,
        train_loader: Loader,
        val_loader: Loaders | None,
        settings: Mapping[str, Any],
        *,
        is_trial: bool = False,
    ) -> FitRequest:
        """`is_trial`: of a short one, which validates nothing whatever the run to come does."""
        config = self._merge(settings)
        check_task(self._task)
        check_metrics(self._task.metrics or {})
        train = read_source(train_loader, "train_loader")
        evaluation = {} if val_loader is None else read_sources(val_loader, "val_loader")
        if config.bucket_by_length:
            train = train.bucketed(config.bucket_by_length, "train_loader")
        if config.overfit_batches is not None:
            train = train.in_order()
            evaluation = {name: replace(train, drop_last=False) for name in evaluation}
        if not is_trial:
            check_monitored(config, self._task, evaluation)
        callbacks = (*self._task.callbacks, *self.callbacks)
        check_callbacks(callbacks)
        if evaluation:
            check_evaluated(self._task)
        return FitRequest(config, self._task, train, evaluation, self.notes, callbacks)

    def _find(self, what: str, request: FitRequest) -> None:
        """What `distributed find` wants of a script: find it and show it."""
        from distributed.trainers.finding.finding import show  # what training does not need

        show(what, request)

    def _merge(self, settings: Mapping[str, Any]) -> DistributedConfig:
        """All settings of a `fit`, of every source."""
        return build_fit_config(self.config, settings)


def _without_compile(task: Task) -> list[Decision]:
    """Train what is inside of a compiled model, whose names would all begin with those of the wrapper."""
    inner = without_compile_wrapper(task.model) if isinstance(task.model, nn.Module) else task.model
    if inner is task.model:
        return []
    task.model = inner
    reason = "its wrapper belongs to this process, and the ranks compile the model themselves where that is set"
    return [Decision("the model inside of torch.compile", reason, "compile")]
