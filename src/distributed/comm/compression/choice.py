"""The choice of compression="auto": from what was measured in the first steps, on every rank the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distributed.comm.compression.prediction import BucketCost, GradientLink, WireRound, reduced_after_s

# How many steps a run with this kind is taken to need for one of a run with whole gradients: a step that follows the
# gradient less closely has to be that much quicker before anything is gained. fp16 sends no less than bf16, and can
# overflow; randomk and onebit send no less than topk and powersgd for what they lose.
STEPS_NEEDED = {"bf16": 1.0, "int8": 1.05, "powersgd": 1.25, "topk": 1.5}
MARGIN = 0.1  # of a step, that has to be gained besides
_SEEN = 0.25  # part of a reduction that has to be waited for, if it is to show the bandwidth
_APART = 4.0  # factor between that and the bandwidth of collectives alone, at most
_WIDEST, _NARROWEST = 1e13, 1e2  # bytes a second, between which crossovers are looked for


class KindChoice(NamedTuple):
    kind: str  # "none": whole gradients
    reason: str  # with the numbers


@dataclass(frozen=True)
class MeasuredSteps:
    """Of the first steps of a run with whole gradients; times are those of the slowest rank."""

    step_s: float
    reduced_s: float  # when all buckets were reduced, in a step
    ready_s: tuple[float, ...]  # when each bucket's gradients were there, in a step
    whole: tuple[BucketCost, ...]  # by bucket, as is all that follows
    link: GradientLink
    kinds: Mapping[str, tuple[BucketCost, ...]] = field(default_factory=dict)

    def step_s_of(self, kind: str, link: GradientLink | None = None) -> float:
        """The time of a step with this kind, "none": with whole gradients; at another bandwidth, if one is given."""
        costs = self.whole if kind == "none" else self.kinds[kind]
        here = reduced_after_s(self.ready_s, self.whole, self.link)
        return max(0.0, self.step_s + reduced_after_s(self.ready_s, costs, link or self.link) - here)

    def crossover(self, kind: str) -> float:
        """The bandwidth in bytes a second above which whole gradients are faster; 0: always, inf: never."""

        def gains(exponent: float) -> bool:
            link = replace(self.link, bytes_per_s=math.exp(exponent))
            return self.step_s_of(kind, link) < self.step_s_of("none", link)

        low, high = math.log(_NARROWEST), math.log(_WIDEST)
        if gains(high):
            return math.inf
        if not gains(low):
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if gains(middle) else (low, middle)
        return math.exp(low)

    def times(self) -> list[float]:
        """All times in a fixed order, so that ranks can agree on the longest ones."""
        found = [self.step_s, self.reduced_s, *self.ready_s, 1 / self.link.bytes_per_s, self.link.latency_s]
        for costs in self.kinds.values():
            for cost in costs:
                found += [*(sent.encode_s for sent in cost.rounds), cost.decode_s]
        return found

    def at(self, times: Sequence[float]) -> MeasuredSteps:
        """The same with these times."""
        left = iter(times)
        step_s, reduced_s = next(left), next(left)
        ready_s = tuple(next(left) for _ in self.ready_s)
        link = GradientLink(1 / next(left), next(left))
        kinds = {kind: tuple(_timed(cost, left) for cost in costs) for kind, costs in self.kinds.items()}
        return replace(self, step_s=step_s, reduced_s=reduced_s, ready_s=ready_s, link=link, kinds=kinds)

    @property
    def waits_s(self) -> float:
        """How long a step waits for its reduction, once the last gradient is there."""
        return min(self.step_s, max(0.0, self.reduced_s - max(self.ready_s, default=0.0)))

    def calibrated(self) -> MeasuredSteps:
        """With the bandwidth at which whole gradients are reduced when they were seen to be.

        In a step the link is shared with the backward pass and with all that was not alone either. Where little of the
        reduction is seen to be waited for, the bandwidth stays that of collectives alone.
        """
        alone = sum(self.link.seconds(sent) for bucket in self.whole for sent in bucket.rounds)
        if self.waits_s < _SEEN * alone:
            return self
        slow, fast = (math.log(self.link.bytes_per_s * factor) for factor in (1 / _APART, _APART))
        for _ in range(60):
            middle = (slow + fast) / 2
            took = reduced_after_s(self.ready_s, self.whole, replace(self.link, bytes_per_s=math.exp(middle)))
            slow, fast = (middle, fast) if took > self.reduced_s else (slow, middle)
        return replace(self, link=replace(self.link, bytes_per_s=math.exp(slow)))

    @property
    def can_gain(self) -> bool:
        """Whether a kind without any cost could pay."""
        return bool(self.whole) and self.waits_s > MARGIN * self.step_s


def choose(measured: MeasuredSteps) -> KindChoice:
    """The kind that brings a run on soonest, if any pays."""
    link, whole_s = measured.link, measured.step_s
    seen = f"of a step's {_time(whole_s)}, {_time(measured.waits_s)} wait for the link ({_rate(link.bytes_per_s)})"
    if not measured.can_gain:
        return KindChoice("none", f"{seen}, so no kind can shorten it by {MARGIN:.0%}")
    predicted = {kind: measured.step_s_of(kind) for kind in measured.kinds}
    best = min(predicted, key=lambda kind: predicted[kind] * STEPS_NEEDED[kind], default="none")
    steps = ", ".join(f"{kind} {_time(took)}" for kind, took in predicted.items())
    said = f"{seen}; predicted with {steps}"
    if best == "none":
        return KindChoice("none", seen)
    crossover = measured.crossover(best)
    if predicted[best] * STEPS_NEEDED[best] < (1 - MARGIN) * whole_s:
        return KindChoice(best, f"{said}; {_above(crossover)} whole gradients are faster than those of {best}")
    few = (
        f"a run needs {STEPS_NEEDED[best]:g} steps with it for one"
        if STEPS_NEEDED[best] > 1
        else "too little is gained"
    )
    return KindChoice("none", f"{said}; {best} is nearest, but {few}: {_below(crossover)} its steps are shorter")


def _timed(cost: BucketCost, left: object) -> BucketCost:
    rounds = tuple(WireRound(next(left), sent.wire_bytes, sent.collectives) for sent in cost.rounds)  # type: ignore[call-overload]
    return BucketCost(rounds, next(left))  # type: ignore[call-overload]


def _above(crossover: float) -> str:
    return "at no bandwidth" if crossover == math.inf else f"above {_rate(crossover)}"


def _below(crossover: float) -> str:
    return "at no bandwidth" if not crossover else f"below {_rate(crossover)}"


def _rate(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit:,.0f} Mbit/s" if mbit >= 10 else f"{mbit:.2g} Mbit/s"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
