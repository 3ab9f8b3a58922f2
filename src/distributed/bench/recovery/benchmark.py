"""What a killed rank costs, against torchrun: seconds until all train again, of a start, of a hang; and the watching.

Both sides train the same model under their own command, at the same time, and their kills are interleaved. A step waits
for its data most of the time, so that the side whose turn it is not leaves the cores alone. Both are measured alike,
from the times that their ranks log after each step of the optimizer.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from distributed.bench.machine import load_average
from distributed.bench.processes import ended_by_signals
from distributed.bench.recovery.costs import measure_in_rank, watch_supervisors
from distributed.bench.recovery.results import HANG_TIMEOUT_S, START_RANKS, Recoveries, RecoveryCost, StallFound
from distributed.bench.recovery.runs import SIDES, BenchRun, Recovery, Side, find_recovery
from distributed.core.events import RankStalled, parse_event
from distributed.core.run_dir import RunDir

_TIMEOUT_S = 120.0  # for a recovery; a longer one counts as none
_STALL_TIMEOUT_S = 20.0  # for a stuck rank to be named
_STEPS_BETWEEN = 10  # at least, from one recovery to the next kill
MOMENT_S = 0.6  # and up to so much more, by chance: more than a save and a step take

Notify = Callable[[str, int, int], None]  # (what is measured, done, in all)


def measure_recovery(
    *, kills: int, ranks: int, starts: int, stalls: int, steps: int, seed: int = 0, notify: Notify
) -> RecoveryCost:
    """Starts, kills, the watching and hangs, one after the other; both sides interleaved."""
    begun, load_before, rng = time.monotonic(), load_average(), random.Random(seed)
    in_all = 2 * starts + 2 * kills + 2 + stalls
    done = 0

    def tell(text: str) -> None:
        nonlocal done
        notify(text, done, in_all)
        done += 1

    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        starts_s = _measure_starts(folder, starts, tell)
        recoveries = _measure_recoveries(folder, kills, ranks, rng, tell)
        supervision = {}
        for side in SIDES:
            tell(f"{side}: the cost of watching")
            with BenchRun(side, ranks, os.path.join(folder, f"watched-{side}")) as run:
                supervision[side] = watch_supervisors(run, steps)
        in_rank_us = measure_in_rank(folder)
        found = _measure_stalls(folder, stalls, ranks, rng, tell)
    notify("done", in_all, in_all)
    return RecoveryCost(
        ranks=ranks,
        seed=seed,
        recoveries=recoveries,
        starts_s=starts_s,
        supervision=supervision,
        in_rank_us=in_rank_us,
        stalls=found,
        stalls_made=stalls,
        seconds=time.monotonic() - begun,
        load_before=load_before,
        load_after=load_average(),
    )


def _measure_starts(folder: str, starts: int, tell: Callable[[str], None]) -> dict[Side, list[float]]:
    taken: dict[Side, list[float]] = {side: [] for side in SIDES}
    for number in range(starts):
        for side in _interleaved(number):
            tell(f"{side}: start {number + 1} of {starts} with {START_RANKS} ranks")
            with BenchRun(side, START_RANKS, os.path.join(folder, f"start-{side}-{number}")) as run:
                taken[side].append(run.first_step_s())
    return taken


def _measure_recoveries(
    folder: str, kills: int, ranks: int, rng: random.Random, tell: Callable[[str], None]
) -> dict[Side, Recoveries]:
    runs = {side: BenchRun(side, ranks, os.path.join(folder, f"killed-{side}")) for side in SIDES}
    found: dict[Side, list[Recovery]] = {side: [] for side in SIDES}
    try:
        for run in runs.values():
            run.await_steps(_STEPS_BETWEEN)
        for number in range(kills):
            for side in _interleaved(number):
                tell(f"{side}: kill {number + 1} of {kills}")
                recovery = kill_rank(runs[side], number % ranks, rng.uniform(0, MOMENT_S))
                if recovery is not None:
                    found[side].append(recovery)
                elif number + 1 < kills:  # it is lost, and the next kill needs another
                    runs[side].close()
                    runs[side] = BenchRun(side, ranks, os.path.join(folder, f"killed-{side}-{number}"))
    finally:
        for run in runs.values():
            run.close()
    return {side: Recoveries(side, kills, tuple(found[side])) for side in SIDES}


def kill_rank(run: BenchRun, rank: int, moment_s: float) -> Recovery | None:
    """SIGKILL after some steps and a moment; what followed, or None where its world did not come back."""
    run.await_steps(_STEPS_BETWEEN)
    time.sleep(moment_s)
    pid = run.pid(rank)
    killed_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    return run.until(lambda: find_recovery(run.logs, rank, pid, killed_ns), _TIMEOUT_S)


def _measure_stalls(
    folder: str, stalls: int, ranks: int, rng: random.Random, tell: Callable[[str], None]
) -> tuple[StallFound, ...]:
    found = []
    where = os.path.join(folder, "stuck-ours")
    with BenchRun("ours", ranks, where, settings=[f"hang_timeout_s={HANG_TIMEOUT_S:g}"]) as run:
        for number in range(stalls):
            tell(f"ours: a stuck rank, {number + 1} of {stalls}")
            run.await_steps(_STEPS_BETWEEN)
            time.sleep(rng.uniform(0, MOMENT_S))
            stall = _stop(run, number % ranks)
            if stall is not None:
                found.append(stall)
    return tuple(found)


def _stop(run: BenchRun, rank: int) -> StallFound | None:
    """Stop a rank until it is named, and wait for what replaces it; None when it was not named."""
    pid, stopped_at = run.pid(rank), time.time()
    os.kill(pid, signal.SIGSTOP)
    event = run.until(lambda: _stalled_after(run, stopped_at), _STALL_TIMEOUT_S)
    if event is None or event.rank != rank:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # else it is the supervisor's to end
    if event is None:
        return None
    last_ns = max(step.time_ns for step in run.logs[rank] if step.pid == pid)
    last = time.time() - (time.monotonic_ns() - last_ns) / 1e9  # on the clock of events
    named = StallFound(event.time - last - HANG_TIMEOUT_S, event.rank == rank)
    ended = run.logs[event.rank][-1].pid
    run.until(lambda: run.logs[event.rank][-1].pid != ended or None, _TIMEOUT_S)
    return named


def _stalled_after(run: BenchRun, moment: float) -> RankStalled | None:
    try:
        with open(RunDir(run.run_dir).events, encoding="utf-8") as file:
            lines = [line for line in file if "RankStalled" in line and line.endswith("\n")]
    except FileNotFoundError:
        return None
    events = (parse_event(line) for line in lines)
    return next((event for event in events if isinstance(event, RankStalled) and event.time > moment), None)


def _interleaved(number: int) -> tuple[Side, ...]:
    """Who goes second finds the machine as the first left it: each does in every other round."""
    return SIDES if number % 2 == 0 else SIDES[::-1]
