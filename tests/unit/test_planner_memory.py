"""A model that is sure not to fit is refused before the start; one that may fit is not."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import PlanError
from distributed.core.plan import Plan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.memory import ModelSize
from distributed.planner.planning import JobProfile, make_plan

GIB = 2**30
ONE = ModelSize(GIB, GIB)  # 4 GiB with gradients and AdamW's two moments


def plan(memory_gib: float, *, gpus: int = 1, size: ModelSize = ONE, owns: bool = False, **settings: Any) -> Plan:
    hardware = Hardware(gpus=(Gpu("A", int(memory_gib * GIB), 9.0),) * gpus, cpu_cores=8)
    profile = JobProfile(samples=64, size=size, owns_optimizer=owns)
    return make_plan(DistributedConfig(batch_size=4, **settings), profile, hardware, run_dir="x")


def test_memory_of_ranks_sharing_a_gpu_adds_up() -> None:
    plan(9, num_gpus=2, share_gpus=True)
    with pytest.raises(PlanError, match=r"the 4 ranks of this node need at least 16\.0 GiB on its 1 GPU") as refused:
        plan(9, num_gpus=4, share_gpus=True)
    assert "set num_gpus=2, or zero_stage=3" in str(refused.value)
    plan(9, num_gpus=4, share_gpus=True, zero_stage=3)
    plan(9, gpus=2, num_gpus=4, share_gpus=True)


def test_model_too_large_for_one_rank_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a rank needs at least 4\.0 GiB on its GPU, with 3\.0 GiB"):
        plan(3, num_gpus=1)
    with pytest.raises(PlanError, match="zero_stage=3"):
        plan(3, gpus=2, num_gpus=2)


def test_outer_optimizer_of_diloco_is_counted() -> None:
    plan(5, gpus=2, num_gpus=2, synchronization="local_sgd")
    with pytest.raises(PlanError, match=r"a rank needs at least 6\.0 GiB on its GPU, with 5\.0 GiB"):
        plan(5, gpus=2, num_gpus=2, synchronization="diloco")


@pytest.mark.parametrize(
    "fits",
    [
        {"owns": True},
        {"optimizer": "sgd"},
        {"size": ModelSize(GIB, 0)},
        {"size": ModelSize()},
        {"lora": 8},
        {"bf16_parameters": True},
        {"zero_stage": 3, "gpus": 2, "num_gpus": 2},
        {"zero_stage": 3, "cpu_offload": True, "size": ModelSize(9 * GIB, 9 * GIB)},
        {"pipeline_parallel": 2, "gpus": 2, "num_gpus": 2},
        {"device": "cpu", "size": ModelSize(9 * GIB, 9 * GIB)},
    ],
    ids=str,
)
def test_model_that_may_fit_is_not_refused(fits: dict[str, Any]) -> None:
    plan(2.5, **fits)


def test_unknown_gpu_memory_refuses_nothing() -> None:
    plan(0, size=ModelSize(10**15, 10**15))
