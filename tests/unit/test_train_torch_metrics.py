"""Metrics of torchmetrics over two ranks: those that wrap others count, and what is no state of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics.wrappers import MinMaxMetric, MultioutputWrapper, Running

from distributed.core.errors import TaskError
from distributed.train.whole_set.torch_metrics import MergedMetric

GENERATOR = torch.Generator().manual_seed(0)
OUTPUTS, TARGET = torch.randn(9, 2, generator=GENERATOR), torch.randn(9, 2, generator=GENERATOR)


class Counted(torchmetrics.Metric):
    """Counts its rows beside its states."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        self.total += (outputs - target).abs().sum()
        self.rows += len(outputs)

    def compute(self) -> torch.Tensor:
        return self.total / self.rows


class Averaged(torchmetrics.Metric):
    """Its only state is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        self.mean = (outputs - target).mean()

    def compute(self) -> Any:
        return self.mean


def over_ranks(make: Callable[[], torchmetrics.Metric], *parts: slice) -> Any:
    ranks = [MergedMetric(make()) for _ in parts]
    for rank, part in zip(ranks, parts, strict=True):
        rank.reset()
        rank.update(OUTPUTS[part], TARGET[part])
    states = [state for rank in ranks if (state := rank.state()) is not None]
    assert len(states) == len(parts)
    return ranks[0].compute(states)


@pytest.mark.parametrize("parts", [[slice(0, 9)], [slice(0, 6), slice(6, 9)]])
def test_metric_that_wraps_others_is_measured(parts: list[slice]) -> None:
    found = over_ranks(lambda: MultioutputWrapper(torchmetrics.MeanSquaredError(), 2), *parts)
    assert torch.allclose(found, (OUTPUTS - TARGET).square().mean(0))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Counted, "rows"),
        (Averaged, "mean"),
        (lambda: Running(torchmetrics.MeanSquaredError(), window=2), "_num_vals_seen"),
        (lambda: MinMaxMetric(torchmetrics.MeanSquaredError()), "max_val"),
    ],
)
def test_metric_that_ranks_cannot_put_together_is_refused(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(TaskError, match=named):
        over_ranks(make, slice(0, 6), slice(6, 9))


def test_what_one_rank_counts_beside_its_states_is_all_there_is() -> None:
    assert over_ranks(Counted, slice(0, 9)) == pytest.approx(float((OUTPUTS - TARGET).abs().sum() / 9))
