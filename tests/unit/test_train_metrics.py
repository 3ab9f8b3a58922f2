"""Means of metrics and losses: over samples, whatever the sizes of batches and steps, and across a resume."""

from __future__ import annotations

import pytest
import torch

from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session
from distributed.strategies.base import StepOutput
from distributed.train.meter import Meter
from distributed.train.metrics import MetricNames, MetricTotals, sum_metrics


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def test_metrics_are_means_over_samples() -> None:
    """A metric that gives a value for each sample, and one that gives the mean of a batch, come to the same."""
    metrics = {"each": lambda outputs, target: outputs, "mean": lambda outputs, target: outputs.mean()}
    totals = MetricTotals()
    for batch in ([1.0, 2.0, 3.0], [10.0]):
        totals.add(sum_metrics(metrics, torch.tensor(batch), None, len(batch)))
    names = MetricNames(["each", "unseen"], alone())
    assert totals.mean("metrics", alone(), names) == pytest.approx({"each": 4.0, "mean": 4.0})
    assert names.known == ["each", "unseen", "mean"]


def test_losses_are_means_over_samples_across_a_resume() -> None:
    """Two readings of steps of other sizes; the run is resumed in between, with a step that nobody had read."""
    meter = Meter(alone(), MetricNames(["loss"], alone()), checks_loss=False)
    meter.begin_epoch()
    for loss, samples in ((1.0, 4), (4.0, 2)):
        meter.add(StepOutput(loss, None, None), samples)
    reading = meter.read()
    assert (reading.metrics["loss"], reading.samples) == (pytest.approx(2.0), 6)
    meter.add(StepOutput(5.0, None, None), 1)
    resumed = Meter(alone(), MetricNames(["loss"], alone()), checks_loss=False)
    resumed.load_state(meter.state())
    resumed.begin_epoch(goes_on=True)
    resumed.add(StepOutput(8.0, None, None), 1)
    assert resumed.read().metrics["loss"] == pytest.approx(6.5)
    assert resumed.epoch_metrics()["loss"] == pytest.approx((6 * 2.0 + 5.0 + 8.0) / 8)
    resumed.begin_epoch()
    assert resumed.epoch_metrics() == {}
