"""Means of metrics and losses: over samples, whatever the sizes of batches and steps, and across a resume."""

from __future__ import annotations

import math

import pytest
import torch

from distributed.core.env import WorkerEnv
from distributed.core.errors import TaskError
from distributed.runtime.session import Session
from distributed.strategies.base import Logged, StepOutput
from distributed.train.meter import Meter
from distributed.train.metrics import MetricNames, MetricTotals, sum_logged, sum_metrics


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


def test_logged_values_in_16_bits_are_summed_exactly() -> None:
    """As under autocast: a sum in bf16 would stay where it is after some hundred batches."""
    totals = MetricTotals()
    for value in (torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor(0.5, dtype=torch.float16)) * 1000:
        totals.add(sum_logged({"gap": Logged(value, torch.tensor(3, dtype=torch.bfloat16))}, 4))
    assert totals.mean("metrics", alone(), MetricNames(["gap"], alone())) == {"gap": 0.5}
    assert totals.sums["gap"].weight == 6000


def test_logged_mean_over_nothing_has_no_weight() -> None:
    """A batch, or a rank's share, without a sample of the kind that is counted: its mean is NaN, and its weight 0."""
    totals, nothing = MetricTotals(), torch.tensor([]).mean()
    for logged, size in ((Logged(0.25, 4.0), 8), (Logged(nothing, torch.tensor(0)), 8), (Logged(nothing, None), 0)):
        totals.add(sum_logged({"f1": logged}, size))
    assert totals.mean("metrics", alone(), MetricNames([], alone())) == {"f1": 0.25}
    totals.add(sum_logged({"f1": Logged(nothing, None)}, 8))  # a NaN that counts stays one
    assert math.isnan(totals.mean("metrics", alone(), MetricNames([], alone()))["f1"])


def test_epoch_mean_of_what_a_step_logs_is_by_its_weight() -> None:
    """Three of four steps are read, the third for the one before it too; as many samples in each."""
    meter = Meter(alone(), MetricNames([], alone()), checks_loss=False)
    meter.begin_epoch()
    for f1, weight, is_read in ((0.5, 10.0, True), (1.0, 2.0, True), (9.0, 9.0, False), (0.25, 4.0, True)):
        logged = sum_logged({"f1": Logged(f1, weight), "mean": Logged(f1, None)}, 8)
        meter.add(StepOutput(1.0, None, logged), 8)
        if is_read:
            meter.read()
    found = meter.epoch_metrics()
    assert found["f1"] == pytest.approx((0.5 * 10 + 1.0 * 2 + 0.25 * 8) / (10 + 2 + 8))
    assert found["mean"] == pytest.approx((0.5 + 1.0 + 2 * 0.25) / 4)


@pytest.mark.parametrize("value", [(torch.ones(2), torch.ones(2)), {"a": 1.0}, None])
def test_metric_that_returns_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(TaskError, match=r"metrics\['mine'\] returned a"):
        sum_metrics({"mine": lambda outputs, target: value}, None, None, 2)  # type: ignore[dict-item,return-value]


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
    resumed.begin_epoch(is_resumed=True)
    resumed.add(StepOutput(8.0, None, None), 1)
    assert resumed.read().metrics["loss"] == pytest.approx(6.5)
    assert resumed.epoch_metrics()["loss"] == pytest.approx((6 * 2.0 + 5.0 + 8.0) / 8)
    resumed.begin_epoch()
    assert resumed.epoch_metrics() == {}


def test_losses_of_one_element_are_read_from_a_device() -> None:
    """Where losses are kept as tensors, they may have the shape [1], which a loss is allowed."""
    meter = Meter(alone(), MetricNames(["loss"], alone()), checks_loss=True)
    meter.begin_epoch()
    for loss in (1.0, 4.0):
        meter.add(StepOutput(torch.tensor([loss]), torch.tensor(2.0), None), 1)
    reading = meter.read()
    assert (reading.metrics["loss"], reading.gradient_norm) == (2.5, 2.0)
