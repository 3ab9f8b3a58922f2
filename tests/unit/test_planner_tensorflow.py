"""How TensorFlow's processes are laid out, and what is refused before one of them starts."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import PlanError
from distributed.core.plan import Plan
from distributed.engines.tensorflow.plan import cut_for, processes
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan

MACHINE = Hardware(cpu_cores=8, memory_bytes=2**34)


def plan(hardware: Hardware = MACHINE, **settings: Any) -> Plan:
    config = DistributedConfig(backend="tensorflow", batch_size=4, **settings)
    return make_plan(config, JobProfile(samples=100), hardware, run_dir="x")


@pytest.mark.parametrize(
    ("settings", "strategy", "tasks", "replicas"),
    [
        ({"num_gpus": 4}, "mirrored", 1, 4),
        ({"num_gpus": 1}, "mirrored", 1, 1),
        ({"num_gpus": 4, "tensorflow_strategy": "multi_worker"}, "multi_worker", 4, 1),
        ({"num_gpus": 8, "num_nodes": 2, "master_addr": "a"}, "multi_worker", 8, 1),
        ({"num_gpus": 3, "tensorflow_strategy": "parameter_server", "parameter_servers": 2}, "parameter_server", 6, 1),
    ],
)
def test_tensorflow_plan_counts_replicas_and_processes(
    settings: dict[str, Any], strategy: str, tasks: int, replicas: int
) -> None:
    made = plan(**settings)
    assert (made.engine["strategy"], made.engine["tasks"], made.engine["replicas"]) == (strategy, tasks, replicas)
    assert made.world_size == settings["num_gpus"]
    assert made.batch.global_batch == 4 * settings["num_gpus"]
    nodes = settings.get("num_nodes", 1)
    config = DistributedConfig(backend="tensorflow", **settings)
    assert processes(config, nodes, settings["num_gpus"] // nodes) * nodes == tasks


def test_tensorflow_strategy_choice_is_reported() -> None:
    told = [decision for decision in plan(num_gpus=4).decisions if decision.override == "tensorflow_strategy"]
    assert [decision.choice for decision in told] == ["MirroredStrategy"]
    assert not [one for one in plan(num_gpus=1).decisions if one.override == "tensorflow_strategy"]


def test_plan_for_fewer_processes_keeps_the_global_batch() -> None:
    whole = plan(num_gpus=4, tensorflow_strategy="multi_worker")
    cut = cut_for(whole, processes=2, num_nodes=1)
    assert (cut.world_size, cut.engine["processes"], cut.batch.global_batch) == (2, 2, whole.batch.global_batch)
    assert cut.batch.accumulation == 2
    assert cut_for(whole, processes=4, num_nodes=1) is whole


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_gpus": 2, "zero_stage": 3}, "zero_stage=3"),
        ({"num_gpus": 2, "tensor_parallel": 2}, "tensor_parallel=2"),
        ({"num_gpus": 2, "lora": 4}, "lora=4"),
        ({"num_gpus": 2, "reproducible": "bitwise"}, "reproducible='bitwise'"),
        ({"num_gpus": 2, "parameter_servers": 2}, "parameter_servers=2, but tensorflow_strategy='mirrored'"),
        ({"num_gpus": 2, "communication_backend": "gloo"}, "communication_backend='gloo'"),
        ({"num_gpus": 2, "bucket_cap_mb": 5}, "bucket_cap_mb is set, but would have no effect"),
        ({"num_gpus": 2, "num_workers": 2}, "num_workers is set, but would have no effect"),
        ({"num_gpus": 2, "whole_model_on": "all"}, "whole_model_on is set, but would have no effect"),
        (
            {"num_gpus": 4, "num_nodes": 2, "master_addr": "a", "tensorflow_strategy": "mirrored"},
            "'mirrored' with num_nodes=2",
        ),
    ],
)
def test_settings_unsupported_by_tensorflow_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(**settings)
    assert words in str(caught.value)


def test_more_gpus_than_the_node_has_are_refused() -> None:
    with pytest.raises(PlanError, match="4 GPUs asked for on this node, but it has 1"):
        plan(Hardware(gpus=(Gpu("A", 1, 8.0),), cpu_cores=8), num_gpus=4)
