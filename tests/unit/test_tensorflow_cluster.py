"""TF_CONFIG as the launchers write it: who the tasks are, where they listen, and what the launcher knows of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv, environ_with, inherited_environ
from distributed.core.errors import ConfigError, PlanError
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, Plan
from distributed.core.protocol.failure import is_collateral
from distributed.engines.tensorflow.plan import check_world, lay_out
from distributed.engines.tensorflow.world.cluster import announce_in_world
from distributed.launch.local import LocalLauncher
from distributed.launch.rendezvous.seating import NodeOffer, arrange
from distributed.launch.request import LaunchRequest, NodePlace


def request_for(num_nodes: int = 1, devices: int = 2, device: str = "cpu", **settings: Any) -> LaunchRequest:
    config = DistributedConfig(backend="tensorflow", **settings)
    request = LaunchRequest(("train.py",), "runs/x", ranks_per_node=devices, num_nodes=num_nodes, device=device)
    return request.for_engine("tensorflow", config)


def configs(request: LaunchRequest, place: NodePlace) -> list[dict[str, Any]]:
    rendered = LocalLauncher(environ={}, python="python").node_processes(request, place)
    return [json.loads(process.env["TF_CONFIG"]) for process in rendered.processes]


def alone(request: LaunchRequest) -> NodePlace:
    return NodePlace.alone(request, port=29500)


def test_mirrored_strategy_needs_no_tf_config() -> None:
    request = request_for(devices=4)
    (process,) = LocalLauncher(environ={}, python="python").node_processes(request, alone(request)).processes
    assert "TF_CONFIG" not in process.env


def test_each_world_of_workers_has_one_cluster_with_new_ports() -> None:
    request = request_for(tensorflow_strategy="multi_worker")
    first, second = configs(request, alone(request)), configs(request, alone(request))
    assert [config["task"] for config in first] == [{"type": "worker", "index": n} for n in range(2)]
    assert first[0]["cluster"] == first[1]["cluster"]
    addresses = [address for found in (first, second) for address in found[0]["cluster"]["worker"]]
    assert len(set(addresses)) == 4
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_nodes_of_one_rendezvous_derive_the_same_cluster() -> None:
    cards = [
        NodeOffer(
            f"n{n}", f"10.0.0.{n}", wanted_rank=None, ranks=2, run_dir="runs/x", attempt=0, port=29500 + n, agent=n
        )
        for n in range(2)
    ]
    record = arrange(cards, before=None)
    request = request_for(num_nodes=2, tensorflow_strategy="multi_worker")
    assert request.ranks_per_node == 2
    told = [config for agent in range(2) for config in configs(request, record.place(agent))]
    assert {json.dumps(config["cluster"]) for config in told} == {json.dumps(told[0]["cluster"])}
    workers = told[0]["cluster"]["worker"]
    assert [address.partition(":")[0] for address in workers] == ["10.0.0.0", "10.0.0.0", "10.0.0.1", "10.0.0.1"]
    assert len(set(workers)) == 4
    assert [config["task"]["index"] for config in told] == [0, 1, 2, 3]


def test_parameter_server_cluster_keeps_its_ports_after_restart() -> None:
    request = request_for(tensorflow_strategy="parameter_server", parameter_servers=2)
    assert request.ranks_per_node == 5
    first, second = configs(request, alone(request)), configs(request, alone(request))
    assert first == second
    assert [config["task"]["type"] for config in first] == ["chief", "worker", "worker", "ps", "ps"]
    processes = LocalLauncher(environ={}, python="python").node_processes(request, alone(request)).processes
    assert [process.role.serves for process in processes] == [False, True, True, True, True]
    assert [process.role.is_vital for process in processes] == [True, False, False, True, True]


def test_only_training_tasks_see_a_gpu_one_each() -> None:
    request = request_for(tensorflow_strategy="parameter_server", device="cuda")
    processes = LocalLauncher(environ={}, python="python").node_processes(request, alone(request)).processes
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in processes] == ["", "0", "1", ""]


def test_tasks_use_only_gpus_of_cuda_visible_devices() -> None:
    with environ_with({"CUDA_VISIBLE_DEVICES": "4,5,6"}):
        lone = request_for(devices=1, device="cuda", tensorflow_strategy="multi_worker")
        served = request_for(devices=2, device="cuda", tensorflow_strategy="parameter_server")
        mirrored = request_for(devices=2, device="cuda")
    seen = [
        [
            process.env.get("CUDA_VISIBLE_DEVICES")
            for process in LocalLauncher(environ={}).node_processes(of, alone(of)).processes
        ]
        for of in (lone, served, mirrored)
    ]
    assert seen == [["4"], ["", "4", "5", ""], [None]]


def test_tensorflow_ranks_preload_no_torch() -> None:
    request = request_for()
    assert "tensorflow" in request.preload
    assert not any("torch" in name for name in request.preload)


def test_processes_of_mpirun_on_one_host_derive_one_cluster() -> None:
    layout = lay_out(DistributedConfig(backend="tensorflow", tensorflow_strategy="multi_worker"), 1, 2)
    plan = Plan("runs/x", BatchPlan(1), engine=vars(layout))
    found = []
    for rank in range(2):
        with environ_with({"TF_CONFIG": ""}):
            env = WorkerEnv(rank, rank, 2, 2, master_port=29500, launcher="mpirun")
            announce_in_world(plan, env)
            found.append(json.loads(inherited_environ()["TF_CONFIG"]))
    assert found[0]["cluster"] == found[1]["cluster"]
    assert [config["task"]["index"] for config in found] == [0, 1]
    assert "127.0.0.1:29500" not in found[0]["cluster"]["worker"], "torchrun itself may listen there"


@pytest.mark.parametrize(
    ("launcher", "processes", "settings", "words"),
    [
        ("torchrun", 4, {"tensorflow_strategy": "parameter_server"}, "'parameter_server' under torchrun"),
        ("torchrun", 4, {}, "torchrun started 4 processes, and tensorflow_strategy='mirrored' has 1"),
        ("distributed", 1, {"tensorflow_strategy": "parameter_server"}, "has 4 for 2 replicas"),
        ("distributed", 4, {"tensorflow_strategy": "parameter_server"}, ""),
        ("torchrun", 1, {}, ""),
        ("torchrun", 3, {"tensorflow_strategy": "multi_worker"}, ""),
    ],
)
def test_world_unlike_the_tensorflow_plan_is_refused(
    launcher: str, processes: int, settings: dict[str, Any], words: str
) -> None:
    layout = lay_out(DistributedConfig(backend="tensorflow", **settings), 1, 2)
    plan = Plan("runs/x", BatchPlan(1), mesh=MeshSpec(dp_replicate=2), engine={**vars(layout), "tasks": layout.tasks})
    env = WorkerEnv(world_size=processes, local_world_size=processes, launcher=launcher)
    with pytest.raises(PlanError) if words else nullcontext() as caught:
        check_world(plan, env)
    assert words in str(caught and caught.value)


def test_lost_peer_is_distinguished_from_an_own_error() -> None:
    def error(kind: str, text: str) -> Exception:
        return type(kind, (Exception,), {})(text)

    own = "{{function_node __wrapped__Cholesky_device_/job:worker/replica:0/task:0/device:CPU:0}} failed [Op:Cholesky]"
    lost = (
        "{{function_node __inference_step_31}} Collective ops is aborted by: Error reported from /job:worker/task:1: "
        "The following tasks are unhealthy (stopped sending heartbeats)"
    )
    remote = "Connection reset by peer\nAdditional GRPC error information from remote target /job:ps/replica:0/task:0"
    assert not any(is_collateral(error(kind, own)) for kind in ("InternalError", "UnavailableError", "AbortedError"))
    assert all(is_collateral(error(kind, lost)) for kind in ("InternalError", "UnavailableError"))
    assert is_collateral(error("UnavailableError", remote))
    assert not is_collateral(error("InternalError", own + remote)), "what a worker's own kernel told the chief"


def test_mpirun_on_several_hosts_without_tf_config_is_refused() -> None:
    layout = lay_out(DistributedConfig(backend="tensorflow", tensorflow_strategy="multi_worker"), 2, 1)
    plan = Plan("runs/x", BatchPlan(1), engine=vars(layout))
    env = WorkerEnv(0, 0, 2, 1, num_nodes=2, master_port=29500, launcher="mpirun")
    with environ_with({"TF_CONFIG": ""}), pytest.raises(ConfigError, match="TF_CONFIG is not set"):
        announce_in_world(plan, env)
