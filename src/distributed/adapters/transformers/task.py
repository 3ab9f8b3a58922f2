"""HfTask: a transformers model with the loss, optimizer and schedule of its TrainingArguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distributed.adapters.transformers.predictions import CollectedPredictions
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.core.registry import import_extra
from distributed.strategies.base import Outcome
from distributed.train.task import Task


class HfTask(Task):
    """With the model's own loss, which is a mean over the tokens, or samples, of all ranks."""

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *,
        optimizers: tuple[Any, Any],
        optimizer_class: tuple[type[Optimizer], dict[str, Any]] | None,
        predictions: CollectedPredictions | None,
    ) -> None:
        self._args, self._optimizer_class = args, optimizer_class
        self._predictions = predictions or None  # which is false without a compute_metrics
        self._total_steps: int | None = None
        optimizer, scheduler = optimizers
        super().__init__(
            model,
            optimizer=self._make_own_optimizer if optimizer is None else optimizer,
            scheduler=self._make_own_scheduler if scheduler is None else scheduler,
        )
        if predictions is not None:
            self.whole_set = predictions

    def begin_run(self, plan: Plan, samples: int | None) -> None:
        super().begin_run(plan, samples)
        self._total_steps = plan.total_steps(None if samples is None else plan.batch.steps(samples), samples)

    def validation_step(self, model: nn.Module, batch: Any) -> Any:
        found = super().validation_step(model, batch)
        if self._predictions is not None and self.samples:
            outputs = found.outputs if isinstance(found, Outcome) else found["outputs"]
            self._predictions.add(outputs, batch)
        return found

    def _make_own_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """As a transformers Trainer makes it, with its groups: `optim`, and the decay of weights but not of norms."""
        theirs = import_extra("transformers", "transformers", "hf_trainer").Trainer
        wants = SimpleNamespace(
            model=self.model,
            args=self._args,
            optimizer=None,
            optimizer_cls_and_kwargs=self._optimizer_class,
            get_decay_parameter_names=partial(theirs.get_decay_parameter_names, None),
            get_optimizer_cls_and_kwargs=theirs.get_optimizer_cls_and_kwargs,
        )
        made: Optimizer = theirs.create_optimizer(wants)
        return made

    def _make_own_scheduler(self, optimizer: Optimizer) -> Any:
        args = self._args
        if self._total_steps is None:
            raise TaskError(
                "lr_scheduler_type with a stream of unknown length",
                why="the schedule goes over all steps of the run",
                do="set max_steps",
            )
        transformers = import_extra("transformers", "transformers", "hf_trainer")
        return transformers.get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(self._total_steps),
            num_training_steps=self._total_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )


class HfLossTask(HfTask):
    """With a loss beside the model's: `compute_loss_func`, or label smoothing."""

    def __init__(self, model: nn.Module, args: Any, *, loss: Callable[..., Any], **parts: Any) -> None:
        """`loss`: of (outputs, labels), with the weight of its mean."""
        self._loss = loss
        super().__init__(model, args, **parts)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        outputs, labels = model(**inputs), batch.get("labels")
        if labels is None:
            raise TaskError(
                f"a batch without labels: it has {', '.join(batch)}",
                why="the loss is a mean over them",
                do="let the data collator name them 'labels'",
            )
        loss, weight = self._loss(outputs, labels)
        return {"loss": loss, "weight": weight, "outputs": outputs, "target": labels}


class SmoothedLoss:
    """The transformers' LabelSmoother, over the targets that count."""

    def __init__(self, smoother: Any, *, is_shifted: bool) -> None:
        self._smoother, self._is_shifted = smoother, is_shifted

    def __call__(self, outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counted = count_of(labels, is_shifted=self._is_shifted)
        loss: torch.Tensor = self._smoother(outputs, labels, shift_labels=self._is_shifted)
        return loss, counted


class GivenLoss:
    """A `compute_loss_func`, which gets the number of targets that count, as in transformers."""

    def __init__(self, function: Callable[..., torch.Tensor], *, is_shifted: bool) -> None:
        self._function, self._is_shifted = function, is_shifted

    def __call__(self, outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counted = count_of(labels, is_shifted=self._is_shifted)
        return self._function(outputs, labels, num_items_in_batch=counted), counted


def count_of(labels: torch.Tensor, *, is_shifted: bool) -> torch.Tensor:
    """How many targets a loss goes over.

    >>> count_of(torch.tensor([[5, 6, -100]]), is_shifted=True)
    tensor(1)
    """
    return ((labels[..., 1:] if is_shifted else labels) != -100).sum()
