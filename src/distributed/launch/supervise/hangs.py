"""HangWatch: finds a rank of this node that lives but does not move, and says where it stands and who waits for it.

A rank that hangs cannot be asked in words. Its heartbeat says that it is late, the kernel whether it may run at all,
and faulthandler, which every rank has registered for SIGUSR2, in which line it is — also inside of native code.
The kernel is asked through /proc: where there is none, no rank is found.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from distributed.core.heartbeat import RECORD, Beat, Phase
from distributed.launch.stacks import Standing, data_line, parse_stacks, standing

_S = 1_000_000_000
_SHORTEST_S = 10.0
_STEPS = 20  # a step may last this many times the slowest recent one
_EVERY_NS = _S // 5
_SETTLED_NS = _S // 10  # a dump that did not grow for this long is complete: faulthandler does not mark its end
_PATIENCE_NS = 2 * _S  # for a dump that does not come; a loaded machine takes its time
_WORKERS_NS = 2 * _S  # for those of all workers of the data loaders
_SOON_NS = _S  # whoever is late this soon is asked as well: it may wait for the one that is late now
_PAUSE_NS = 3 * _S  # not called for so long: the job or the machine was suspended, and the ranks with it
_KINDS = ("stopped", "data", "user code", "unknown")
_HALTED, _GONE = "Tt", "ZX"  # letters of a process's state


@dataclass(frozen=True)
class Watched:
    rank: int
    pid: int
    heartbeat: Path
    stack: Path  # where faulthandler of this rank, and of the workers that it forked, writes


@dataclass(frozen=True)
class Stall:
    rank: int
    step: int  # the last one that it finished
    where: str
    kind: str  # "user code", "data", "collective", "stopped" or "unknown"
    late_s: float  # since its last sign of life
    deadline_s: float
    waiting: tuple[int, ...]  # ranks of this node that wait for it
    stack: str  # all of its threads, as faulthandler writes them
    stack_path: str


@dataclass(frozen=True)
class Finding:
    """What is known of one rank that was asked."""

    rank: int
    step: int
    standing: Standing
    is_late: bool = True  # else it is about to be


def deadline_s(slowest_ns: int, timeout_s: float | None) -> float:
    """How long a step may last.

    >>> deadline_s(2_000_000_000, None), deadline_s(1_000_000, None), deadline_s(2_000_000_000, 3.0)
    (40.0, 10.0, 3.0)
    """
    return timeout_s if timeout_s is not None else max(_SHORTEST_S, _STEPS * slowest_ns / _S)


def choose(findings: Sequence[Finding], others_may_explain: bool, is_second: bool) -> tuple[int, Standing] | None:
    """The rank to blame and what it is at; None while nothing can be said.

    `others_may_explain`: a rank that has no deadline now, or has time left, may be what all wait for. `is_second`:
    twice the deadline has passed. Of ranks that do not wait, the one with the fewest steps holds up the others:
    a GPU's rank that waits may look as if it computed, but is never behind the one that it waits for.
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
        return first.rank, Standing("collective", places)
    if is_second:  # the culprit may be on another node
        return first.rank, Standing("unknown", first.standing.where)
    return None


