"""hf_trainer: the arguments of a transformers Trainer, trained by ours, and what scripts call of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distributed.adapters.transformers.data import PlainBatches, collator_of, evaluation_data, training_data
from distributed.adapters.transformers.fields import best_metric, settings_of
from distributed.adapters.transformers.history import load_best, log_history, mean_loss
from distributed.adapters.transformers.models import label_names, shifts_labels
from distributed.adapters.transformers.predictions import CollectedPredictions
from distributed.adapters.transformers.saving import save_pretrained
from distributed.adapters.transformers.task import GivenLoss, HfLossTask, HfTask, SmoothedLoss
from distributed.core.env import worker_env
from distributed.core.errors import TaskError
from distributed.core.history import History
from distributed.core.registry import import_extra
from distributed.data.source import read_source
from distributed.train.callbacks.callback import Callback
from distributed.trainers.fitting import FitRequest
from distributed.trainers.settings import build_fit_config
from distributed.trainers.trainer import Trainer


class TrainOutput(NamedTuple):
    """What `train` returns, as in transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What `predict` returns, as in transformers."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


def hf_trainer(
    model: nn.Module | None = None,
    args: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    *,
    processing_class: Any = None,
    model_init: Callable[[], nn.Module] | None = None,
    compute_loss_func: Callable[..., Any] | None = None,
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
    callbacks: Sequence[Callback] | None = None,
    optimizers: tuple[Any, Any] = (None, None),
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    **settings: Any,
) -> HfTrainer:
    """In place of `transformers.Trainer(…)`, with its arguments; `settings` are ours and win: `num_gpus=4` …

    What a field of TrainingArguments is here, docs/switching.md says; one that a run cannot do is refused by name.
    """
    transformers = import_extra("transformers", "transformers", "hf_trainer")
    args = transformers.TrainingArguments("tmp_trainer") if args is None else args
    given = settings_of(args)
    transformers.set_seed(args.seed)
    if (model is None) == (model_init is None):
        raise TaskError("hf_trainer takes either a model or a model_init", do="pass one of them")
    if model is None:
        assert model_init is not None
        model = model_init()
    if isinstance(eval_dataset, Mapping):
        raise TaskError(
            "eval_dataset is a mapping of several", why="an epoch has one evaluation", do="pass one of them"
        )
    _prepare(model, args)
    ignored = list(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"]))
    predictions = CollectedPredictions(
        compute_metrics, preprocess_logits_for_metrics, labels=label_names(args, model), ignored=ignored
    )
    parts: dict[str, Any] = {
        "optimizers": optimizers,
        "optimizer_class": optimizer_cls_and_kwargs,
        "predictions": predictions if args.eval_strategy != "no" and not args.prediction_loss_only else None,
    }
    return HfTrainer(
        _make_task(model, args, compute_loss_func, parts),
        args,
        given | settings,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        collate=collator_of(args, model, data_collator, processing_class),
        processing_class=processing_class,
        predictions=predictions,
        callbacks=callbacks or (),
    )


class HfTrainer:
    """Trains, evaluates, predicts and saves; made by `hf_trainer`."""

    def __init__(
        self,
        task: HfTask,
        args: Any,
        settings: Mapping[str, Any],
        *,
        train_dataset: Any,
        eval_dataset: Any,
        collate: PlainBatches,
        processing_class: Any,
        predictions: CollectedPredictions,
        callbacks: Sequence[Callback],
    ) -> None:
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        self.processing_class, self.data_collator = processing_class, collate
        self.task, self.settings, self._predictions = task, dict(settings), predictions
        self.state = import_extra("transformers", "transformers", "hf_trainer").TrainerState()
        self.trainer = Trainer(task, callbacks=callbacks, **settings)

    @property
    def model(self) -> Any:
        return self.task.model

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end. `resume_from_checkpoint`: True: the last one in `output_dir`; or the path of one."""
        if self.train_dataset is None:
            raise TaskError("train() without a train_dataset", do="hf_trainer(…, train_dataset=…)")
        args, more = self.args, dict[str, Any]()
        resume = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if resume:
            more["resume_from_checkpoint"] = resume
        train = training_data(args, self.train_dataset, self.data_collator)
        if args.max_steps > 0 and (steps := self._steps_per_epoch(train)):
            more["epochs"] = -(-args.max_steps // steps)
        elif args.max_steps <= 0 and args.num_train_epochs != int(args.num_train_epochs):
            more["max_steps"] = math.ceil(args.num_train_epochs * (self._steps_per_epoch(train) or 0)) or None
        evaluates = args.eval_strategy != "no"
        if evaluates and self.eval_dataset is None:
            asked = f"eval_strategy={str(args.eval_strategy.value)!r}"
            raise TaskError(f"{asked} without an eval_dataset", do="hf_trainer(…, eval_dataset=…)")
        evaluation = evaluation_data(args, self.eval_dataset, self.data_collator) if evaluates else None
        history = self.trainer.fit(train, evaluation, **more)
        self._note(history)
        loss = mean_loss(self.state.log_history)
        return TrainOutput(history.steps, loss, _speed(history) | {"train_loss": loss})

    def _steps_per_epoch(self, train: Any) -> int | None:
        """Optimizer steps, on as many ranks as there will be; None: of a stream."""
        source = read_source(train, "train_dataset")
        config = build_fit_config(self.trainer.config, {})
        plan = FitRequest(config, self.task, source, {}).plan(config.run_dir or "", worker_env())
        return None if source.samples is None else plan.batch.steps(source.samples)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The mean loss and the metrics of the model as it is now, in this process."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise TaskError("evaluate() without an eval_dataset", do="trainer.evaluate(dataset)")
        return self._evaluate(dataset, metric_key_prefix)[2]

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """CollectedPredictions and labels of a dataset in its order, and their metrics, in this process."""
        return PredictionOutput(*self._evaluate(test_dataset, metric_key_prefix))

    def _evaluate(self, dataset: Any, prefix: str) -> tuple[Any, Any, dict[str, float]]:
        from distributed.adapters.transformers.evaluation import evaluate  # what a training does not need

        data = evaluation_data(self.args, dataset, self.data_collator)
        loss, samples = evaluate(self.task, data, self._predictions)
        logits, targets = self._predictions.gathered()
        found = self._predictions.measure() | ({} if loss is None else {"loss": loss})
        self._predictions.reset()
        metrics = {f"{prefix}_{name}": value for name, value in found.items()}
        self.state.log_history.append(metrics | {"step": self.state.global_step})
        return logits, targets, metrics | {f"{prefix}_samples": float(samples)}

    def save_model(self, output_dir: str | None = None) -> None:
        """A folder that `from_pretrained` reads, with the tokenizer and the arguments; rank 0 writes it."""
        if self.is_world_process_zero():
            save_pretrained(self.model, Path(output_dir or self.args.output_dir), self.args, self.processing_class)

    def is_world_process_zero(self) -> bool:
        return self.trainer.is_main

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print them, as transformers does."""
        import_extra("transformers.trainer_pt_utils", "transformers", "hf_trainer").log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write them to `output_dir`, as transformers does."""
        pt_utils = import_extra("transformers.trainer_pt_utils", "transformers", "hf_trainer")
        if self.is_world_process_zero():
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        pt_utils.save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write trainer_state.json to `output_dir`, as transformers does."""
        if self.is_world_process_zero():
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(Path(self.args.output_dir, "trainer_state.json")))

    def _note(self, history: History) -> None:
        best = best_metric(self.args)
        found = load_best(self.task, history, best) if self.args.load_best_model_at_end else None
        self.state = replace(
            self.state,
            global_step=history.steps,
            epoch=float(len(history.epochs)),
            max_steps=history.steps,
            num_train_epochs=len(history.epochs),
            log_history=log_history(history),
            best_metric=None if found is None else found[0],
            best_model_checkpoint=None if found is None else found[1],
        )


