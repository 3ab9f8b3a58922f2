"""Short trials before a run: which learning rate it should begin with, and the largest batch that its devices hold.

Each trial is a run of its own: in new processes, with copies of the model, the optimizer and the data, in a folder of
its own, without checkpoints. So nothing of the caller's changes, and a trial may run out of memory.
"""

from __future__ import annotations

import json
import math
import re
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distributed.checkpoint.restore.rng import restore_rng, rng_state
from distributed.core.config import DistributedConfig, build_config
from distributed.core.env import worker_env
from distributed.core.errors import PlanError, RankFailedError, TaskError
from distributed.core.run_dir import RunDir
from distributed.observe.charts import why_not_drawn
from distributed.runtime.host_memory import free_host_memory
from distributed.train.callbacks.callback import Callback
from distributed.train.callbacks.probes import MemoryPeak, RateSweep
from distributed.trainers.finding.rate_curve import LearningRateCurve
from distributed.trainers.fitting import FitRequest, fit_alone

_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|CUDA out of memory|can't allocate memory|not enough memory")
# Settings of the run itself, which a trial has otherwise.
_OF_RUNS = {
    "checkpoint_dir", "checkpoint_frequency", "keep_last", "keep_every", "keep_best", "keep_best_k", "allow_change",
    "resume_from_checkpoint", "resume_hyperparameters", "certificate_steps", "sample_ledger", "run_dir", "tensorboard",
    "tensorboard_dir", "mlflow_tracking", "mlflow_experiment", "mlflow_tracking_uri", "csv", "epochs", "max_steps",
    "max_time", "max_restarts", "progress", "log_every_n_steps", "lr_schedule", "warmup_steps", "warmup_epochs",
    "min_lr_ratio", "on_nan", "scheduler_metric", "val_check_interval", "sanity_val_steps", "limit_val_batches",
    "limit_train_batches", "overfit_batches", "fast_dev_run", "detect_anomaly", "slow_rank", "slow_rank_wait_s",
}  # fmt: skip
_SOURCE = "a trial before the run"
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class BatchSizes:
    """What `Trainer.find_batch_size` has tried: the most memory that a rank took, by samples a device; None: too much.

    >>> print(BatchSizes({8: 100 << 20, 16: 180 << 20, 32: None}, limit_bytes=200 << 20))
    batch_size 16: a rank takes 180 MiB of 200 MiB
    """

    tried: Mapping[int, int | None]
    limit_bytes: int  # for each rank

    @property
    def largest(self) -> int | None:
        """The largest that has fitted; None: not even the first."""
        return max((size for size, peak in self.tried.items() if peak is not None), default=None)

    def __str__(self) -> str:
        size = self.largest
        if size is None:
            return f"not even batch_size {min(self.tried)} fits into {self.limit_bytes >> 20} MiB"
        return f"batch_size {size}: a rank takes {(self.tried[size] or 0) >> 20} MiB of {self.limit_bytes >> 20} MiB"


def find_learning_rate(request: FitRequest, low: float, high: float, steps: int) -> LearningRateCurve:
    """See `Trainer.find_learning_rate`."""
    if not 0 < low < high or steps < 10:
        raise TaskError(
            f"find_learning_rate(low={low}, high={high}, steps={steps})",
            why="rates grow from low to high, and a curve needs some of them",
            do="find_learning_rate(train_loader, low=1e-7, high=10.0, steps=100)",
        )
    settings = {"max_steps": steps, "epochs": steps, "log_every_n_steps": 1, "on_nan": "continue"}
    with tempfile.TemporaryDirectory(prefix="distributed-") as folder:
        found = _try(request, folder, settings, RateSweep(low, high, steps))[0]
    return LearningRateCurve(tuple(found["rates"]), tuple(found["losses"]))


def find_batch_size(request: FitRequest, start: int, steps: int, limit_bytes: int | None) -> BatchSizes:
    """See `Trainer.find_batch_size`."""
    if start < 1 or steps < 1:
        raise TaskError(
            f"find_batch_size(start={start}, steps={steps})",
            why="a size and a number of steps are at least 1",
            do="start=1, steps=1",
        )
    search = _SizeSearch(request, steps, limit_bytes)
    search.grow(start)
    search.bisect()
    return BatchSizes(dict(sorted(search.tried.items())), search.limit)


def show(what: str, request: FitRequest) -> None:
    """Print what `distributed find` wants of a script: "learning_rate", with a picture, or "batch_size"."""
    if what == "batch_size":
        print(find_batch_size(request, 1, 3, None), flush=True)
        return
    curve = find_learning_rate(request, 1e-7, 10.0, 100)
    missing, picture = why_not_drawn(), "learning-rate.svg"
    if not missing:
        curve.save_picture(picture)
    print(f"{curve}\npicture: {picture if not missing else f'needs {missing}'}", flush=True)


