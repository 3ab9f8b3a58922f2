"""What the throughput of a user's own training came to: with N ranks, against one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median, quantiles
from typing import Any

from distributed.bench.machine import describe_machine, describe_versions
from distributed.core.choices import Device


@dataclass(frozen=True)
class ScriptTurn:
    """One run of the script, as its events say it."""

    samples_per_second: float  # over the timed steps
    global_batch: int
    loss: float  # the last one


@dataclass(frozen=True)
class ScriptRow:
    """The runs with one number of ranks: medians over the rounds, with their quartiles."""

    processes: int
    global_batch: int
    samples_per_second: float
    low: float
    high: float
    step_ms: float
    speed_up: float  # over one rank
    efficiency: float  # of the speed-up, for each rank
    loss: float
    rounds: tuple[float, ...]  # samples a second


@dataclass(frozen=True)
class ScriptThroughput:
    """What `distributed bench throughput --script` found so far."""

    script: str
    settings: tuple[str, ...]  # those of the command line, without secrets
    rows: tuple[ScriptRow, ...]
    steps: int
    warm: int
    rounds: int
    device: Device
    devices: int  # GPUs, or cores
    load_before: float | None
    load_after: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "script",
            "unit": "samples a second of all ranks, in the timed steps; medians over the rounds with quartiles",
            **_where_and_what(),
            "settings": {"device": self.device, "given": list(self.settings)},
            "devices": self.devices,
            "script": self.script,
            "steps": self.steps,
            "warm": self.warm,
            "rounds": self.rounds,
            "load_average": {"before": self.load_before, "after": self.load_after},
            "rows": [asdict(row) for row in self.rows],
        }


def summarize_turns(turns: Mapping[int, Sequence[ScriptTurn]]) -> tuple[ScriptRow, ...]:
    """By number of ranks, one of which is 1.

    >>> one, two = ScriptTurn(100.0, 32, 0.5), ScriptTurn(150.0, 64, 0.4)
    >>> [(row.processes, row.speed_up, row.efficiency) for row in summarize_turns({1: [one], 2: [two]})]
    [(1, 1.0, 1.0), (2, 1.5, 0.75)]
    """
    alone = median(turn.samples_per_second for turn in turns[1])
    return tuple(_row(number, own, alone) for number, own in sorted(turns.items()) if own)


def _row(processes: int, turns: Sequence[ScriptTurn], alone: float) -> ScriptRow:
    rates = tuple(turn.samples_per_second for turn in turns)
    rate = median(rates)
    low, _, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (rate, rate, rate)
    return ScriptRow(
        processes,
        global_batch=turns[-1].global_batch,
        samples_per_second=rate,
        low=low,
        high=high,
        step_ms=turns[-1].global_batch / rate * 1e3,
        speed_up=rate / alone,
        efficiency=rate / alone / processes,
        loss=turns[-1].loss,
        rounds=rates,
    )


@cache
def _where_and_what() -> dict[str, Any]:
    """Asked once: results are written after each turn."""
    return {"machine": describe_machine(), "versions": describe_versions()}
