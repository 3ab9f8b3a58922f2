"""Which precision mixed_precision=True stands for."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.plan import PrecisionPlan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan

NEW, OLD = Gpu("A", 80 << 30, 8.0), Gpu("V", 16 << 30, 7.0)


def precision(*gpus: Gpu, **settings: Any) -> PrecisionPlan:
    config = DistributedConfig(mixed_precision=True, batch_size=8, num_gpus=1, **settings)
    return make_plan(config, JobProfile(samples=64), Hardware(gpus=gpus, cpu_cores=4), run_dir="x").precision


def test_true_is_bf16_where_the_device_has_it() -> None:
    assert [precision(*gpus).kind for gpus in ((), (NEW,), (OLD,))] == ["bf16", "bf16", "fp16"]


@pytest.mark.parametrize("gpus", [(), (NEW,), (OLD,)])
def test_scaler_settings_make_true_fp16(gpus: tuple[Gpu, ...]) -> None:
    found = precision(*gpus, scaler_init_scale=2.0**16, scaler_growth_interval=100)
    assert (found.kind, found.scaler_init_scale, found.scaler_growth_interval) == ("fp16", 65536.0, 100)
    assert precision(*gpus, scaler_growth_interval=100).kind == "fp16"


def test_bf16_parameters_keep_true_bf16() -> None:
    assert precision(NEW, scaler_init_scale=8.0, bf16_parameters=True).kind == "bf16"