class HangWatch:
    """`look` often: it returns at once, and a Stall once per deadline for as long as a rank hangs."""

    def __init__(
        self,
        ranks: Sequence[Watched],
        timeout_s: float | None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ranks = {watched.rank: watched for watched in ranks}
        self._timeout_s, self._clock_ns = timeout_s, clock_ns
        self._files: dict[int, int] = {}
        self._next = self._looked_at = 0
        self._pauses: list[tuple[int, int]] = []  # end and length, while this process itself was not running
        self._inquiries: list[_Inquiry] = []
        self._compiling: dict[int, tuple[int, int]] = {}  # rank: its beat, and until when it has time
        self._judged: frozenset[tuple[int, int]] = frozenset()  # (rank, beat) of the late ones that were asked already
        self._judge_again = 0
        self._halted: dict[int, int] = {}  # ranks that the kernel does not let run, though no step is due: since when

    def look(self) -> Stall | None:
        now = self._clock_ns()
        if self._looked_at and now - self._looked_at > _PAUSE_NS:
            self._pauses.append((now, now - self._looked_at))
        self._looked_at = now
        if self._inquiries:
            open_ones = [inquiry for inquiry in self._inquiries if not inquiry.is_over(now)]
            if open_ones:
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
        self._inquiries = [_Inquiry(self._ranks[rank], beats[rank], now) for rank in asked]
        return None

    def close(self) -> None:
        """Let go of the heartbeat files; the next `look` opens those that are there then."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._inquiries = []

    def _conclude(self, inquiries: Sequence[_Inquiry], now: int) -> Stall | None:
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
                explain.discard(rank)  # it is gone, which its launcher learns by itself
            if found is None or rank not in beats or beats[rank].time_ns != beat.time_ns:
                continue
            explain.discard(rank)
            answers[rank] = inquiry, Finding(rank, beat.step, found, rank in late_beats)
            if found.kind == "compiling":
                self._compiling[rank] = (beat.time_ns, now + self._deadline_ns(beat))
        is_second = all(now - beat.time_ns > 2 * self._deadline_ns(beat) for beat in late_beats.values())
        findings = [finding for _, finding in answers.values()]
        verdict = choose(findings, bool(explain), is_second)
        if verdict is None:
            return None
        rank, found = verdict
        inquiry = answers[rank][0]
        return Stall(
            rank=rank,
            step=inquiry.beat.step,
            where=found.where,
            kind=found.kind,
            late_s=(now - inquiry.beat.time_ns) / _S,
            deadline_s=deadline_s(inquiry.beat.slowest_ns, self._timeout_s),
            waiting=tuple(sorted(f.rank for f in findings if f.rank != rank and f.standing.waits)),
            stack=inquiry.text,
            stack_path=str(inquiry.watched.stack),
        )

    def _long_halted(self, beats: dict[int, Beat], now: int) -> Stall | None:
        """A rank that is stopped does not save or evaluate either, so it has a deadline in every phase."""
        for rank, beat in beats.items():
            watched = self._ranks[rank]
            if beat.phase in (Phase.TRAINING, Phase.ENDED) or process_state(watched.pid) not in _HALTED:
                self._halted.pop(rank, None)
                continue
            since, deadline = self._halted.setdefault(rank, now), self._deadline_ns(beat)
            if now - since > deadline:
                self._halted[rank] = now
                others = tuple(other for other in sorted(beats) if other != rank)
                where, late_s = describe_halt(watched.pid), (now - since) / _S
                return Stall(rank, beat.step, where, "stopped", late_s, deadline / _S, others, "", str(watched.stack))
        return None

    def _late(self, beats: dict[int, Beat], now: int) -> frozenset[tuple[int, int]]:
        return frozenset((rank, beat.time_ns) for rank, beat in beats.items() if now > self._due(rank, beat))

    def _due(self, rank: int, beat: Beat) -> int:
        if beat.phase is not Phase.TRAINING:
            return 1 << 63
        compiled_at, until = self._compiling.get(rank, (0, 0))
        if compiled_at == beat.time_ns:
            return until
        paused = sum(length for end, length in self._pauses if beat.time_ns < end) if self._pauses else 0
        return beat.time_ns + self._deadline_ns(beat) + paused

    def _deadline_ns(self, beat: Beat) -> int:
        return int(deadline_s(beat.slowest_ns, self._timeout_s) * _S)

    def _beats(self) -> dict[int, Beat]:
        """Of the ranks that have begun. Read, not mapped: a mapped file that is cut short ends its reader."""
        beats = {}
        for rank, watched in self._ranks.items():
            if rank not in self._files:
                try:
                    self._files[rank] = os.open(watched.heartbeat, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue
            elif os.fstat(self._files[rank]).st_nlink == 0:  # replaced: the new one is opened next time
                os.close(self._files.pop(rank))
                continue
            raw = os.pread(self._files[rank], RECORD.size, 0)
            if len(raw) == RECORD.size:
                step, time_ns, phase, slowest_ns, collective = RECORD.unpack(raw)
                beats[rank] = Beat(
                    step, time_ns, Phase(phase), slowest_ns, collective.rstrip(b"\0").decode("utf-8", "replace")
                )
        return beats


class _Inquiry:
    """One rank that is asked where it stands; what it says may send the question on to its data loader's workers."""

    def __init__(self, watched: Watched, beat: Beat, now: int) -> None:
        self.watched, self.beat = watched, beat
        self._dump = _Dump(watched.pid, watched.stack, now)
        self._found: Standing | None = None
        self._workers: list[int] | None = None  # not asked yet; None: not known whether there are any
        self._worker: _Dump | None = None
        self._workers_until = 0

    @property
    def text(self) -> str:
        return self._dump.text()

    def is_over(self, now: int) -> bool:
        if self._workers is None:
            if not self._dump.is_over(now):
                return False
            self._found = self._own_standing()
            needs_worker = self._found is not None and self._found.needs_worker
            self._workers = _children(self.watched.pid) if needs_worker else []
            self._workers_until = now + _WORKERS_NS
        return self._worker_is_found(now)

    def standing(self) -> Standing | None:
        """None when the process is gone."""
        return self._found

    def _own_standing(self) -> Standing | None:
        state = process_state(self.watched.pid)
        if state in _GONE:
            return None
        told = self._dump.text()
        halted = describe_halt(self.watched.pid) if state in _HALTED or not told else ""
        return Standing("stopped", halted) if halted else standing(parse_stacks(told), self.beat.collective)

    def _worker_is_found(self, now: int) -> bool:
        """Ask one worker after the other: they write into the same file."""
        assert self._workers is not None
        while True:
            if self._worker is not None:
                if not self._worker.is_over(now) and now < self._workers_until:
                    return False
                told = self._worker.text()
                line = data_line(parse_stacks(told)) if told else describe_halt(self._worker.pid)
                self._worker = None
                if line:
                    self._found = Standing("data", f"{line}, in a data loader worker")
                    self._workers.clear()
            if not self._workers or now >= self._workers_until:
                return True
            self._worker = _Dump(self._workers.pop(0), self.watched.stack, now)


class _Dump:
    """The stacks of one process, asked for when this is made.

    What was in the file before stays there: the process may not have opened it for appending, and would leave a hole.
    """

    def __init__(self, pid: int, path: Path, now: int) -> None:
        self.pid, self._path = pid, path
        self._begins = self._size = self._now_size()
        self._asked_at = self._grew_at = now
        self._is_asked = process_state(pid) not in _HALTED + _GONE and _answers(pid)
        if self._is_asked:
            try:
                os.kill(pid, signal.SIGUSR2)
            except ProcessLookupError:
                self._is_asked = False

    def is_over(self, now: int) -> bool:
        size = self._now_size()
        if size != self._size:
            self._size, self._grew_at = size, now
            self._begins = self._begins if size >= self._begins else 0  # emptied by somebody
        is_complete = size > self._begins and now - self._grew_at >= _SETTLED_NS
        return not self._is_asked or is_complete or now - self._asked_at >= _PATIENCE_NS

    def text(self) -> str:
        if not self._is_asked or self._size <= self._begins:
            return ""
        with self._path.open("rb") as file:
            file.seek(self._begins)
            return file.read(self._size - self._begins).replace(b"\0", b"").decode(errors="replace")

    def _now_size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def process_state(pid: int) -> str:
    """The kernel's letter: R runs, S sleeps, D sleeps and cannot be woken, T is stopped, t is traced; X is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # the name may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def describe_halt(pid: int) -> str:
    """Why the kernel does not let a process run; "" when it does."""
    state = process_state(pid)
    if state == "D":
        try:
            inside = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        except OSError:
            inside = ""
        return "uninterruptible sleep (D)" + (f" in the kernel's {inside}" if inside else "")
    return {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger"}.get(state, "")


def _answers(pid: int) -> bool:
    """Whether it handles SIGUSR2. It would end a process that does not, such as a program that a rank has started."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGUSR2 - 1) & 1)


def _children(pid: int) -> list[int]:
    """The processes that a rank has forked: they run the same program and write to the same file."""
    try:
        rank = psutil.Process(pid)
        exe = os.readlink(f"/proc/{pid}/exe")
        return [child.pid for child in rank.children() if os.readlink(f"/proc/{child.pid}/exe") == exe]
    except (psutil.Error, OSError):
        return []
