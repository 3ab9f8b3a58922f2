"""The cost of a step over a hand-written loop: contenders are interleaved, each beside a bare loop.

A contender's ranks run the bare loop and the contender one after the other in every round, in alternating order, and
only these neighbours are compared: same processes, same memory layout, same second. What the machine does meanwhile
falls on both, and the median over the rounds leaves out the rounds in which it did not. Beside what has something added
to our Trainer, our plain Trainer takes the place of the bare loop.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.suite.overhead.contenders import BARE_AGAIN, OURS, SETUPS, Contenders, neighbour_of
from benchmarks.suite.overhead.workload import BLOCK, Reading
from distributed.bench.interleave import WaitingRanks, median_error, room_for
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.core.errors import ConfigError

TARGET_US = 20.0  # what we allow ourselves over the bare loop
FEATURE_US = 10.0  # and for a step, a callback or a loop of the user's own

Notify = Callable[[str, int, int], None]  # (what goes on, done, in all)


@dataclass(frozen=True)
class Turn:
    """One round of one contender: readings by rank."""

    bare: tuple[Reading, ...]  # of whom it is compared with
    own: tuple[Reading, ...]

    def over(self, rank: int, figure: str) -> float:
        """How much more of a figure the contender took than the bare loop beside it."""
        return float(getattr(self.own[rank], figure) - getattr(self.bare[rank], figure))


@dataclass(frozen=True)
class Row:
    """One contender's figures in µs a step of rank 0, which also logs; medians over the rounds unless said else.

    `over_us` compares the CPU time of Python's threads. A trainer's own work is all there; gloo's threads do the same
    for everybody, take as much again, and more or less of it by how the ranks happen to wait for each other.
    """

    contender: str
    setup: str
    cpu_us: float  # the whole process
    python_us: float  # its Python threads
    wall_us: float
    over_us: float
    over_error_us: float  # standard error of that median
    over_best_us: float  # its cheapest 50 steps less those of the bare loop: what noise, which only adds, left alone
    over_process_us: float  # the same as over_us for the whole process
    over_process_error_us: float
    beside: str  # whom all that is over is over: the bare loop, or ours
    ratio: float  # of the Python threads' time
    bare_cpu_us: float
    bare_python_us: float
    bare_wall_us: float


@dataclass(frozen=True)
class Overhead:
    """What the overhead benchmark found."""

    rows: tuple[Row, ...]
    processes: int
    steps: int
    rounds: int
    load_before: float | None
    load_after: float | None
    missing: dict[str, str]
    turns: Mapping[str, Sequence[Turn]]
    engine: str = "pytorch-ddp"

    @property
    def floor_us(self) -> float:
        """How far the bare loop is from itself: no difference below this means anything."""
        row = next(row for row in self.rows if row.contender == BARE_AGAIN)
        return abs(row.over_us) + row.over_error_us

    @property
    def limit_us(self) -> float:
        """What we allow ourselves."""
        return FEATURE_US if any(row.beside == OURS for row in self.rows) else TARGET_US

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "overhead",
            "unit": "microseconds a step of rank 0; over_us: CPU time of Python's threads against that of beside",
            "target_over_us": self.limit_us,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {
                "processes": self.processes,
                "steps": self.steps,
                "rounds": self.rounds,
                "device": "cpu",
                "engine": self.engine,
            },
            "load_average": {"before": self.load_before, "after": self.load_after},
            "noise_floor_us": self.floor_us,
            "rows": [asdict(row) for row in self.rows],
            "turns": {name: [_rounded(turn) for turn in turns] for name, turns in self.turns.items()},
        }


def measure_overhead(contenders: Contenders, *, processes: int, steps: int, rounds: int, notify: Notify) -> Overhead:
    """Start every contender's ranks, let them take turns, and compare."""
    if steps % BLOCK:
        raise ConfigError(
            f"--steps {steps} is not a multiple of {BLOCK}",
            why=f"every {BLOCK}th step is logged and costs more, so all turns must hold the same number of them",
            do=f"--steps {max(1, round(steps / BLOCK)) * BLOCK}",
        )
    load_before = load_average()
    turns: dict[str, list[Turn]] = {name: [] for name in contenders.names}
    in_all = len(contenders.names) * (rounds + 2)
    done = 0
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        notify("starting", done, in_all)
        stack.enter_context(room_for(contenders.engine, processes * len(contenders.names)))
        ranks: dict[str, WaitingRanks] = {}
        for name in contenders.names:
            notify(f"starting {name}", done, in_all)
            command = ("benchmarks.suite.overhead.rank", str(steps), contenders.engine)
            waiting = WaitingRanks(name, ranks=processes, command=command, folder=folder, engine=contenders.engine)
            ranks[name] = stack.enter_context(waiting)
            ranks[name].connect()
            done += 1
        for number in range(-1, rounds):  # the first is a rehearsal: imports, first calls, files
            for name in contenders.names:
                notify(f"round {number + 1} of {rounds}: {name}" if number >= 0 else f"rehearsing {name}", done, in_all)
                turn = _take_turn(ranks[name], name, bare_first=number % 2 == 0)
                if number >= 0:
                    turns[name].append(turn)
                done += 1
        notify("done", done, in_all)
    rows = tuple(summarize(name, turns[name]) for name in contenders.names)
    return Overhead(
        rows=rows,
        processes=processes,
        steps=steps,
        rounds=rounds,
        load_before=load_before,
        load_after=load_average(),
        missing=contenders.missing,
        turns=turns,
        engine=contenders.engine,
    )


