"""BucketTrial: the size of DDP's buckets with which steps are the fastest, as measured in the first steps of a run.

    steps 1 and 2: torch's size ──> in which order gradients come
    then: 25, 5, 1, 100 MB, each for four steps ──> the same again, backwards ──> all ranks take the fastest

Which buckets a step has before the choice follows from its number alone. The choice follows from clocks, and with three
and more ranks it decides in which order gradients are added. So it is part of the run's state, and what resumes from a
checkpoint that is older finds it written down beside that. Other ranks begin a measurement that is not over again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, Protocol, cast

import torch

from distributed.core.errors import CheckpointError
from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.strategies.base import Strategy
from distributed.strategies.data_parallel.bucket_layout import BucketChoice, BucketLayout

CAPS_MB = (25.0, 5.0, 1.0, 100.0)  # the first is taken where no other is faster by more than noise
_WARM = 2  # steps before the first that is timed
_VISIT = 4  # steps with one size, of which the first is not timed
_ROUNDS = 2
_NOISE = 0.03  # of a step's time
_NAME = "the size of buckets"


class TunesBuckets(Protocol):
    """What a strategy has whose gradients DDP reduces."""

    bucket_choice: BucketChoice | None

    def bucket_sizes(self, caps_mb: Sequence[float]) -> list[float]: ...

    def gradient_order(self) -> tuple[int, ...]: ...

    def choose_buckets(self, choice: BucketChoice) -> None: ...


class BucketTiming(NamedTuple):
    cap_mb: float
    seconds: float
    samples: int
    is_measured: bool


class BucketTrial:
    """Every rank makes every call, around and after the same steps."""

    def __init__(
        self,
        strategy: TunesBuckets,
        session: Session,
        *,
        tell: Callable[[str], None],
        put: Callable[[int, str, bytes], None] | None = None,
    ) -> None:
        """`put`: writes down something for who resumes from the checkpoint of a step."""
        self._strategy, self._session, self._tell, self._put = strategy, session, tell, put
        self._timed: list[BucketTiming] = []
        self._saved: list[int] = []  # steps at which checkpoints without the choice were saved
        self._record = f"buckets-{session.world_size}.json"
        self._recorded: float | None = None  # the choice of who took these steps before
        self._begun = 0.0
        self._is_over = False

    def step_begins(self, step: int) -> None:
        if self._is_over:
            return
        choice = self._strategy.bucket_choice
        if choice is None or not (choice.is_settled or choice.ranks == self._session.world_size):
            caps = self._strategy.bucket_sizes(CAPS_MB)
            layout, ranks = BucketLayout(CAPS_MB[0]), self._session.world_size
            choice = BucketChoice(layout, begun_at=step - 1, ranks=ranks, caps_mb=tuple(caps))
        if choice.is_settled:  # of a state that was loaded
            self._strategy.choose_buckets(choice)
            self._end()
            return
        if len(choice.caps_mb) < 2:
            self._settle(choice, CAPS_MB[0], _why_one(bool(choice.caps_mb)))
            return
        cap_mb = cap_of(step - choice.begun_at, choice.caps_mb)
        self._strategy.choose_buckets(replace(choice, layout=replace(choice.layout, cap_mb=cap_mb)))
        self._wait()
        self._begun = time.perf_counter()

    def step_ended(self, step: int, samples: int, *, is_measured: bool) -> None:
        """`is_measured`: more was done in this step than in others."""
        choice = self._strategy.bucket_choice
        if self._is_over or choice is None:
            return
        self._wait()
        number, took = step - choice.begun_at, time.perf_counter() - self._begun
        if is_timed(number):
            self._timed.append(BucketTiming(choice.layout.cap_mb, took, samples, is_measured))
        if number == _WARM:
            order = self._share_order(self._strategy.gradient_order())
            self._strategy.choose_buckets(replace(choice, layout=replace(choice.layout, order=order)))
        elif number >= steps_of_trial(choice.caps_mb):
            self._decide(choice)

    def saved(self, step: int) -> None:
        """A checkpoint holds the state after this step."""
        if not self._is_over and self._put is not None and step not in self._saved:
            self._saved.append(step)

    def resumed(self, step: int, read: Callable[[str], bytes | None]) -> None:
        """This run resumes from the checkpoint of a step, which may lie before the choice of who saved it.

        `read`: what was written down beside that checkpoint, by name.
        """
        choice = self._strategy.bucket_choice
        if choice is not None and choice.is_settled:
            return
        found = (read(self._record) or b"").decode() if self._session.is_main else None
        text = self._session.share_text(f"buckets-{self._session.number()}", found)
        self._recorded = json.loads(text)["cap_mb"] if text else None
        self._saved.append(step)

    def _share_order(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Rank 0's."""
        text = json.dumps(order) if self._session.is_main else None
        return tuple(json.loads(self._session.share_text(f"buckets-{self._session.number()}", text)))

    def _decide(self, choice: BucketChoice) -> None:
        if self._recorded is not None:
            why = "as it was measured when these steps were taken first"
            self._settle(choice, self._recorded, why)
            return
        own = seconds_of(self._timed, choice.caps_mb)
        device = self._session.device
        slowest = self._session.max(_NAME, torch.tensor(own, dtype=torch.float64, device=device))
        seconds = dict(zip(choice.caps_mb, slowest.tolist(), strict=True))
        self._settle(choice, fastest(seconds), said_of_times(seconds))

    def _settle(self, choice: BucketChoice, cap_mb: float, why: str) -> None:
        layout = replace(choice.layout, cap_mb=cap_mb)
        self._strategy.choose_buckets(replace(choice, layout=layout, is_settled=True))
        if self._put is not None and self._session.is_main:
            for step in self._saved:
                try:
                    self._put(step, self._record, json.dumps({"cap_mb": cap_mb}).encode())
                except CheckpointError as failed:  # a full disk: who resumes from there measures again
                    self._tell(f"the size of buckets was not written down for step {step}: {failed}")
        self._tell(f"gradients are reduced in buckets of {cap_mb:g} MB: {why} [bucket_cap_mb]")
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._timed, self._saved = [], []

    def _wait(self) -> None:
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)


