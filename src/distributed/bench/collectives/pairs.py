"""What a message costs between any two ranks: a matrix that shows a slow link among many."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from distributed.bench.collectives.benchmark import Notify, calls_of, place_ranks, waiting_ranks
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.core.choices import Collectives

SMALL, LARGE = 8, 2**22
Pair = tuple[int, int]


@dataclass(frozen=True)
class PairTimes:
    """By the lower and the higher rank of each pair: a message there and back takes both directions alike."""

    gb_s: dict[Pair, float]
    latency_us: dict[Pair, float]
    small_bytes: int
    large_bytes: int
    backend: str
    processes: int
    rounds: int
    load_before: float | None
    load_after: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "pairs",
            "unit": "microseconds of a small message, 10^9 bytes a second of a large one; half of there and back",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"backend": self.backend, "processes": self.processes, "rounds": self.rounds},
            "load_average": {"before": self.load_before, "after": self.load_after},
            "small_bytes": self.small_bytes,
            "large_bytes": self.large_bytes,
            "rows": [
                {"name": f"{low} – {high}", "ranks": [low, high], "latency_us": us, "gb_s": self.gb_s[low, high]}
                for (low, high), us in self.latency_us.items()
            ],
        }


def measure_pairs(
    processes: int | None,
    *,
    rounds: int,
    notify: Notify,
    small: int = SMALL,
    large: int = LARGE,
    backend: Collectives | None = None,
    iterations: int | None = None,
) -> PairTimes:
    """One pair after the other, so that no other message is on its way."""
    ranks, device = place_ranks(processes, backend)
    turns = [(pair, size) for pair in combinations(range(ranks), 2) for size in (small, large)]
    load_before, in_all = load_average(), len(turns) * (rounds + 1)
    taken: dict[tuple[Pair, int], list[float]] = {turn: [] for turn in turns}
    with waiting_ranks(ranks, device) as waiting:
        notify("starting", 0, in_all)
        waiting.connect()
        for number in range(-1, rounds):
            for place, ((source, target), size) in enumerate(turns):
                notify(f"ranks {source} and {target}", (number + 1) * len(turns) + place, in_all)
                calls = 1 if number < 0 else iterations or calls_of(size)
                answers = waiting.ask({"source": source, "target": target, "size": size, "calls": calls})
                if number >= 0:
                    taken[(source, target), size].append(answers[source]["seconds"])
    return PairTimes(
        {pair: round(large / median(taken[pair, large]) / 1e9, 6) for pair, size in turns if size == large},
        {pair: median(taken[pair, small]) * 1e6 for pair, size in turns if size == small},
        small_bytes=small,
        large_bytes=large,
        backend="nccl" if device == "cuda" else "gloo",
        processes=ranks,
        rounds=rounds,
        load_before=load_before,
        load_after=load_average(),
    )
