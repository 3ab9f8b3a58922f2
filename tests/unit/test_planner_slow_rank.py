"""slow_rank="replace" is refused where no rank could be replaced, or none would be seen to be slow."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import ConfigError, PlanError
from distributed.core.plan import Plan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan

MACHINE = Hardware(cpu_cores=8, memory_bytes=2**34)
GPUS = Hardware(cpu_cores=8, memory_bytes=2**34, gpus=(Gpu("H200", memory_bytes=2**37),) * 4)


def plan(
    hardware: Hardware = MACHINE, profile: JobProfile | None = None, world: WorkerEnv | None = None, **settings: Any
) -> Plan:
    config = DistributedConfig(**{"slow_rank": "replace", "num_gpus": 4, "batch_size": 4} | settings)
    return make_plan(config, profile or JobProfile(samples=100), hardware, run_dir="x", world=world)


@pytest.mark.parametrize("hardware", [MACHINE, GPUS])
def test_replicas_on_one_machine_may_be_replaced(hardware: Hardware) -> None:
    made = plan(hardware, slow_rank_wait_s=5)
    assert (made.slow_rank, made.slow_rank_wait_s) == ("replace", 5)
    assert plan(hardware, world=WorkerEnv(world_size=4, local_world_size=4, launcher="distributed")).world_size == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_gpus": 1}, ("with one rank", "no peers")),
        ({"max_restarts": 0}, ("max_restarts=0",)),
        ({"zero_stage": 3}, ("sharded over the ranks", "last checkpoint")),
        ({"tensor_parallel": 2}, ("sharded over the ranks",)),
        ({"backend": "deepspeed"}, ("sharded over the ranks",)),
        ({"backend": "ray"}, ("backend='ray'", "backend='pytorch-ddp' or 'horovod'")),
        ({"profile": JobProfile(samples=100, has_batchnorm=True)}, ("BatchNorm over all ranks", "forward pass")),
        ({"profile": JobProfile(), "iterable_split": "dataset"}, ("iterable_split='dataset'",)),
        ({"hardware": GPUS, "mixed_precision": "fp16"}, ("on NCCL without parameters and gradients in fp32",)),
        (
            {"hardware": GPUS, "num_gpus": 8, "num_nodes": 2, "master_addr": "a"},
            ("on NCCL over several nodes", "last checkpoint"),
        ),
        (
            {"world": WorkerEnv(world_size=4, local_world_size=4, launcher="torchrun")},
            ("under torchrun", "distributed train"),
        ),
    ],
)
def test_replacing_where_it_makes_no_sense_is_refused(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as refused:
        plan(**given)
    (problem,) = (problem for problem in refused.value.problems if "slow_rank" in problem.what)
    for word in words:
        assert word in str(problem), problem


def test_waiting_time_without_replacing_is_refused() -> None:
    with pytest.raises(ConfigError, match="slow_rank_wait_s is set, but would have no effect"):
        DistributedConfig(slow_rank_wait_s=5)
    assert plan(slow_rank="report", zero_stage=3).slow_rank == "report"
