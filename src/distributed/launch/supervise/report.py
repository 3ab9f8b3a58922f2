"""RunReport: the attempts, faults and recoveries of a run, recorded as they happen. No clock is read here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from distributed.core.events import RunReported
from distributed.launch.supervise.policy import Fault

_SHOWN = 10  # faults, the last ones
_AGAIN = "the script was started again"  # what it resumes from is its own affair


@dataclass
class _Entry:
    """A fault, and the recovery from it, if there was one."""

    attempt: int
    time: float
    fault: Fault
    recovered_at: float | None = None
    source: str = ""
    lost_steps: int = 0


@dataclass
class RunReport:
    """The attempts and faults of a run, and the time that they cost.

    >>> report = RunReport()
    >>> report.attempt_began(0, t=0.0)
    >>> report.fault(50.0, Fault("machine", rank=1, host="n1", step=50, message="killed by SIGKILL"))
    >>> report.attempt_began(1, t=51.0)
    >>> report.recovered(54.0, attempt=1, step=46, lost_steps=4, source="memory of rank 0")
    >>> report.ended(108.0, "done", step=100)
    >>> print(report)
    2 attempts, done at step 100 after 1:48
      attempt 0: machine, rank 1 on n1, step 50: killed by SIGKILL
        back in 4.0 s from memory of rank 0, 4 steps taken again
      time lost 8.0 s, goodput 92.6 %
    """

    _attempts: dict[int, float] = field(default_factory=dict)  # when each began
    _entries: list[_Entry] = field(default_factory=list)
    _began: float | None = None
    _first_step: int = 0
    _last: float = 0.0
    _step: int = -1  # the last finished one; -1: not known
    _status: str = ""
    _counts_steps: bool = True

    def attempt_began(self, attempt: int, t: float, *, step: int = 0) -> None:
        """`step`: of the state that the attempt starts from; used for the first attempt of a resumed run."""
        if self._began is None:
            self._began, self._first_step = t, step
        self._attempts.setdefault(attempt, t)
        self._last = max(self._last, t)

    def fault(self, t: float, fault: Fault) -> None:
        """Record a fault; collateral ones are left out, because their cause is recorded."""
        self._last, self._step = max(self._last, t), max(self._step, fault.step)
        if fault.kind != "collateral":
            self._entries.append(_Entry(max(self._attempts, default=0), t, fault))

    def recovered(self, t: float, attempt: int, step: int, lost_steps: int, source: str) -> None:
        """Record the first new step, taken from the state of `step`; it closes every open fault."""
        self._last, self._step = max(self._last, t), max(self._step, step)
        open_entries = [entry for entry in self._entries if entry.recovered_at is None]
        for entry in open_entries:
            entry.recovered_at, entry.source = t, source
        if open_entries:  # several faults before one recovery cost these steps once
            open_entries[-1].lost_steps = lost_steps

    def ended(self, t: float, status: str, step: int, *, counts_steps: bool = True) -> None:
        """`counts_steps`: False for a script that tells no steps, of which it is known only when it was started."""
        self._last, self._step, self._status = max(self._last, t), max(self._step, step), status
        self._counts_steps = counts_steps
        if not counts_steps:
            self._step = -1
            for entry in self._entries:
                later = [begun for attempt, begun in self._attempts.items() if attempt > entry.attempt]
                entry.recovered_at, entry.source = min(later, default=None), _AGAIN

    @property
    def attempts(self) -> int:
        return len(self._attempts)

    @property
    def faults(self) -> dict[str, int]:
        """The number of faults of each kind."""
        return dict(Counter(entry.fault.kind for entry in self._entries))

    @property
    def seconds(self) -> float:
        return self._last - self._began if self._began is not None else 0.0

    @property
    def seconds_lost(self) -> float:
        """The seconds from each fault to the first new step, plus an estimate for repeated steps."""
        waited = self._waited()
        again = sum(entry.lost_steps for entry in self._entries)
        steps = max(0, self._step - self._first_step) + again
        mean_step = (self.seconds - waited) / steps if steps else 0.0
        return min(self.seconds, waited + again * mean_step)

    @property
    def goodput(self) -> float | None:
        """The fraction of the run's time spent on steps that count; 0 if there was none, None if none is known."""
        if not self._counts_steps:
            return None
        if not self.seconds or 0 <= self._step <= self._first_step:
            return 0.0
        return 1.0 - self.seconds_lost / self.seconds

    @property
    def recovery_p50(self) -> float | None:
        return _quantile(self._recoveries(), 0.5)

    @property
    def recovery_p95(self) -> float | None:
        return _quantile(self._recoveries(), 0.95)

    def event(self, time: float) -> RunReported:
        return RunReported(
            time=time,
            attempts=self.attempts,
            faults=self.faults,
            seconds=self.seconds,
            seconds_lost=self.seconds_lost,
            goodput=self.goodput,
            text=str(self),
        )

    def __str__(self) -> str:
        at = f" at step {self._step}" if self._step >= 0 else ""
        lines = [
            f"{self.attempts} attempt{'s' * (self.attempts != 1)}, {self._status or 'going on'}{at}"
            f" after {_span(self.seconds)}"
        ]
        if len(self._entries) > _SHOWN:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.faults.items())
            lines.append(f"  {len(self._entries)} faults ({kinds}); the last {_SHOWN}:")
        for entry in self._entries[-_SHOWN:]:
            lines += _describe(entry)
        goodput = self.goodput
        if self._entries and goodput is not None:
            lines.append(f"  time lost {_span(self.seconds_lost)}, goodput {100 * goodput:.1f} %")
        p50, p95 = self.recovery_p50, self.recovery_p95
        if p50 is not None and p95 is not None and len(self._recoveries()) > 1:
            lines[-1] += f", recovery p50 {_span(p50)}, p95 {_span(p95)}"
        return "\n".join(lines)

    def _recoveries(self) -> list[float]:
        return [entry.recovered_at - entry.time for entry in self._entries if entry.recovered_at is not None]

    def _waited(self) -> float:
        """Seconds between a fault and the first new step; times that overlap count once."""
        total, until = 0.0, -math.inf
        for entry in sorted(self._entries, key=lambda entry: entry.time):
            end = entry.recovered_at if entry.recovered_at is not None else self._last
            total += max(0.0, end - max(entry.time, until))
            until = max(until, end)
        return total


def _describe(entry: _Entry) -> list[str]:
    fault = entry.fault
    who = [f"rank {fault.rank}" + (f" on {fault.host}" if fault.host else "")] if fault.rank >= 0 else []
    who += [f"step {fault.step}"] if fault.step >= 0 else []
    message = fault.message.splitlines()[0] if fault.message else "no message"
    head = f"  attempt {entry.attempt}: {', '.join([fault.kind, *who])}: {message}"
    if entry.recovered_at is None:
        return [head, "    not recovered"]
    if entry.source == _AGAIN:
        return [head, f"    {_AGAIN} after {_span(entry.recovered_at - entry.time)}"]
    again = f", {entry.lost_steps} step{'s' * (entry.lost_steps != 1)} taken again" if entry.lost_steps else ""
    return [head, f"    back in {_span(entry.recovered_at - entry.time)} from {entry.source}{again}"]


def _quantile(values: Sequence[float], part: float) -> float | None:
    """The smallest value that this fraction of the values does not exceed; None without values.

    >>> _quantile([4.0, 1.0, 3.0, 2.0], 0.5), _quantile([4.0, 1.0, 3.0, 2.0], 0.95), _quantile([], 0.5)
    (2.0, 4.0, None)
    """
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else None


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
