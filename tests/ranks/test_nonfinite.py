"""A loss that is not finite is read some steps later on a GPU: all ranks then name the rank that it began on."""

from __future__ import annotations

import math

import pytest

from distributed.core.env import worker_env
from distributed.runtime.session import Session
from distributed.strategies.base import NonFiniteLoss, StepOutput
from distributed.testing import run_ranks
from distributed.train.meter import Meter
from distributed.train.metrics import MetricNames

NAN, INF = math.nan, math.inf
LOSSES = {
    "first on rank 1": ([1.0, 2.0, NAN, NAN], [1.0, INF, NAN, NAN]),
    "on both at once": ([1.0, 2.0, 3.0, NAN], [1.0, 2.0, 3.0, NAN]),
    "on neither": ([1.0, 2.0], [3.0, 4.0]),
}


def read_all() -> dict[str, tuple[str, int, tuple[int, ...]]]:
    env = worker_env()
    assert env is not None
    session = Session.open(env, device="cpu", collectives="gloo", timeout_s=60)
    found = {}
    for name, losses in LOSSES.items():
        meter = Meter(session, MetricNames(["loss"], session), checks_loss=True)
        for loss in losses[session.rank]:
            meter.add(StepOutput(loss), 4)
        try:
            found[name] = (str(meter.read().metrics["loss"]), -1, ())
        except NonFiniteLoss as told:
            found[name] = (str(told.value), told.steps_ago, told.ranks)
    return found


@pytest.fixture(scope="module")
def told() -> list[dict[str, tuple[str, int, tuple[int, ...]]]]:
    return run_ranks(read_all, 2)


def test_every_rank_names_the_first_nonfinite_rank_and_step(told: list[dict[str, object]]) -> None:
    assert told[0] == told[1]
    assert told[0]["first on rank 1"] == ("inf", 2, (1,))
    assert told[0]["on both at once"] == ("nan", 0, (0, 1))
    assert told[0]["on neither"] == ("2.5", -1, ())
