"""One side of the tuning benchmark, in a process of its own: it searches, and tells how long that took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.suite.tuning.trial import our_trial, ray_trial

RATES = (1e-4, 1e-1)
WALL = "wall"  # a file with the seconds that a search took


def search_locally(space: dict[str, Any], trials: int, parallel: int, folder: str) -> float:
    return _search(space, trials, parallel, folder, "local")


def search_on_ray(space: dict[str, Any], trials: int, parallel: int, folder: str) -> float:
    _start_ray(parallel)
    return _search(space, trials, parallel, folder, "ray")


def search_with_ray_tune(space: dict[str, Any], trials: int, parallel: int, folder: str) -> float:
    """By hand, as Ray's own guide has it."""
    from ray import tune

    _start_ray(parallel)
    began = time.perf_counter()
    tuner = tune.Tuner(
        tune.with_resources(ray_trial, {"cpu": 1}),
        param_space=space | {"learning_rate": tune.loguniform(*RATES)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=trials),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    tuner.fit()
    return time.perf_counter() - began


SIDES: dict[str, Callable[[dict[str, Any], int, int, str], float]] = {
    "ours": search_locally,
    "ours on ray": search_on_ray,
    "ray tune": search_with_ray_tune,
}


def _search(space: dict[str, Any], trials: int, parallel: int, folder: str, engine: Any) -> float:
    from distributed import DistributedTuner

    began = time.perf_counter()
    tuner = DistributedTuner(
        our_trial,
        space | {"learning_rate": {"loguniform": list(RATES)}},
        num_gpus=parallel,
        metric="loss",
        mode="min",
        engine=engine,
        run_dir=str(Path(folder, "search")),
    )
    tuner.tune(num_samples=trials)
    return time.perf_counter() - began


def _start_ray(parallel: int) -> None:
    """Before the clock runs: a search on a cluster finds it there."""
    import ray

    ray.init(address="local", num_cpus=parallel, num_gpus=0, include_dashboard=False, log_to_driver=False)


def main() -> None:
    """`python -m benchmarks.suite.tuning.side SIDE FOLDER STEPS TRIALS PARALLEL`, by the tuning benchmark."""
    side, folder = sys.argv[1:3]
    steps, trials, parallel = map(int, sys.argv[3:6])
    seconds = SIDES[side]({"steps": steps, "folder": folder}, trials, parallel, folder)
    Path(folder, WALL).write_text(repr(seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
