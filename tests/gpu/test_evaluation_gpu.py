"""validate, test and predict on NCCL: what one process computes by hand on the CPU, before and after a fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.worlds import SHARED, Job, result, run_jobs
from tests.ranks import test_evaluation as evaluation
from tests.ranks import test_validation as validation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MODES = [mode for mode in evaluation.MODES if mode != "deepspeed"]
TOLERANCE = {"bf16": 2e-2}


def evaluate(mode: str, folder: str) -> dict[str, Any]:
    return evaluation.run(mode, folder, **SHARED)


def validate(mode: str, folder: str) -> list[dict[str, float]]:
    settings: dict[str, Any] = {**SHARED, "val_check_interval": 4, **validation.MODES[mode]}
    return [record.metrics for record in validation.fit(2, folder, **settings).evaluations]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluation")
    jobs: dict[str, Job] = {mode: (evaluate, (mode, str(folder / str(at)))) for at, mode in enumerate(MODES)}
    jobs |= {f"sets {mode}": (validate, (mode, str(folder / f"sets {mode}"))) for mode in validation.MODES}
    return run_jobs(2, jobs)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_on_nccl_equals_one_process(mode: str, by_rank: list[dict[str, Any]]) -> None:
    first, second = (result(found, mode) for found in by_rank)
    tolerance = TOLERANCE.get(mode, 1e-5)
    for when in ("before", "after"):
        if when in first:  # a model without weights is not evaluated before its fit
            evaluation.assert_equal(first[when], second[when], first[when]["hand"], tolerance)
    validated = {name: value for name, value in first["fit"].items() if name.startswith("val_")}
    assert first["last"] == second["last"] == pytest.approx(validated, abs=tolerance)


@pytest.mark.parametrize("mode", validation.MODES)
def test_whole_set_metrics_on_nccl_are_those_of_one_process(mode: str, by_rank: list[dict[str, Any]]) -> None:
    expected = validation.reference([4, 8, 12])
    first, second = (result(found, f"sets {mode}") for found in by_rank)
    assert first == second == [pytest.approx(metrics, rel=1e-6, abs=1e-6) for metrics in expected.values()]
