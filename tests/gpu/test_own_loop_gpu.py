"""Loops of the user's own on NCCL: ranks that share a GPU train what a hand-written loop on the CPU does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.worlds import ALONE, SHARED, Job, result, run_jobs
from tests.ranks.test_own_loop import CASES, MESHES, by_hand, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WAYS = CASES | MESHES


@pytest.mark.parametrize(("ranks", "global_batch"), [(1, 12), (2, 12), (4, 16)])
def test_own_loop_on_nccl_trains_what_one_process_does(tmp_path: Path, ranks: int, global_batch: int) -> None:
    shared: dict[str, Any] = ALONE if ranks == 1 else SHARED
    cases = CASES if ranks != 2 else WAYS
    jobs: dict[str, Job] = {
        name: (on_device, (kind, str(tmp_path / name), settings | shared, global_batch))
        for name, (kind, settings) in cases.items()
    }
    found = {name: job(*given) for name, (job, given) in jobs.items()} if ranks == 1 else run_jobs(ranks, jobs)[0]
    for name, (kind, settings) in cases.items():
        weights, metrics = result(found, name)
        parts, clip = settings.get("gradient_accumulation_steps", 1), settings.get("gradient_clipping")
        expected, expected_metrics = by_hand(kind, parts, clip, global_batch)
        assert torch.allclose(weights, expected, rtol=0, atol=1e-7), name
        assert metrics == [pytest.approx(one, abs=1e-7) for one in expected_metrics], name


def on_device(
    kind: str, run_dir: str, settings: dict[str, Any], global_batch: int
) -> tuple[torch.Tensor, list[dict[str, float]]]:
    settings = {name: value for name, value in settings.items() if name != "capture"}
    weights, metrics, _ = train(kind, run_dir, global_batch, **settings)
    return weights.cpu(), metrics