def bucket_trial(plan: Plan, strategy: Strategy, session: Session, **how: Any) -> BucketTrial | None:
    """None: the plan says which buckets there are."""
    if not plan.replicate.tunes_buckets or session.world_size == 1:
        return None
    return BucketTrial(cast(TunesBuckets, strategy), session, **how)


def steps_of_trial(caps: Sequence[float]) -> int:
    return _WARM + _ROUNDS * _VISIT * len(caps)


def cap_of(number: int, caps: Sequence[float]) -> float:
    """Of the n-th step, counted from 1.

    >>> [cap_of(number, (25.0, 5.0)) for number in (1, 2, 3, 6, 7, 11, 15, 18)]
    [25.0, 25.0, 25.0, 25.0, 5.0, 5.0, 25.0, 25.0]
    """
    if number <= _WARM:
        return caps[0]
    turn, visit = divmod((number - _WARM - 1) // _VISIT, len(caps))
    return caps[visit] if turn % 2 == 0 else caps[-1 - visit]


def is_timed(number: int) -> bool:
    """
    >>> [number for number in range(1, 12) if is_timed(number)]
    [4, 5, 6, 8, 9, 10]
    """
    return number > _WARM and (number - _WARM - 1) % _VISIT > 0


def seconds_of(timed: Sequence[BucketTiming], caps: Sequence[float]) -> list[float]:
    """Of each size the median of its whole steps that were not measured besides; infinite where there is none.

    Where every step is measured, all are alike.

    >>> first = [BucketTiming(25.0, 0.5, 64, False), BucketTiming(25.0, 0.9, 64, True)]
    >>> seconds_of([*first, BucketTiming(5.0, 0.1, 64, False), BucketTiming(5.0, 0.01, 3, False)], (25.0, 5.0))
    [0.5, 0.1]
    """
    whole = max((step.samples for step in timed), default=0)
    full = [step for step in timed if step.samples == whole]
    plain = [step for step in full if not step.is_measured]
    alike = plain if {step.cap_mb for step in plain} >= set(caps) else full
    by_cap = {cap_mb: [step.seconds for step in alike if step.cap_mb == cap_mb] for cap_mb in caps}
    return [median(found) if found else math.inf for found in by_cap.values()]


def fastest(seconds: Mapping[float, float]) -> float:
    """The first, unless another one is faster by more than noise.

    >>> fastest({25.0: 0.100, 5.0: 0.099}), fastest({25.0: 0.100, 5.0: 0.090})
    (25.0, 5.0)
    """
    first = next(iter(seconds))
    best = min(seconds, key=lambda cap_mb: seconds[cap_mb])
    is_worth_it = seconds[best] < (1 - _NOISE) * seconds[first] and math.isfinite(seconds[first])
    return best if is_worth_it else first


def said_of_times(seconds: Mapping[float, float]) -> str:
    """
    >>> said_of_times({25.0: 0.1, 5.0: 0.09})
    'a step takes 100.0 ms with 25 MB, 90.0 ms with 5 MB'
    """
    known = [f"{1e3 * took:.1f} ms with {cap:g} MB" for cap, took in seconds.items() if math.isfinite(took)]
    if len(known) < len(seconds):
        return "too few whole steps were timed to compare sizes"
    return f"a step takes {', '.join(known)}"


def _why_one(is_reduced: bool) -> str:
    return "all sizes come to the same buckets" if is_reduced else "DDP does not reduce the gradients of this run"
