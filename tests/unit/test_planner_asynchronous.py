"""What the planner makes of a parameter server: where a run has it, and every reason for which it has not."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError
from distributed.core.plan import Plan
from distributed.core.plan_parts.synchronization import SynchronizationPlan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan

ASKED = "synchronization='asynchronous'"


def plan(
    task: dict[str, str] | None = None, hardware: Hardware | None = None, *, batchnorm: bool = False, **settings: Any
) -> Plan:
    config = DistributedConfig(**{"num_gpus": 2, "batch_size": 4, "synchronization": "asynchronous"} | settings)
    profile = JobProfile(samples=64, task=task or {}, has_batchnorm=batchnorm)
    return make_plan(config, profile, hardware or Hardware(cpu_cores=8), run_dir="unused")


def test_settings_become_the_plan() -> None:
    assert plan(max_staleness=3).replicate.synchronization == SynchronizationPlan("asynchronous", max_staleness=3)
    choices = [decision.choice for decision in plan().decisions]
    assert "rank 0 is the parameter server" in choices
    assert "parameters lack at most 1 updates" in choices
    alone = plan(num_gpus=1)
    assert alone.replicate.synchronization.kind == "asynchronous", "it may get more ranks"
    assert any("no effect while there is 1 rank" in decision.choice for decision in alone.decisions)


@pytest.mark.parametrize(
    ("settings", "task", "other"),
    [
        ({"zero_stage": 1}, {}, "sharded over ranks"),
        ({"sharding": "full"}, {}, "sharded over ranks"),
        ({"tensor_parallel": 2}, {}, "sharded over ranks"),
        ({"pipeline_parallel": 2}, {}, "sharded over ranks"),
        ({"reproducible": "bitwise", "virtual_ranks": 2}, {}, "reproducible='bitwise'"),
        ({"compression": "topk"}, {}, "compression='topk'"),
        ({"mixed_precision": "fp16"}, {}, "mixed_precision='fp16'"),
        ({"bf16_parameters": True, "mixed_precision": "bf16"}, {}, "bf16_parameters"),
        ({"slow_rank": "replace"}, {}, "slow_rank='replace'"),
        ({"static_graph": True}, {}, "static_graph"),
        ({"find_unused_parameters": True}, {}, "find_unused_parameters"),
        ({}, {"manual": "manual_optimization"}, "manual_optimization"),
        ({}, {"closure": "optimizer LBFGS"}, "LBFGS"),
        ({}, {"several_optimizers": "configure_optimizers returns several"}, "returns several"),
    ],
)
def test_what_it_cannot_be_had_with_is_named(settings: dict[str, Any], task: dict[str, str], other: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan(task, backend="pytorch-ddp", **settings)
    (found,) = [problem for problem in refused.value.problems if problem.what.startswith(ASKED)]
    assert other in found.what
    assert found.why
    assert found.do


def test_gpus_that_ranks_share_are_refused() -> None:
    one = Hardware(cpu_cores=8, gpus=(Gpu("H200"),))
    with pytest.raises(PlanError) as refused:
        plan(hardware=one, share_gpus=True, capture=True)
    told = [problem.what for problem in refused.value.problems if problem.what.startswith(ASKED)]
    assert told == [f"{ASKED} with capture=True", f"{ASKED} with GPUs that ranks share"]


def test_batchnorm_needs_a_rule() -> None:
    with pytest.raises(PlanError, match="BatchNorm over all ranks"):
        plan(batchnorm=True)
    kept = plan(batchnorm=True, sync_batchnorm=False)
    assert any("BatchNorm sees" in decision.choice for decision in kept.decisions)


@pytest.mark.parametrize("backend", ["fsdp", "horovod", "deepspeed"])
def test_engines_without_it_are_refused(backend: str) -> None:
    with pytest.raises(PlanError, match="asynchronous"):
        plan(backend=backend)


def test_bound_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_staleness"):
        DistributedConfig(num_gpus=2, max_staleness=3)
