"""What the planner makes of bucket_cap_mb='auto': where it can be measured, and every reason for which it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError
from distributed.core.plan import Plan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.strategies.data_parallel.ddp import why_not_captured


def plan(task: dict[str, str] | None = None, hardware: Hardware | None = None, **settings: Any) -> Plan:
    config = DistributedConfig(**{"num_gpus": 2, "batch_size": 4, "bucket_cap_mb": "auto"} | settings)
    machine = hardware or Hardware(cpu_cores=8)
    return make_plan(config, JobProfile(samples=64, task=task or {}), machine, run_dir="unused")


def test_auto_begins_with_the_usual_size() -> None:
    made = plan().replicate
    assert (made.bucket_cap_mb, made.tunes_buckets) == (25.0, True)
    fixed = plan(bucket_cap_mb=7).replicate
    assert (fixed.bucket_cap_mb, fixed.tunes_buckets) == (7.0, False)


def test_one_rank_is_told_that_it_measures_nothing() -> None:
    alone = plan(num_gpus=1)
    assert not alone.replicate.tunes_buckets
    assert any("no buckets of gradients" in decision.choice for decision in alone.decisions)


@pytest.mark.parametrize(
    ("settings", "task", "other"),
    [
        ({"zero_stage": 1}, {}, "backend='pytorch-ddp'"),
        ({"backend": "fsdp"}, {}, "backend='fsdp'"),
        ({"backend": "horovod"}, {}, "backend='horovod'"),
        ({"tensor_parallel": 2}, {}, "backend='pytorch-ddp'"),
        ({"find_unused_parameters": True}, {}, "find_unused_parameters"),
        ({"static_graph": True}, {}, "static_graph"),
        ({"compression": "topk"}, {}, "compression='topk'"),
        ({"synchronization": "post_local_sgd"}, {}, "synchronization='post_local_sgd'"),
        ({}, {"manual": "manual_optimization"}, "manual_optimization"),
        ({}, {"several_optimizers": "training_step(model, batch, optimizer)"}, "training_step"),
        ({}, {"closure": "optimizer LBFGS"}, "LBFGS"),
    ],
)
def test_what_it_cannot_be_had_with_is_named(settings: dict[str, Any], task: dict[str, str], other: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan(task, **{"backend": "pytorch-ddp"} | settings)
    (found,) = [problem for problem in refused.value.problems if problem.what.startswith("bucket_cap_mb")]
    assert other in found.what
    assert found.why
    assert found.do


def test_bitwise_runs_refuse_a_size_that_clocks_choose() -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb is set, but would have no effect"):
        DistributedConfig(reproducible="bitwise", virtual_ranks=2, bucket_cap_mb="auto")


@pytest.mark.parametrize("value", [0, -1, "some"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        DistributedConfig(bucket_cap_mb=value)


def test_measured_buckets_keep_a_step_from_being_captured() -> None:
    on_gpus = Hardware(cpu_cores=8, gpus=(Gpu("H200", 141 << 30), Gpu("H200", 141 << 30)))
    assert "bucket_cap_mb='auto'" in why_not_captured(plan(hardware=on_gpus, device="cuda"))
    assert why_not_captured(plan(hardware=on_gpus, device="cuda", bucket_cap_mb=25)) == ""
