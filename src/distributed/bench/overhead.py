"""The cost of a step over a hand-written loop: contenders take turns in rounds, each beside a bare loop of its own.

A contender's ranks run the bare loop and the contender one after the other in every round, in either order by turns,
and only these neighbours are compared: same processes, same memory layout, same second. What the machine does
meanwhile falls on both, and the median over the rounds leaves out the rounds in which it did not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from distributed.bench.contenders import BARE, BARE_AGAIN, SETUPS, Field
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.bench.turns import WaitingRanks
from distributed.core.errors import ConfigError

TARGET_US = 20.0  # what we allow ourselves over the bare loop
LOG_EVERY = 50  # steps; timed ones are a multiple, so that each turn holds the same number of logged steps

Notify = Callable[[str, int, int], None]  # (what goes on, done, in all)


@dataclass(frozen=True)
class Turn:
    """One round of one contender: µs a step, by rank."""

    bare_cpu: tuple[float, ...]
    bare_wall: tuple[float, ...]
    cpu: tuple[float, ...]
    wall: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One contender's figures in µs a step of rank 0, which also logs; medians over the rounds unless said else."""

    contender: str
    setup: str
    cpu_us: float
    wall_us: float
    over_us: float
    over_spread_us: float  # half of the distance between the quartiles
    over_best_us: float  # its best round less the bare loop's best round
    over_all_ranks_us: float  # the mean over the ranks
    ratio: float
    bare_cpu_us: float
    bare_wall_us: float


@dataclass(frozen=True)
class Overhead:
    """What `distributed bench overhead` found."""

    rows: tuple[Row, ...]
    processes: int
    steps: int
    rounds: int
    load_before: float | None
    load_after: float | None
    missing: dict[str, str]
    turns: Mapping[str, Sequence[Turn]]

    @property
    def floor_us(self) -> float:
        """How far the bare loop is from itself: no difference below this means anything."""
        row = next(row for row in self.rows if row.contender == BARE_AGAIN)
        return abs(row.over_us) + row.over_spread_us

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "overhead",
            "unit": "microseconds a step of rank 0; CPU time is that of the whole process",
            "target_over_us": TARGET_US,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"processes": self.processes, "steps": self.steps, "rounds": self.rounds, "device": "cpu"},
            "load_average": {"before": self.load_before, "after": self.load_after},
            "noise_floor_us": self.floor_us,
            "rows": [asdict(row) for row in self.rows],
            "turns": {name: [asdict(turn) for turn in turns] for name, turns in self.turns.items()},
        }


def measure_overhead(field: Field, *, processes: int, steps: int, rounds: int, notify: Notify) -> Overhead:
    """Start every contender's ranks, let them take turns, and compare."""
    if steps % LOG_EVERY:
        raise ConfigError(
            f"--steps {steps} is not a multiple of {LOG_EVERY}",
            why=f"every {LOG_EVERY}th step is logged and costs more, so all turns must hold the same number of them",
            do=f"--steps {max(1, round(steps / LOG_EVERY)) * LOG_EVERY}",
        )
    load_before = load_average()
    turns: dict[str, list[Turn]] = {name: [] for name in field.names}
    in_all = len(field.names) * (rounds + 2)
    done = 0
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        ranks: dict[str, WaitingRanks] = {}
        for name in field.names:
            notify(f"starting {name}", done, in_all)
            ranks[name] = stack.enter_context(WaitingRanks(name, processes, steps, folder))
            ranks[name].connect()
            done += 1
        for number in range(-1, rounds):  # the first is a rehearsal: imports, first calls, files
            for name in field.names:
                notify(f"round {number + 1} of {rounds}: {name}" if number >= 0 else f"rehearsing {name}", done, in_all)
                turn = _take_turn(ranks[name], name, steps, bare_first=number % 2 == 0)
                if number >= 0:
                    turns[name].append(turn)
                done += 1
        notify("done", done, in_all)
    rows = tuple(summarize(name, turns[name]) for name in field.names)
    return Overhead(rows, processes, steps, rounds, load_before, load_average(), field.missing, turns)


def _take_turn(ranks: WaitingRanks, name: str, steps: int, *, bare_first: bool) -> Turn:
    by_rank = ranks.take_turn([BARE, name] if bare_first else [name, BARE])
    pairs = [answers if bare_first else answers[::-1] for answers in by_rank]
    in_us = [[(cpu_s / steps * 1e6, wall_s / steps * 1e6) for cpu_s, wall_s in pair] for pair in pairs]
    return Turn(
        bare_cpu=tuple(bare[0] for bare, _ in in_us),
        bare_wall=tuple(bare[1] for bare, _ in in_us),
        cpu=tuple(own[0] for _, own in in_us),
        wall=tuple(own[1] for _, own in in_us),
    )


def summarize(name: str, turns: Sequence[Turn]) -> Row:
    """
    >>> turns = [Turn((100.0,), (200.0,), (110.0 + i,), (210.0,)) for i in range(3)]
    >>> row = summarize("ours", turns)
    >>> row.over_us, row.over_best_us, round(row.ratio, 2)
    (11.0, 10.0, 1.11)
    """
    over = [turn.cpu[0] - turn.bare_cpu[0] for turn in turns]
    means = [sum(turn.cpu) / len(turn.cpu) - sum(turn.bare_cpu) / len(turn.bare_cpu) for turn in turns]
    return Row(
        contender=name,
        setup=SETUPS[name],
        cpu_us=median(turn.cpu[0] for turn in turns),
        wall_us=median(turn.wall[0] for turn in turns),
        over_us=median(over),
        over_spread_us=_half_quartile_range(over),
        over_best_us=min(turn.cpu[0] for turn in turns) - min(turn.bare_cpu[0] for turn in turns),
        over_all_ranks_us=median(means),
        ratio=median(turn.cpu[0] / turn.bare_cpu[0] for turn in turns),
        bare_cpu_us=median(turn.bare_cpu[0] for turn in turns),
        bare_wall_us=median(turn.bare_wall[0] for turn in turns),
    )


def _half_quartile_range(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2
