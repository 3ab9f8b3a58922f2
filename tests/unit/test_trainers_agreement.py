"""Ranks that plan for themselves must plan alike, where they would else wait for each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.plan import Plan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.trainers.agreement import find_difference

GPUS = Hardware(cpu_cores=8, gpus=(Gpu("GPU", compute_capability=9.0),) * 8)
OLD_GPUS = Hardware(cpu_cores=8, gpus=(Gpu("GPU", compute_capability=7.0),) * 8)
PROFILE = JobProfile(loader_batch_size=32, samples=4096, parameters=10**6, has_blocks=True)


def plan(hardware: Hardware = GPUS, **settings: Any) -> Plan:
    return make_plan(DistributedConfig(num_gpus=8, **settings), PROFILE, hardware, run_dir="runs/a")


def read_back(before: Plan) -> Plan:
    return Plan.from_json(before.to_json())


def test_plans_that_differ_in_rank_local_settings_agree() -> None:
    mine, first = plan(progress=True), plan(progress=False, keep_last=3)
    assert find_difference(replace(mine, threads_per_rank=3, run_dir="elsewhere"), read_back(first), rank=1) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 8}, "another batch than rank 0: it has batch_size 8, not None"),
        ({"seed": 3}, "another seed than rank 0: it has seed 3, not 0"),
        ({"sharding": "full"}, "strategy and mesh and shard than rank 0: it has sharding 'full', not None"),
        ({"checkpoint_frequency": 2}, "another checkpoint than rank 0: it has checkpoint_frequency 2, not None"),
    ],
)
def test_plan_unlike_rank_0s_names_the_setting(settings: dict[str, Any], said: str) -> None:
    apart = find_difference(plan(**settings), read_back(plan()), rank=1)
    assert apart is not None
    assert said in apart.what
    assert next(iter(settings)) in apart.do


def test_plan_of_another_device_names_the_machines() -> None:
    apart = find_difference(plan(OLD_GPUS, mixed_precision=True), read_back(plan(mixed_precision=True)), rank=3)
    assert apart is not None
    assert "rank 3 plans another precision" in apart.what
    assert "machines" in apart.why
