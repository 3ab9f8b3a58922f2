"""The accuracy that is measured by default: where the classes lie and which targets count, the loss says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from distributed.strategies.base import MetricSum, Outcome
from distributed.train.loss.probe import logits_of
from distributed.train.loss.torch_losses import entropy_of
from distributed.train.loss.weights import LossWeights
from distributed.train.metrics import binary_accuracy, class_hits, is_sequence


def accuracy_of(outcome: Outcome, loss_fn: Callable[..., Any] | None, weights: LossWeights) -> dict[str, MetricSum]:
    outputs, target, rule = outcome.outputs, outcome.target, weights.rule
    if isinstance(loss_fn, nn.BCEWithLogitsLoss):
        return {"accuracy": binary_accuracy(outputs, target)}
    ignored = rule.ignored if rule is not None and rule.kind in ("targets", "shifted") else weights.ignored
    is_torchs = not outcome.is_own and (outcome.fitted is not None or entropy_of(loss_fn) is not None)
    is_shifted = False if is_torchs else weights.is_shifted
    if is_shifted is None and is_sequence(target):  # the next token's or this one's: unknown, so not measured
        return {}
    found = class_hits(
        logits_of(outputs) if outcome.is_own else logits_or_all(outputs),
        target,
        ignored,
        class_dim=-1 if outcome.is_own else 1 if is_torchs else None,
        is_shifted=bool(is_shifted),
    )
    return {} if found is None else {"accuracy": found}


def logits_or_all(outputs: Any) -> Any:
    logits = getattr(outputs, "logits", None)
    return outputs if logits is None else logits