def _take_turn(ranks: WaitingRanks, name: str, *, bare_first: bool) -> Turn:
    other = neighbour_of(name)
    answers = ranks.ask([other, name] if bare_first else [name, other])
    by_rank = [[Reading(*figures) for figures in answer] for answer in answers]
    bare, own = (0, 1) if bare_first else (1, 0)
    return Turn(tuple(readings[bare] for readings in by_rank), tuple(readings[own] for readings in by_rank))


def summarize(name: str, turns: Sequence[Turn]) -> Row:
    """
    >>> own = [Reading(110.0, 210.0, 60.0 + i, 59.0 + i) for i in range(3)]
    >>> row = summarize("ours", [Turn((Reading(100.0, 200.0, 50.0, 49.0),), (reading,)) for reading in own])
    >>> row.over_us, row.over_best_us, row.over_process_us, round(row.ratio, 2)
    (11.0, 10.0, 10.0, 1.22)
    """
    over = [turn.over(0, "python_us") for turn in turns]
    over_process = [turn.over(0, "cpu_us") for turn in turns]
    best_bare = min(turn.bare[0].best_python_us for turn in turns)
    best_own = min(turn.own[0].best_python_us for turn in turns)
    return Row(
        contender=name,
        setup=SETUPS[name],
        cpu_us=median(turn.own[0].cpu_us for turn in turns),
        python_us=median(turn.own[0].python_us for turn in turns),
        wall_us=median(turn.own[0].wall_us for turn in turns),
        over_us=median(over),
        over_error_us=median_error(over),
        over_best_us=best_own - best_bare,
        over_process_us=median(over_process),
        over_process_error_us=median_error(over_process),
        beside=neighbour_of(name),
        ratio=median(turn.own[0].python_us / turn.bare[0].python_us for turn in turns),
        bare_cpu_us=median(turn.bare[0].cpu_us for turn in turns),
        bare_python_us=median(turn.bare[0].python_us for turn in turns),
        bare_wall_us=median(turn.bare[0].wall_us for turn in turns),
    )


def _rounded(turn: Turn) -> dict[str, list[dict[str, float]]]:
    """By rank, as names and numbers."""
    sides = {"bare": turn.bare, "own": turn.own}
    return {
        side: [{name: round(figure, 1) for name, figure in reading._asdict().items()} for reading in readings]
        for side, readings in sides.items()
    }
