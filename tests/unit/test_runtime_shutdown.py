"""How ranks agree on the step at which they stop, over a store in this process."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from distributed.core.plan_parts.synchronization import SynchronizationPlan
from distributed.runtime.shutdown import StopRequest


def requests(ranks: int, asked: list[bool] | None = None, *, apart: int = 0) -> list[StopRequest]:
    store = dist.HashStore()
    wants = asked if asked is not None else [False]
    return [StopRequest(rank, ranks, store, lambda: wants[0], apart=apart) for rank in range(ranks)]


def last_steps(stops: list[StopRequest], *, first: int = 1, limit: int = 20) -> list[int]:
    """The step after which each rank stops, where all take them one by one and look every step."""
    found: dict[int, int] = {}
    for step in range(first, limit):
        for rank, stop in enumerate(stops):
            stop.hear()
            if rank not in found and stop.due(step):
                found[rank] = step
        if len(found) == len(stops):
            return [found[rank] for rank in range(len(stops))]
    raise AssertionError(f"only {found} stopped")


@pytest.mark.parametrize("reached", [[0], [2], [0, 1, 2]])
def test_signal_to_any_rank_ends_all_at_the_same_step(reached: list[int]) -> None:
    stops = requests(3)
    for rank in reached:
        stops[rank].request(signal.SIGTERM)
    steps = last_steps(stops)
    assert len(set(steps)) == 1
    assert all(stop.is_agreed and not stop.is_leaving for stop in stops)


def test_agreed_step_is_not_yet_taken_by_any_rank() -> None:
    """Rank 1 is a step ahead of rank 0, which names the step."""
    stops = requests(2)
    for stop in stops:
        stop.request(signal.SIGINT)
    assert not stops[1].due(5)
    assert not stops[0].due(4)
    assert [stops[1].due(step) for step in (6,)] == [True]
    assert [stops[0].due(step) for step in (5, 6)] == [False, True]


def test_ranks_that_step_alone_end_at_the_same_step() -> None:
    """Rank 1 has come to the end of a round of 16 steps, and waits there for rank 0, which names the step."""
    stops = requests(2, apart=SynchronizationPlan("local_sgd", every=16).apart)
    for stop in stops:
        stop.request(signal.SIGTERM)
    assert not stops[1].due(31)
    assert not stops[0].due(16)
    ends = [next(step for step in range(first, 60) if stops[rank].due(step)) for rank, first in ((0, 17), (1, 32))]
    assert ends[0] == ends[1] >= 32


def test_launchers_leave_request_ends_the_world_not_the_run() -> None:
    asked = [False]
    stops = requests(2, asked)
    assert not any(stop.due(1) for stop in stops)
    asked[0] = True
    assert len(set(last_steps(stops, first=2))) == 1
    assert all(stop.is_leaving and not stop.is_agreed for stop in stops)


def test_signal_during_a_leave_is_agreed_by_all_ranks() -> None:
    stops = requests(2, [True])
    assert not any(stop.due(1) for stop in stops)
    stops[1].request(signal.SIGTERM)
    last_steps(stops, first=2)
    assert len({stop.is_leaving for stop in stops}) == 1, "one agreed what the others follow"
    assert len({stop.is_agreed for stop in stops}) == 1


def test_single_rank_stops_after_its_current_step() -> None:
    stop = StopRequest()
    assert not stop.due(1)
    stop.request(signal.SIGINT)
    assert not stop.is_agreed
    assert stop.due(2)
    assert stop.is_agreed


def test_repeated_signal_under_a_launcher_counts_once() -> None:
    with StopRequest(is_supervised=True) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received is signal.SIGTERM
