"""What a checkpoint costs: the loop's stall against a plain copy of the same bytes, and what a second one writes."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from distributed.bench.checkpoint.copying import change, copy_into, copy_plainly, empty_like
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.core.choices import Device
from distributed.core.env import WorkerEnv
from distributed.runtime.session import Session

Notify = Callable[[str, int, int], None]
TARGET_STALL = 1.5  # times a plain clone, on a CPU
TARGET_STALL_GPU = 1.2  # times a copy to pinned host memory
TARGET_SECOND = 0.10  # of the bytes, when a twentieth of them changed

Reading = tuple[float, float | None, float | None]  # seconds of stall, seconds until it is on disk, MiB written
Times = dict[str, list[Reading]]


@dataclass(frozen=True)
class Copying:
    """One way to put the state somewhere: how long the loop stands still, and when it is on disk."""

    name: str
    stall_s: float
    total_s: float | None = None
    written_mib: float | None = None


@dataclass(frozen=True)
class RankCost:
    """Medians of one rank of several, over its own shard."""

    rank: int
    shard_mib: float
    copy_s: float
    save_s: float
    ratio: float


@dataclass(frozen=True)
class CheckpointCost:
    """Where several ranks hold the state, a row has the slowest of them in each round."""

    device: Device
    state_mib: float  # of all ranks together
    rounds: int
    rows: tuple[Copying, ...]
    load_before: float | None
    load_after: float | None
    processes: int = 1
    shared_gpus: int = 0  # that several ranks use together; 0: each rank has its own
    ranks: tuple[RankCost, ...] = ()  # of a sharded model
    manifest_later_s: float | None = None  # the least from the end of the last rank's stall to the manifest

    def row(self, name: str) -> Copying:
        return next(row for row in self.rows if row.name == name)

    @property
    def stall_ratio(self) -> float:
        return self.row("save").stall_s / self.row("copy").stall_s

    @property
    def limit(self) -> float:
        return TARGET_STALL if self.device == "cpu" else TARGET_STALL_GPU

    @property
    def largest_ratio(self) -> float:
        """Of a rank's stall to its own copy."""
        return max((rank.ratio for rank in self.ranks), default=self.stall_ratio)

    @property
    def second_part(self) -> float:
        return (self.row("save, 5 % changed").written_mib or 0.0) / self.state_mib

    def to_dict(self) -> dict[str, Any]:
        several = {"strategy": "fsdp", "backend": "gloo" if self.device == "cpu" else "nccl"} if self.ranks else {}
        return {
            "benchmark": "checkpoint",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"device": self.device, "processes": self.processes} | several,
            "limits": {"stall": self.limit, "second": TARGET_SECOND},
            "stall_ratio": self.stall_ratio,
            "largest_ratio_of_a_rank": self.largest_ratio,
            "second_part": self.second_part,
        } | asdict(self)


def measure_checkpoint(
    *, mebibytes: int, rounds: int, device: Device = "cpu", peers: bool = True, notify: Notify = lambda *_: None
) -> CheckpointCost:
    """All ways, interleaved, on the same state, the median of the rounds."""
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    tensors = {f"layer.{n}": torch.randn(4 * 2**20, device=place) for n in range(mebibytes // 16)}
    load_before = load_average()
    times: Times = {}
    work = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    session, staging = Session(WorkerEnv(), place, None), TensorStaging(pinned=place.type == "cuda")
    saver = Saver(str(work / "ours"), session, staging, keep_last=1, guard_s=0.0)
    saver.prepare({"model": tensors}, {})
    pinned = empty_like(tensors, pinned=True) if device == "cuda" else []
    try:
        for number in range(rounds):
            notify("saving", number, rounds)
            _note(times, "copy", _timed(lambda: copy_into(pinned, tensors) if pinned else copy_plainly(tensors), place))
            for name, step in (("save", 2 * number + 1), ("save, 5 % changed", 2 * number + 2)):
                change(tensors, 1.0 if name == "save" else 0.05)
                stall = _timed(lambda step=step: saver.save(step, {"model": tensors}, {}, {}), place)  # type: ignore[misc]
                saver.wait()
                saved = saver.last_saved
                assert saved is not None
                _note(times, name, stall, saved.seconds, saved.written_bytes / 2**20)
            if peers and device == "cpu":
                _measure_peers(tensors, work, times)
    finally:
        saver.close()
        shutil.rmtree(work, ignore_errors=True)
    rows = tuple(_row(name, taken) for name, taken in times.items())
    return CheckpointCost(device, mebibytes, rounds, rows, load_before, load_average())


def _row(name: str, taken: list[Reading]) -> Copying:
    stalls, totals, written = zip(*taken, strict=True)
    return Copying(name, statistics.median(stalls), _median(totals), _median(written))


def _measure_peers(tensors: dict[str, torch.Tensor], work: Path, times: Times) -> None:
    _note(times, "torch.save", *[_timed(lambda: torch.save(tensors, work / "plain.pt"))] * 2)
    folder = str(work / f"dcp-{len(times['torch.save'])}")
    _note(times, "dcp.save", *[_timed(lambda: dcp.save(tensors, checkpoint_id=folder, no_dist=True))] * 2)
    begun = time.perf_counter()
    target = str(work / f"dcp-async-{len(times['dcp.save'])}")
    future = dcp.async_save(tensors, checkpoint_id=target, no_dist=True)
    stall = time.perf_counter() - begun
    future.result()  # type: ignore[union-attr]
    _note(times, "dcp.async_save", stall, time.perf_counter() - begun)


def _timed(work: Callable[[], object], place: torch.device | None = None) -> float:
    if place is not None and place.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _note(times: Times, name: str, stall: float, total: float | None = None, written: float | None = None) -> None:
    times.setdefault(name, []).append((stall, total, written))


def _median(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
