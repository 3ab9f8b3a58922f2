"""The same on a model that several ranks hold in parts: what training waits for is the slowest of them."""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

from distributed.bench.checkpoint.benchmark import CheckpointCost, Copying, Notify, RankCost
from distributed.bench.interleave import WaitingRanks
from distributed.bench.machine import load_average
from distributed.core.choices import Device
from distributed.core.errors import ConfigError
from distributed.planner.hardware import probe_hardware

SAVES = ("save", "save, 5 % changed")
Answers = list[dict[str, Any]]  # by rank


def measure_sharded(
    processes: int, *, mebibytes: int, rounds: int, device: Device, notify: Notify = lambda *_: None
) -> CheckpointCost:
    """All ways on N ranks of FSDP, interleaved: a rank copies its own shard, and saves it."""
    gpus = len(probe_hardware().gpus) if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda", why="this machine has no GPU", do="--device cpu")
    shared = gpus if gpus < processes else 0
    # A clone takes new memory where the allocator has given it back, which may be most of what it costs.
    ways = ("copy", *SAVES) if device == "cuda" else ("copy", "copy, memory kept", *SAVES, "dcp.async_save")
    load_before, turns = load_average(), len(ways) * (rounds + 1)
    taken: dict[str, list[Answers]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", ignore_cleanup_errors=True) as folder:
        command = ("distributed.bench.checkpoint.rank", device, str(mebibytes), folder)
        with WaitingRanks(
            "checkpoint", ranks=processes, command=command, folder=folder, device=device, shared_gpus=shared
        ) as waiting:
            notify("starting", 0, turns)
            waiting.connect()
            shards = [found["shard_mib"] for found in waiting.ask("describe")]
            for number in range(-1, rounds):  # the first is a rehearsal: memory is mapped, connections are made
                for place, way in enumerate(ways):
                    notify(way, (number + 1) * len(ways) + place, turns)
                    answers = waiting.ask(way)
                    if number >= 0:
                        taken[way].append(answers)
    return CheckpointCost(
        device,
        round(sum(shards)),
        rounds,
        tuple(_row(way, turns) for way, turns in taken.items()),
        load_before,
        load_average(),
        processes=processes,
        shared_gpus=shared,
        ranks=tuple(_rank(rank, mib, taken) for rank, mib in enumerate(shards)),
        manifest_later_s=min(_later(turn) for way in SAVES for turn in taken[way]),
    )


def _row(way: str, turns: list[Answers]) -> Copying:
    """Of each round the slowest rank, for which the others wait."""
    stalls = [max(rank["stall_s"] for rank in turn) for turn in turns]
    totals = [max(rank["total_s"] for rank in turn) for turn in turns if "total_s" in turn[0]]
    written = [turn[0]["written_mib"] for turn in turns if "written_mib" in turn[0]]
    return Copying(
        way,
        statistics.median(stalls),
        statistics.median(totals) if totals else None,
        statistics.median(written) if written else None,
    )


def _rank(rank: int, mebibytes: float, taken: dict[str, list[Answers]]) -> RankCost:
    copy, save = (statistics.median(turn[rank]["stall_s"] for turn in taken[way]) for way in ("copy", "save"))
    return RankCost(rank, shard_mib=mebibytes, copy_s=copy, save_s=save, ratio=save / copy)


def _later(turn: Answers) -> float:
    """How long after every rank trains again a save's manifest was there."""
    published: float = turn[0]["published"]
    return published - max(rank["ended"] for rank in turn)
