"""What a run that resumes knows of what compression="auto" has measured and chosen, on one rank that stands for two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed.core.env import WorkerEnv
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.runtime.session import Session
from distributed.strategies.base import StepOutput
from distributed.strategies.data_parallel.auto.auto_compression import AutoCompression
from distributed.strategies.data_parallel.compressed_gradients import CastGradients

COMPARED = 12  # steps after the choice
IN_NO_TIME = 1e-9  # seconds


def make(run_dir: Path, **settings: Any) -> tuple[AutoCompression, Callable[[], StepOutput]]:
    """It, and a step of the run, which sends nothing."""
    session = Session(WorkerEnv(), torch.device("cpu"), None)
    run_dir.mkdir(exist_ok=True)
    auto = AutoCompression(
        CompressionPlan("auto"),
        session,
        **{"run_dir": str(run_dir), "kinds": ["bf16"], "ranks": 2, "stepped": dict} | settings,
        make=lambda plan: CastGradients(plan, session, is_scaled=False),
    )
    module = nn.Linear(2, 2)
    auto.begin(module)
    auto.follow(module)
    return auto, auto.watching(lambda: StepOutput(1.0), lambda: None)


def resumed_between(auto: AutoCompression, whole_s: float) -> Mapping[str, Any]:
    """The state of a run that has chosen, and has not compared times yet."""
    auto.kind, auto.stage = "bf16", "compressed"
    auto._whole_s = whole_s
    return auto.state()


def test_time_of_whole_steps_is_compared_with_after_a_resume(tmp_path: Path) -> None:
    for whole_s, kind in ((IN_NO_TIME, "none"), (1e9, "bf16")):
        saved = resumed_between(make(tmp_path / "first")[0], whole_s)
        auto, take = make(tmp_path / f"resumed for {kind}")
        auto.load(saved)
        assert auto.kind == "bf16"
        for _ in range(COMPARED):
            take()
        assert auto.kind == kind