class _SizeSearch:
    """Trials of growing batches, then of sizes between the largest that fits and the smallest that does not."""

    def __init__(self, request: FitRequest, steps: int, limit_bytes: int | None) -> None:
        self._request, self._steps, self._limit_bytes = request, steps, limit_bytes
        self.tried: dict[int, int | None] = {}  # the most that a rank took; None: too much
        self.limit = limit_bytes or 2**63
        samples = request.train.samples
        self._most = 2**30 if samples is None else samples

    def grow(self, start: int) -> None:
        self._most = max(self._most, start)
        size = start
        while size <= self._most and self._fits(size):
            size *= 2

    def bisect(self) -> None:
        """To an eighth of the size."""
        while True:
            fits = max((size for size, peak in self.tried.items() if peak is not None), default=0)
            fails = min((size for size, peak in self.tried.items() if peak is None), default=self._most + 1)
            middle = (fits + fails) // 2
            if not fits or fails - fits <= max(1, fits // 8) or middle in self.tried or middle > self._most:
                return
            self._fits(middle)

    def _fits(self, size: int) -> bool:
        self.tried[size] = peak = self._measure(size)
        return peak is not None

    def _measure(self, size: int) -> int | None:
        """One trial, unless it is sure to take too much of the host's memory, where a kernel would end others."""
        config = _config(self._request.config, {"batch_size": size})
        plan = replace(self._request, config=config).plan("")
        on_gpu = plan.device == "cuda"
        free = _gpu_memory() if on_gpu else int(0.9 * free_host_memory()) // plan.ranks_per_node
        self.limit = min(self.limit, free)
        if self._foreseen(size) > self.limit and (self._limit_bytes is not None or not on_gpu):
            return None
        settings = {"max_steps": self._steps, "epochs": self._steps, "batch_size": size}
        try:
            with tempfile.TemporaryDirectory(prefix="distributed-") as folder:
                found = _try(self._request, folder, settings, MemoryPeak())
        except RankFailedError as failed:
            if _is_of_memory(failed):
                return None
            raise
        peak = max(one["peak_bytes"] for one in found)
        return peak if self._limit_bytes is None or peak <= self._limit_bytes else None

    def _foreseen(self, size: int) -> int:
        """What a larger batch will take, by the line through the last two that were measured."""
        known = sorted((other, peak) for other, peak in self.tried.items() if peak is not None and other < size)
        if len(known) < 2:
            return known[0][1] if known else 0
        (small, low), (large, high) = known[-2:]
        return round(high + (high - low) / (large - small) * (size - large))


def _try(request: FitRequest, folder: str, settings: dict[str, Any], callback: Callback) -> list[dict[str, Any]]:
    """What the ranks of a trial have written down, in their order."""
    _refuse_world()
    run_dir = str(Path(folder) / "run")
    config = _config(request.config, settings | {"run_dir": run_dir, "progress": False, "max_restarts": 0})
    before = rng_state(_HOST)
    try:
        callbacks = (*request.task.callbacks, callback)
        history = fit_alone(replace(request, config=config, evaluation={}, callbacks=callbacks, is_trial=True))
    finally:
        restore_rng(before, _HOST)
    paths = [RunDir(run_dir).probe(rank) for rank in range(history.world_size)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def _config(config: DistributedConfig, settings: Mapping[str, Any]) -> DistributedConfig:
    """That of the run to come, without what belongs to the run itself."""
    given = {name: value for name, value in config.given_values().items() if name not in _OF_RUNS}
    sources = {name: config.source(name) for name in given}
    return build_config([(given, "", sources), (settings, _SOURCE, {})])


def _refuse_world() -> None:
    world = worker_env()
    if world is not None:
        raise PlanError(
            f"a trial before the run, in a rank that {world.launcher} has started",
            why="trials start ranks of their own, which may run out of memory",
            do="distributed find learning_rate --script train.py, or find batch_size; or call it in a plain script",
        )


def _is_of_memory(failed: RankFailedError) -> bool:
    return bool(_MEMORY.search(f"{failed}\n{failed.traceback}")) or failed.exit_code == -signal.SIGKILL


def _gpu_memory() -> int:
    """Of the smallest GPU, but for what its context and other libraries take."""
    return math.floor(0.95 * min(torch.cuda.mem_get_info(device)[1] for device in range(torch.cuda.device_count())))
