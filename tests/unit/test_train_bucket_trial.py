"""The size of buckets, by what steps took: a schedule that follows from step numbers, and a choice beyond noise."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from distributed.strategies.data_parallel.bucket_layout import BucketLayout, different
from distributed.train.loop_parts.bucket_trial import (
    CAPS_MB,
    BucketTiming,
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
