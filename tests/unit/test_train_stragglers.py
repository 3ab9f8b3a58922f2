"""A slow rank is told once, with its cause; noise, short moments and what costs nothing are not told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from distributed.core.events import RankSlow
from distributed.train.stragglers.delay import Delay
from distributed.train.stragglers.pace import RankPace
from distributed.train.stragglers.stragglers import Stragglers

USUAL = RankPace(0.010, 0.090)


def looks(readings: Iterable[Sequence[RankPace]], step_s: float = 0.2) -> list[RankSlow]:
    stragglers = Stragglers()
    return [
        event
        for number, paces in enumerate(readings, 1)
        for event in stragglers.look(paces, step=number, step_s=step_s, time=float(number))
    ]


def world(slow: RankPace, ranks: int = 4, rank: int = 2) -> list[RankPace]:
    return [slow if number == rank else USUAL for number in range(ranks)]


def linked(times: Sequence[float], own: RankPace = USUAL) -> list[RankPace]:
    return [own._replace(link_s=seconds) for seconds in times]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (RankPace(0.060, 0.090), "data"),
        (RankPace(0.010, 0.140), "compute"),
        (RankPace(0.030, 0.150), "compute"),
        (RankPace(0.100, 0.120), "data"),
    ],
)
def test_straggler_is_reported_once_with_its_cause(slow: RankPace, cause: str, ranks: int) -> None:
    (event,) = looks([world(slow, ranks, rank=1)] * 20)
    assert (event.rank, event.step, event.time, event.cause) == (1, 3, 3.0, cause)
    assert event.seconds == pytest.approx(slow.own_s)
    assert event.ratio == pytest.approx(slow.own_s / USUAL.own_s)


@pytest.mark.parametrize(
    ("paces", "step_s"),
    [
        ([USUAL] * 4, 0.2),
        (world(RankPace(0.010, 0.110)), 0.2),  # 1.2 times
        ([RankPace(0.0001, 0.0001)] * 3 + [RankPace(0.0008, 0.0001)], 0.001),  # less than a millisecond
        ([RankPace(0.0, 0.002)] * 3 + [RankPace(0.0, 0.004)], 0.2),  # 1 % of a step
        ([USUAL._replace(compute_s=0.001)] + [USUAL] * 3, 0.2),  # a quick one is no slow one
        ([RankPace(0.5, 0.5)], 1.0),
        ([], 1.0),
    ],
)
def test_small_differences_in_pace_are_not_reported(paces: list[RankPace], step_s: float) -> None:
    assert looks([paces] * 10, step_s) == []


def test_short_slowness_is_not_reported() -> None:
    slow, usual = world(RankPace(0.1, 0.09)), world(USUAL)
    assert looks([slow, slow, usual] * 5) == []
    assert looks([world(RankPace(0.1, 0.09), rank=number % 4) for number in range(20)]) == []


def test_straggler_is_reported_again_after_a_normal_phase() -> None:
    slow, usual = world(RankPace(0.1, 0.09)), world(USUAL)
    assert [event.step for event in looks([slow] * 5 + [usual] + [slow] * 5)] == [3, 9]


def test_straggler_is_reported_again_when_its_cause_changes() -> None:
    data, compute = world(RankPace(0.1, 0.09)), world(RankPace(0.01, 0.2))
    events = looks([data] * 5 + [compute] * 5)
    assert [(event.step, event.cause) for event in events] == [(3, "data"), (8, "compute")]
    assert len(looks([data] * 3 + [compute, data, data] * 5)) == 1, "a cause must last too"


def test_two_stragglers_are_both_reported() -> None:
    paces = [USUAL, RankPace(0.1, 0.09), USUAL, RankPace(0.01, 0.2), USUAL]
    assert [(event.rank, event.cause) for event in looks([paces] * 3)] == [(1, "data"), (3, "compute")]


def test_straggler_among_ranks_with_zero_time_has_finite_ratio() -> None:
    (event,) = looks([[RankPace(0, 0), RankPace(0, 0), RankPace(0.1, 0)]] * 3)
    assert (event.rank, event.cause) == (2, "data")
    assert event.ratio > 1


@pytest.mark.parametrize(
    ("links", "rank"),
    [
        ([0.02, 0.02, 0.0005], 1),  # rank r's is that between r and r + 1
        ([0.02, 0.0005, 0.0005, 0.02], 0),
        ([0.0005, 0.0005, 0.02, 0.02, 0.0005], 3),
        ([0.0005, 0.02, 0.0005, 0.0005], None),  # one link: either end may be to blame
        ([0.02, 0.02, 0.01], None),
        ([0.0005, 0.0005, 0.0005], None),
        ([0.0009, 0.0009, 0.0001], None),
        ([0.02, 0.002, 0.0005, 0.0005, 0.0005], None),  # one slow link, and a little noise beside it
    ],
)
def test_rank_between_two_slow_links_is_the_straggler(links: list[float], rank: int | None) -> None:
    quiet = [USUAL] * len(links)
    events = looks([linked(links), quiet, quiet] * 6)  # links are probed in some readings only
    assert [(event.rank, event.cause) for event in events] == ([] if rank is None else [(rank, "communication")])
    assert all(event.step == 7 and event.ratio >= 3 for event in events)


def test_straggler_by_links_is_reported_again_after_quick_links() -> None:
    slow, quick = linked([0.02, 0.02, 0.0005]), linked([0.0005] * 3)
    assert [event.step for event in looks([slow] * 4 + [quick] + [slow] * 4)] == [3, 8]


def test_compute_straggler_is_not_blamed_on_its_links() -> None:
    paces = linked([0.02, 0.02, 0.0005])
    paces[1] = paces[1]._replace(compute_s=0.5)
    assert [event.cause for event in looks([paces] * 5)] == ["compute"]


SLOW = RankPace(0.010, 0.290)  # the others wait 0.2 s in each step


def asks(readings: Iterable[Sequence[RankPace]], *, rank: int = 2, wait_s: float = 30.0, every: int = 20) -> list[int]:
    """The readings after which a rank asks to be replaced."""
    delay = Delay(rank, wait_s)
    reasons = [delay.look(paces, step=number * every, step_s=0.4) for number, paces in enumerate(readings, 1)]
    return [number for number, reason in enumerate(reasons, 1) if reason]


def test_slow_rank_asks_once_when_it_has_cost_enough() -> None:
    assert asks([world(SLOW)] * 30, wait_s=30.0) == [10]  # of at least so many readings
    assert asks([world(SLOW)] * 30, wait_s=60.0) == [16]  # 15 × 20 steps × 0.2 s
    assert asks([world(SLOW)] * 30, wait_s=120.0) == []
    assert asks([world(SLOW)] * 30, rank=1) == []


def test_moment_without_delay_begins_the_count_again() -> None:
    assert asks([world(SLOW)] * 9 + [[USUAL] * 4] + [world(SLOW)] * 9) == []
    assert asks([world(SLOW)] * 9 + [[USUAL] * 4] + [world(SLOW)] * 10) == [20]


def test_steps_before_the_first_slow_reading_are_not_counted() -> None:
    assert asks([[USUAL] * 4] * 50 + [world(SLOW)] * 20, wait_s=60.0) == [66]


def test_slow_link_and_lone_rank_ask_for_nothing() -> None:
    assert asks([linked([0.01, 0.2, 0.2, 0.01])] * 40) == []
    assert asks([[SLOW]] * 40, rank=0) == []
