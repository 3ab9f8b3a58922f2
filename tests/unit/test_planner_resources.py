"""Ranks are counted where they are started; a rank reads its world, and says what was asked for otherwise."""

from __future__ import annotations

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.resources import plan_resources, read_resources

CPUS = Hardware(cpu_cores=2)
GPU = Hardware(gpus=(Gpu("A", 2**36, 9.0),), cpu_cores=8)


def world(size: int, nodes: int = 1, launcher: str = "distributed") -> WorkerEnv:
    return WorkerEnv(world_size=size, local_world_size=-(-size // nodes), num_nodes=nodes, launcher=launcher)


@pytest.mark.parametrize(
    "config", [DistributedConfig(num_gpus=2), DistributedConfig(gpus_per_node=2, num_nodes=2, master_addr="n1")]
)
def test_rank_reads_the_resources_its_launcher_planned(config: DistributedConfig) -> None:
    planned, said, _ = plan_resources(config, CPUS)
    read, said_again, problems = read_resources(config, CPUS, world(planned.world_size, planned.num_nodes))
    assert (read, problems) == (planned, [])
    assert said_again == said, "the launcher has shown these words: the screen leaves out what it has shown"


def test_rank_without_settings_takes_the_world_as_it_is() -> None:
    read, said, _ = read_resources(DistributedConfig(), CPUS, world(3))
    assert (read.world_size, said) == (3, [])


def test_num_gpus_of_a_script_under_torchrun_is_not_used() -> None:
    read, said, _ = read_resources(DistributedConfig(num_gpus=4), CPUS, world(2, launcher="torchrun"))
    assert read.world_size == 2
    assert [str(one) for one in said] == [
        "2 CPU processes a node: this machine has no CUDA device, so 'GPU' means process [device]",
        "2 ranks: torchrun started them; num_gpus=4 is not used",
    ]


def test_uneven_world_has_the_ranks_of_its_fullest_node() -> None:
    read, _, _ = read_resources(DistributedConfig(), CPUS, world(3, nodes=2))
    assert (read.world_size, read.ranks_per_node) == (3, 2)


def test_device_setting_of_a_script_overrides_the_hardware() -> None:
    assert read_resources(DistributedConfig(), GPU, world(1))[0].device == "cuda"
    assert read_resources(DistributedConfig(device="cpu"), GPU, world(1))[0].device == "cpu"


def test_rank_refuses_a_node_with_fewer_gpus_than_ranks() -> None:
    _, _, problems = read_resources(DistributedConfig(), GPU, world(2, launcher="torchrun"))
    assert [one.why.startswith("torchrun asked for ") for one in problems] == [True]
    read, _, problems = read_resources(DistributedConfig(share_gpus=True), GPU, world(2, launcher="torchrun"))
    assert (read.shares_gpus, problems) == (True, [])
