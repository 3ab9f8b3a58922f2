"""What compression="auto" makes of measured numbers: predictions, crossovers, the choice, and when it ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distributed.comm.compression.choice import MARGIN, STEPS_NEEDED, MeasuredSteps, choose
from distributed.comm.compression.exchange import Gather, Sum, Swap
from distributed.comm.compression.loss_watch import WINDOW, LossWatch
from distributed.comm.compression.prediction import BucketCost, GradientLink, WireRound, reduced_after_s, wire_bytes

MB = 1e6


def costs(wire: float, own_s: float = 0.0, rounds: int = 1) -> tuple[BucketCost, ...]:
    """Of two buckets, whose bytes and work are divided over rounds."""
    part = WireRound(own_s / (rounds + 1), wire / rounds, 1)
    return (BucketCost((part,) * rounds, own_s / (rounds + 1)),) * 2


def measured(link_mb_s: float, latency_s: float = 1e-4, **kinds: tuple[BucketCost, ...]) -> MeasuredSteps:
    """40 MB of gradients in two buckets, ready after 0.1 and 0.2 s; 0.05 s of a step come after them."""
    ready, whole, link = (0.1, 0.2), costs(20 * MB), GradientLink(link_mb_s * MB, latency_s)
    reduced = reduced_after_s(ready, whole, link)
    return MeasuredSteps(reduced + 0.05, reduced, ready, whole, link, kinds)


def test_reduction_is_hidden_behind_the_backward_pass() -> None:
    link = GradientLink(1.0, 0.0)
    cost = BucketCost((WireRound(0.0, 2.0, 1),))
    assert reduced_after_s([1.0, 5.0], [cost, cost], link) == 7.0  # the first one is through before the second is ready
    assert reduced_after_s([1.0, 2.0], [cost, cost], link) == 5.0  # the second one waits for the link
    assert reduced_after_s([1.0, 2.0], [cost, cost], GradientLink(1.0, 0.5)) == 6.0


def test_own_work_delays_what_follows_it() -> None:
    link = GradientLink(1.0, 0.0)
    cost = BucketCost((WireRound(1.0, 2.0, 1),), decode_s=0.5)
    # Ready at 1, encoded until 2, sent until 4; the next one is ready at 3, encoded until 4, sent until 6, decoded.
    assert reduced_after_s([1.0, 2.0], [cost, cost], link) == 6.5
    second = BucketCost((WireRound(0.0, 1.0, 1), WireRound(0.5, 1.0, 1)))
    assert reduced_after_s([1.0], [second], link) == 3.5


def test_bytes_of_collectives_are_those_of_the_least() -> None:
    numbers = torch.zeros(100)
    assert [wire_bytes(kind(numbers), 4) for kind in (Sum, Gather, Swap)] == [600.0, 1200.0, 300.0]


def test_prediction_at_the_measured_link_is_what_was_measured() -> None:
    found = measured(12.5)
    assert found.step_s_of("none") == pytest.approx(found.step_s)
    wider = replace(found.link, bytes_per_s=125 * MB)
    assert found.step_s_of("none", wider) == pytest.approx(measured(125).step_s)


@pytest.mark.parametrize(("rounds", "own_s"), [(1, 0.05), (2, 0.2)])
def test_crossover_is_where_both_take_equally_long(rounds: int, own_s: float) -> None:
    found = measured(12.5, powersgd=costs(0.4 * MB, own_s, rounds))
    rate = found.crossover("powersgd")
    for factor, gains in ((0.95, True), (1.05, False)):
        link = replace(found.link, bytes_per_s=rate * factor)
        assert (found.step_s_of("powersgd", link) < found.step_s_of("none", link)) is gains


def test_kind_that_never_or_always_gains_has_no_crossover() -> None:
    found = measured(12.5, topk=costs(50 * MB), bf16=costs(10 * MB))
    assert found.crossover("topk") == 0.0
    assert found.crossover("bf16") > 1e12 / 8


def test_slow_link_takes_the_kind_that_gains_most_and_says_why() -> None:
    kinds = {"bf16": costs(10 * MB, 0.01), "powersgd": costs(0.4 * MB, 0.05, 2), "topk": costs(0.4 * MB, 0.3)}
    choice = choose(measured(12.5, **kinds))
    assert choice.kind == "powersgd"
    for part in ("wait for the link (100 Mbit/s)", "bf16", "topk", "above", "Mbit/s whole gradients are faster"):
        assert part in choice.reason


def test_fast_link_stays_with_whole_gradients_untried() -> None:
    found = measured(10_000)
    assert not found.can_gain
    assert choose(found).kind == "none"
    assert "no kind can shorten it" in choose(found).reason


def test_gain_has_to_pay_for_the_steps_that_are_worth_less() -> None:
    """Three quarters of a step's time: a gain for a kind whose steps are as good, none for one that needs 1.5."""
    trial = measured(12.5, bf16=costs(14 * MB), topk=costs(14 * MB))
    part = trial.step_s_of("bf16") / trial.step_s
    assert part < 1 - MARGIN < part * STEPS_NEEDED["topk"]
    assert choose(trial).kind == "bf16"
    only = choose(replace(trial, kinds={"topk": trial.kinds["topk"]}))
    assert only.kind == "none"
    assert "a run needs 1.5 steps with it for one" in only.reason