def _speed(history: History) -> dict[str, float]:
    return {
        "train_runtime": history.total_time,
        "train_samples_per_second": history.throughput,
        "train_steps_per_second": history.steps / max(history.total_time, 1e-9),
        "epoch": float(len(history.epochs)),
    }


def _prepare(model: nn.Module, args: Any) -> None:
    """What a transformers Trainer does to the model itself."""
    if args.gradient_checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            do = "hf_trainer(…, activation_checkpointing=True)"
            raise TaskError(
                f"gradient_checkpointing of a {type(model).__name__}", why="it is no PreTrainedModel", do=do
            )
        enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = args.use_cache


def _make_task(model: nn.Module, args: Any, loss: Callable[..., Any] | None, parts: dict[str, Any]) -> HfTask:
    if loss is not None:
        return HfLossTask(model, args, loss=GivenLoss(loss, is_shifted=shifts_labels(model)), **parts)
    if args.label_smoothing_factor:
        pt_utils = import_extra("transformers.trainer_pt_utils", "transformers", "hf_trainer")
        smoother = pt_utils.LabelSmoother(epsilon=args.label_smoothing_factor)
        return HfLossTask(model, args, loss=SmoothedLoss(smoother, is_shifted=shifts_labels(model)), **parts)
    return HfTask(model, args, **parts)
