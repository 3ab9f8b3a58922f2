"""network_profile in a plan: what is said, what is refused before the start, and what reaches the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.env import NETWORK, WorkerEnv
from distributed.core.errors import ConfigError, LaunchError, PlanError
from distributed.core.plan import Plan
from distributed.launch.local import LocalLauncher
from distributed.launch.request import LaunchRequest, NodePlace
from distributed.planner.decisions.network import NodeNetwork, network_of
from distributed.planner.hardware import Hardware
from distributed.planner.network.proposals import NetworkRun
from distributed.planner.planning import JobProfile, make_plan

TWO_NODES = WorkerEnv(rank=1, world_size=2, num_nodes=2, node_rank=1, launcher="torchrun")
TWO_RANKS = WorkerEnv(rank=1, local_rank=1, world_size=2, local_world_size=2, launcher="torchrun")


def plan(world: WorkerEnv | None = None, **settings: Any) -> Plan:
    config = DistributedConfig(**{"batch_size": 4, "device": "cpu"} | settings)
    return make_plan(config, JobProfile(samples=64), Hardware(cpu_cores=8), run_dir="unused", world=world)


def test_profile_is_one_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match="network_profile='gpc'"):
        DistributedConfig(network_profile="gpc")  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [None, TWO_RANKS])
def test_profile_of_a_cloud_on_one_node_is_refused(world: WorkerEnv | None) -> None:
    with pytest.raises(PlanError, match="would have no effect"):
        plan(world, num_gpus=2, network_profile="gcp")


def test_profile_auto_on_one_node_says_that_it_sets_nothing() -> None:
    said = [decision.choice for decision in plan(num_gpus=2, network_profile="auto").decisions]
    assert "network_profile=auto sets nothing" in said
    alone = plan(num_gpus=1, network_profile="auto").decisions
    assert any(decision.reason == "a single rank sends nothing" for decision in alone)


def test_profile_for_tensorflow_on_cpus_is_refused() -> None:
    with pytest.raises(PlanError, match=r"would have no effect(.|\n)*gRPC"):
        plan(num_gpus=2, backend="tensorflow", network_profile="auto")


def test_profile_on_a_cluster_is_left_to_its_nodes() -> None:
    found = plan(num_gpus=2, backend="ray", address="auto", network_profile="gcp")
    assert any("each node of the cluster" in decision.reason for decision in found.decisions)


def test_wrong_interface_is_refused_with_the_rank_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(PlanError, match=r"^GLOO_SOCKET_IFNAME=eth77, but this machine has no interface eth77"):
        plan(num_gpus=2)
    with pytest.raises(PlanError, match=r"^rank 1 on .*: GLOO_SOCKET_IFNAME=eth77"):
        plan(TWO_NODES)


def test_only_ranks_that_train_without_sharding_order_kernels() -> None:
    def orders(**settings: Any) -> bool:
        return network_of(DistributedConfig(**settings), 2, "cuda").run.orders_kernels

    assert orders(tensor_parallel=2)
    assert not orders()
    assert not orders(tensor_parallel=2, backend="fsdp")
    assert not orders(tensor_parallel=2, sharding="full")


class FixedNetwork:
    """A node that finds always the same, in place of what this machine has."""

    def __call__(self, environ: Any, *, towards: str = "", nodes: int = 0) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "ens5", NETWORK: "GLOO_SOCKET_IFNAME"}


@pytest.mark.parametrize("backend", ["pytorch-ddp", "tensorflow"])
def test_variables_of_a_node_reach_its_ranks_on_any_engine(backend: str) -> None:
    request = LaunchRequest(("train.py",), "runs/x", ranks_per_node=2, num_nodes=2, network=FixedNetwork())
    request = request.for_engine(backend, DistributedConfig(backend=backend, tensorflow_strategy="multi_worker"))
    place = NodePlace(0, 2, 0, 4, "n0", 29500, 2, (("n0", 2), ("n1", 2)))
    processes = LocalLauncher(environ={}, python="python").node_processes(request, place).processes
    assert [process.env["GLOO_SOCKET_IFNAME"] for process in processes] == ["ens5", "ens5"]
    assert ("TF_CONFIG" in processes[0].env) == (backend == "tensorflow")


def test_node_with_a_wrong_interface_names_itself() -> None:
    network = NodeNetwork("auto", NetworkRun(nodes=2, device="cpu"))
    with pytest.raises(LaunchError, match=r"^on .*: TP_SOCKET_IFNAME=eth77"):
        network({"TP_SOCKET_IFNAME": "eth77"})
    assert NodeNetwork("none", NetworkRun())({"TP_SOCKET_IFNAME": "eth77"}) == {}