def test_ranks_agree_on_the_longest_times() -> None:
    one = measured(12.5, bf16=costs(10 * MB, 0.01), int8=costs(5 * MB, 0.02, 2))
    other = replace(one, step_s=9.0, ready_s=(0.3, 0.4), kinds={"bf16": costs(10 * MB, 0.5), "int8": one.kinds["int8"]})
    longest = [max(pair) for pair in zip(one.times(), other.times(), strict=True)]
    agreed = one.at(longest)
    assert agreed == other.at(longest)
    assert agreed.step_s == 9.0
    assert agreed.ready_s == (0.3, 0.4)
    assert agreed.kinds["bf16"][0].own_s == pytest.approx(0.5)
    assert one.at(one.times()) == one


def test_bandwidth_is_the_one_at_which_steps_were_seen() -> None:
    found = measured(12.5)
    noisy = replace(found, link=GradientLink(7 * MB, found.link.latency_s))
    assert noisy.calibrated().link.bytes_per_s == pytest.approx(12.5 * MB, rel=1e-6)
    hidden = replace(found, reduced_s=0.2, link=GradientLink(7 * MB, 1e-4))
    assert hidden.calibrated() == hidden, "nothing is seen of what is hidden"


def test_model_without_gradients_stays_with_whole_ones() -> None:
    assert choose(MeasuredSteps(1.0, 0.0, (), (), GradientLink(1.0, 0.1)).calibrated()).kind == "none"


def falling(steps: int, start: float = 2.0, noise: float = 0.3) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(steps, generator=generator).tolist()
    return [start * math.exp(-step / 400) + noise * number for step, number in enumerate(drawn)]


def windows(losses: list[float]) -> list[list[float]]:
    return [losses[at : at + WINDOW] for at in range(0, len(losses), WINDOW)]


def test_noisy_losses_that_fall_or_stay_are_left_alone() -> None:
    watch = LossWatch()
    assert not any(watch.add(window) for window in windows(falling(4000)))


def test_losses_that_rise_are_reported_after_two_windows() -> None:
    watch = LossWatch()
    assert not any(watch.add(window) for window in windows(falling(400)))
    risen = [loss + 2.0 for loss in falling(40)]
    found = [watch.add(window) for window in windows(risen)]
    assert [bool(text) for text in found] == [False, True]
    assert "twice in a row" in found[1]


def test_one_bad_window_is_no_reason() -> None:
    watch, bad = LossWatch(), [9.0 + step % 2 for step in range(WINDOW)]
    good = falling(WINDOW)
    assert [watch.add(window) for window in (good, bad, good, bad, good)] == [""] * 5


def test_losses_that_are_not_finite_are_reported_at_once() -> None:
    assert LossWatch().add([1.0, math.nan] * 10)


def test_restored_watch_goes_on_as_the_first_one() -> None:
    one, other = LossWatch(), LossWatch()
    one.add(falling(WINDOW)), one.add([9.0, 9.1] * 10)
    other.load(one.state())
    assert one.add([9.0, 9.1] * 10) == other.add([9.0, 9.1] * 10) != ""
