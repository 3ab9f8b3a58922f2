"""The size of buckets, by what steps took: a schedule that follows from step numbers, and a choice beyond noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session
from distributed.strategies.data_parallel.bucket_layout import BucketChoice, BucketLayout, different, said_of
from distributed.train.loop_parts.bucket_trial import (
    CAPS_MB,
    BucketTiming,
    BucketTrial,
    cap_of,
    fastest,
    is_timed,
    said_of_times,
    seconds_of,
    steps_of_trial,
)


@pytest.mark.parametrize("caps", [CAPS_MB, CAPS_MB[:3], CAPS_MB[:2]])
def test_each_size_is_timed_equally_often_after_a_warm_step(caps: tuple[float, ...]) -> None:
    steps = range(1, steps_of_trial(caps) + 1)
    timed = [(number, cap_of(number, caps)) for number in steps if is_timed(number)]
    assert set(Counter(cap for _, cap in timed).values()) == {len(timed) // len(caps)}
    assert all(cap_of(number - 1, caps) == cap for number, cap in timed)  # none is the first with its size


def test_a_slower_or_equal_size_leaves_the_usual_one() -> None:
    assert fastest({25.0: 0.1, 5.0: 0.1, 1.0: 0.2}) == 25.0
    assert fastest({25.0: 0.1, 5.0: 0.098, 1.0: 0.2}) == 25.0
    assert fastest({25.0: 0.1, 5.0: 0.09, 1.0: 0.08}) == 1.0
    assert fastest({25.0: math.inf, 5.0: 0.09}) == 25.0
    assert fastest({25.0: 0.1, 5.0: math.inf}) == 25.0


def test_steps_that_did_more_or_less_do_not_count() -> None:
    whole = [BucketTiming(cap, 0.1 * cap, 64, False) for cap in (25.0, 5.0) for _ in range(3)]
    others = [BucketTiming(25.0, 9.0, 64, True), BucketTiming(5.0, 0.001, 8, False)]
    assert seconds_of([*whole, *others], (25.0, 5.0)) == pytest.approx([2.5, 0.5])


def test_steps_that_are_all_measured_are_compared() -> None:
    timed = [BucketTiming(25.0, 0.4, 64, True), BucketTiming(5.0, 0.2, 64, True), BucketTiming(5.0, 0.1, 64, False)]
    assert seconds_of(timed, (25.0, 5.0)) == pytest.approx([0.4, 0.15])


def test_a_size_without_a_step_is_said() -> None:
    assert seconds_of([], (25.0, 5.0)) == [math.inf, math.inf]
    assert "too few" in said_of_times({25.0: 0.1, 5.0: math.inf})


def test_sizes_with_the_same_buckets_are_tried_once() -> None:
    layers = [torch.empty(256, 1024, device="meta") for _ in range(8)]  # 1 MB each
    assert different(CAPS_MB, layers) == [25.0, 5.0, 1.0]
    assert different(CAPS_MB, layers[:1]) == [25.0]


def test_an_order_of_other_parameters_is_not_followed() -> None:
    first, second, third = (torch.full((), float(number)) for number in range(3))
    layout = BucketLayout(1.0, order=(1, 2, 0))
    assert layout.in_order([first, second, third]) == [second, third, first]
    assert layout.in_order([first, second]) == [second, first]  # one was frozen since


class Replicas:
    """What a trial asks of a strategy, of a state that was loaded."""

    def __init__(self, choice: BucketChoice) -> None:
        self.bucket_choice: BucketChoice | None = choice

    def bucket_sizes(self, caps_mb: Sequence[float]) -> list[float]:
        return [*caps_mb]

    def gradient_order(self) -> tuple[int, ...]:
        return ()

    def choose_buckets(self, choice: BucketChoice) -> None:
        self.bucket_choice = choice


@pytest.mark.parametrize(("ranks", "begun_at"), [(1, 2), (3, 7)])
def test_other_ranks_begin_the_measurement_again(ranks: int, begun_at: int) -> None:
    """A part of it tells nothing of them, and neither does what was chosen by others beside the checkpoint."""
    replicas = Replicas(BucketChoice(BucketLayout(5.0), begun_at=2, ranks=ranks, caps_mb=(25.0, 5.0)))
    trial, read = BucketTrial(replicas, Session(WorkerEnv(), torch.device("cpu"), None), tell=lambda text: None), []
    trial.resumed(7, lambda name: read.append(name))
    trial.step_begins(8)
    assert replicas.bucket_choice is not None
    assert (replicas.bucket_choice.begun_at, replicas.bucket_choice.ranks) == (begun_at, 1)
    assert read == ["buckets-1.json"]


def test_size_that_other_ranks_have_measured_is_said() -> None:
    choice = BucketChoice(BucketLayout(5.0), begun_at=0, ranks=2, is_settled=True)
    assert "with 2 ranks; with 3 another size may be faster" in said_of(choice, 3).reason
    assert "ranks" not in said_of(choice, 2).reason
    assert BucketChoice.from_saved(choice.to_save()) == choice
