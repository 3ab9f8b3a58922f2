"""HangWatch: finds a rank of this node that runs without progress, and reports its line and the ranks that wait.

A rank that hangs answers no message. Its heartbeat shows that it is late, the kernel shows whether it may run at all,
and faulthandler, which every rank has registered for SIGUSR2, shows its line, even inside native code.
The kernel's view is read from /proc; without /proc no hang is found.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distributed.core.choices import Activity
from distributed.core.protocol.heartbeat import RECORD, Beat, Phase
from distributed.launch.node.kernel import GONE, HALTED, Kernel
from distributed.launch.supervise.flight_recorders import Recorders
from distributed.launch.supervise.stack_query import StackQuery, Watched
from distributed.launch.supervise.stacks import Whereabouts
from distributed.launch.supervise.stuck_collectives import Wait, blame_mismatch, find_waits, standing_in

_S = 1_000_000_000
_SHORTEST_S = 10.0
_STEPS = 20  # a step may take this many times as long as the slowest recent one
_EVERY_NS = _S // 5
_SOON_NS = _S  # a rank that will be late this soon is queried as well: it may wait for the one that is late now
_PAUSE_NS = 3 * _S  # not called for this long: the job or the machine was suspended, and the ranks with it
_LOOKS_OUTSIDE = 4  # at collectives of ranks that are not in training steps, within the time that one may take
_KINDS = ("stopped", "data", "user code", "unknown")


@dataclass(frozen=True, kw_only=True)
class Stall:
    rank: int
    step: int  # the last finished step of the rank
    where: str
    kind: Activity
    late_s: float  # since its last heartbeat
    deadline_s: float
    waiting: tuple[int, ...]  # ranks of this node that wait for it
    stack: str  # all of its threads, as faulthandler writes them
    stack_path: str
    collective: str = ""  # the collective in which they wait, if it is NCCL's


@dataclass(frozen=True)
class HangFinding:
    """The whereabouts of one rank whose stacks were requested."""

    rank: int
    step: int
    standing: Whereabouts
    is_late: bool = True  # False: it is about to be late


def deadline_s(slowest_ns: int, timeout_s: float | None, collective_s: float = math.inf) -> float:
    """The timeout of a step; if possible below `collective_s`, after which NCCL ends the ranks that wait.

    >>> deadline_s(2_000_000_000, None), deadline_s(1_000_000, None), deadline_s(2_000_000_000, 3.0)
    (40.0, 10.0, 3.0)
    >>> deadline_s(100_000_000_000, None, 600.0), deadline_s(400_000_000_000, None, 600.0)
    (540.0, 800.0)
    """
    if timeout_s is not None:
        return timeout_s
    slowest_s = slowest_ns / _S
    return min(max(_SHORTEST_S, _STEPS * slowest_s), max(2 * slowest_s, 0.9 * collective_s))


def choose(
    findings: Sequence[HangFinding], others_may_explain: bool, is_second: bool
) -> tuple[int, Whereabouts] | None:
    """The rank that hangs and its whereabouts; None while that cannot be decided.

    `others_may_explain`: all may wait for a rank that has no deadline now, or has time left. `is_second`: twice the
    deadline has passed. Of ranks that do not wait, the one with the fewest steps blocks the others: a rank that waits
    on its GPU may seem to compute, but is never behind the rank that it waits for.
    """
    late = [finding for finding in findings if finding.is_late]
    active = [found for found in late if not found.standing.waits and found.standing.kind != "compiling"]
    if active:
        stopped = [found for found in active if found.standing.kind == "stopped"]
        found = min(stopped or active, key=lambda f: (f.step, _KINDS.index(f.standing.kind), f.rank))
        return found.rank, found.standing
    if not late or others_may_explain or not all(finding.standing.waits for finding in findings):
        return None
    first = min(findings, key=lambda f: (f.step, f.rank))
    if len({finding.step for finding in findings}) > 1:
        return first.rank, first.standing
    if len({finding.standing.where for finding in findings}) > 1:
        places = ", ".join(
            f"rank {f.rank} in {f.standing.where.removeprefix('the collective ')}"
            for f in sorted(findings, key=lambda f: f.rank)
        )
        return first.rank, Whereabouts("collective", places)
    if is_second:  # the culprit may be on another node
        return first.rank, Whereabouts("unknown", first.standing.where)
    return None


class HangWatch:
    """Call `look` often: it returns at once, and a Stall once per deadline while a rank hangs."""

    def __init__(
        self,
        ranks: Sequence[Watched],
        timeout_s: float | None,
        *,
        recorders: Recorders | None = None,
        collective_s: float = math.inf,
        ends_collectives: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
        kernel: Kernel | None = None,
    ) -> None:
        """`recorders`: for ranks that may use NCCL, in whose collectives the host does not wait.
        `ends_collectives`: nothing else ends those that take longer than `collective_s`, also outside of training."""
        self._recorders, self._collective_s = recorders, collective_s
        self._ends_collectives = ends_collectives and math.isfinite(collective_s)
        self._wall_ns = wall_ns
        self._ranks = {watched.rank: watched for watched in ranks}
        self._timeout_s, self._clock_ns, self._kernel = timeout_s, clock_ns, kernel or Kernel()
        self._files: dict[int, int] = {}
        self._next = self._looked_at = 0
        self._pauses: list[tuple[int, int]] = []  # end and length, while this process itself was not running
        self._inquiries: list[StackQuery] = []
        self._compiling: dict[int, tuple[int, int]] = {}  # rank: its beat, and until when it has time
        self._judged: frozenset[tuple[int, int]] = frozenset()  # (rank, beat) of the late ranks queried already
        self._judge_again = 0
        self._halted: dict[int, int] = {}  # ranks that the kernel does not run, though no step is due: since when

    def look(self) -> Stall | None:
        now = self._clock_ns()
        if self._looked_at and now - self._looked_at > _PAUSE_NS:
            self._pauses.append((now, now - self._looked_at))
        self._looked_at = now
        if self._inquiries:
            open_ones = [inquiry for inquiry in self._inquiries if not inquiry.is_over(now)]
            if open_ones or (self._recorders is not None and not self._recorders.are_in(now)):
                return None
            inquiries, self._inquiries = self._inquiries, []
            return self._conclude(inquiries, now)
        if now < self._next:
            return None
        self._next = now + _EVERY_NS
        beats = self._beats()
        halted = self._long_halted(beats, now)
        if halted is not None:
            return halted
        late = self._late(beats, now)
        if not late or (late == self._judged and now < self._judge_again):
            return None
        asked = [rank for rank, beat in beats.items() if now + _SOON_NS > self._due(rank, beat)]
        self._inquiries = [StackQuery(self._ranks[rank], beats[rank], now, self._kernel) for rank in asked]
        if self._recorders is not None:
            running = [rank for rank in beats if self._kernel.state(self._ranks[rank].pid) not in HALTED + GONE]
            self._recorders.ask(running, now)
        return None

    def close(self) -> None:
        """Close the heartbeat files; the next `look` opens the current ones."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._inquiries = []

    def _conclude(self, inquiries: Sequence[StackQuery], now: int) -> Stall | None:
        beats = self._beats()
        late = self._late(beats, now)
        if not late:
            return None
        late_beats = {rank: beats[rank] for rank, _ in late}
        self._judged = late
        self._judge_again = now + min(map(self._deadline_ns, late_beats.values()))
        explain = {rank for rank in self._ranks if rank not in beats or beats[rank].phase is not Phase.ENDED}
        answers = {}
        for inquiry in inquiries:
            rank, beat = inquiry.watched.rank, inquiry.beat
            found = inquiry.standing()
            if found is None:
                explain.discard(rank)  # the rank has ended, which its launcher notices separately
            if found is None or rank not in beats or beats[rank].time_ns != beat.time_ns:
                continue
            explain.discard(rank)
            answers[rank] = inquiry, HangFinding(rank, beat.step, found, rank in late_beats)
            if found.kind == "compiling":
                self._compiling[rank] = (beat.time_ns, now + self._deadline_ns(beat))
        is_second = all(now - beat.time_ns > 2 * self._deadline_ns(beat) for beat in late_beats.values())
        calls = {} if self._recorders is None else self._recorders.calls()
        waits = find_waits(calls)
        if all(beat.phase is not Phase.TRAINING for beat in late_beats.values()) and not self._has_overdue(waits):
            self._judge_again = now + int(self._collective_s * _S) // _LOOKS_OUTSIDE
            return None
        findings = [replace(f, standing=standing_in(f.standing, waits.get(f.rank))) for _, f in answers.values()]
        verdict = blame_mismatch(calls, answers) or choose(findings, bool(explain), is_second)
        if verdict is None:
            return None
        rank, found = verdict
        waiting = {other: wait for other, wait in waits.items() if other != rank and rank in wait.missing}
        inquiry = answers[rank][0]
        return Stall(
            rank=rank,
            step=inquiry.beat.step,
            where=found.where,
            kind=found.kind,
            late_s=(now - inquiry.beat.time_ns) / _S,
            deadline_s=self._deadline_ns(inquiry.beat) / _S,
            waiting=tuple(sorted({f.rank for f in findings if f.rank != rank and f.standing.waits} | waiting.keys())),
            stack=inquiry.text,
            stack_path=str(inquiry.watched.stack),
            collective=next((str(wait.call) for wait in waiting.values()), ""),
        )

    def _has_overdue(self, waits: Mapping[int, Wait]) -> bool:
        """Whether a rank waits in a collective for longer than any may take; saving and evaluating may take longer."""
        since = self._wall_ns() - int(self._collective_s * _S)
        return any(wait.call.begun_ns < since for wait in waits.values())

    def _long_halted(self, beats: dict[int, Beat], now: int) -> Stall | None:
        """Find a stopped rank in any phase, because it does not save or evaluate either."""
        for rank, beat in beats.items():
            watched = self._ranks[rank]
            if beat.phase in (Phase.TRAINING, Phase.ENDED) or self._kernel.state(watched.pid) not in HALTED:
                self._halted.pop(rank, None)
                continue
            since, deadline = self._halted.setdefault(rank, now), self._step_deadline_ns(beat)
            if now - since > deadline:
                self._halted[rank] = now
                others = tuple(other for other in sorted(beats) if other != rank)
                return Stall(
                    rank=rank,
                    step=beat.step,
                    where=self._kernel.describe_halt(watched.pid),
                    kind="stopped",
                    late_s=(now - since) / _S,
                    deadline_s=deadline / _S,
                    waiting=others,
                    stack="",
                    stack_path=str(watched.stack),
                )
        return None

    def _late(self, beats: dict[int, Beat], now: int) -> frozenset[tuple[int, int]]:
        return frozenset((rank, beat.time_ns) for rank, beat in beats.items() if now > self._due(rank, beat))

    def _due(self, rank: int, beat: Beat) -> int:
        if beat.phase is Phase.ENDED or (beat.phase is not Phase.TRAINING and not self._ends_collectives):
            return 1 << 63
        compiled_at, until = self._compiling.get(rank, (0, 0))
        if compiled_at == beat.time_ns:
            return until
        paused = sum(length for end, length in self._pauses if beat.time_ns < end) if self._pauses else 0
        return beat.time_ns + self._deadline_ns(beat) + paused

    def _deadline_ns(self, beat: Beat) -> int:
        if beat.phase is not Phase.TRAINING and self._ends_collectives:
            return int(self._collective_s * _S)
        return self._step_deadline_ns(beat)

    def _step_deadline_ns(self, beat: Beat) -> int:
        return int(deadline_s(beat.slowest_ns, self._timeout_s, self._collective_s) * _S)

    def _beats(self) -> dict[int, Beat]:
        """The heartbeats of started ranks. Files are read, not mapped: a truncated mapped file kills its reader."""
        beats = {}
        for rank, watched in self._ranks.items():
            if rank not in self._files:
                try:
                    self._files[rank] = os.open(watched.heartbeat, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue
            elif os.fstat(self._files[rank]).st_nlink == 0:  # replaced: the new file is opened next time
                os.close(self._files.pop(rank))
                continue
            raw = os.pread(self._files[rank], RECORD.size, 0)
            if len(raw) == RECORD.size:
                step, time_ns, phase, slowest_ns, collective = RECORD.unpack(raw)
                beats[rank] = Beat(
                    step, time_ns, Phase(phase), slowest_ns, collective.rstrip(b"\0").decode("utf-8", "replace")
                )
        return beats
