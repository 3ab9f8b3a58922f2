"""What described machines call for, and what network_profile makes of it: no device, no network, no process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distributed.planner.network.choice import NetworkChoice, choose_variables, nccl_interfaces, wrong_names
from distributed.planner.network.machine import (
    GpuTopology,
    NetworkInterface,
    NetworkMachine,
    ProcessLimits,
    RdmaPort,
)
from distributed.planner.network.profiles import CLOUDS
from distributed.planner.network.proposals import NetworkRun, propose

LO = NetworkInterface("lo", "loopback", addresses=("127.0.0.1",), mtu=65536)
ETH0 = NetworkInterface("eth0", addresses=("10.0.0.5",), speed_mbit=10_000, mtu=1500)
ENS8 = NetworkInterface("ens8", addresses=("10.128.0.7",), speed_mbit=100_000, mtu=8896, driver="gve")
DOCKER = NetworkInterface("docker0", "docker bridge", addresses=("172.17.0.1",))
CPUS = NetworkMachine((LO, ETH0, DOCKER), route="eth0")
GPU_RUN, CPU_RUN = NetworkRun(), NetworkRun(device="cpu")


def gpus(**changes: object) -> NetworkMachine:
    """Eight GPUs of Hopper on NVLink, with 10 Gbit/s Ethernet."""
    names = tuple(f"GPU{number}" for number in range(8))
    paths = {(one, other): "NV18" for one in names for other in names if one != other}
    machine = NetworkMachine(
        (LO, ETH0, DOCKER), gpus=8, compute_capability=9.0, topology=GpuTopology(paths, names), route="eth0"
    )
    return replace(machine, limits=ProcessLimits(shm_bytes=2**34), **changes)  # type: ignore[arg-type]


def cards(path: str) -> GpuTopology:
    topology = gpus().topology
    paths = {(gpu, f"mlx5_{n}"): path if n == i else "SYS" for i, gpu in enumerate(topology.gpus) for n in range(8)}
    return replace(topology, paths={**topology.paths, **paths}, cards=tuple(f"mlx5_{number}" for number in range(8)))


def names(machine: NetworkMachine, run: NetworkRun = GPU_RUN) -> dict[str, str]:
    return {each.name: each.value for each in propose(machine, run)}


def test_cpu_machine_gets_names_of_its_interface_only() -> None:
    assert names(CPUS, CPU_RUN) == {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    assert names(CPUS, replace(CPU_RUN, nodes=1)) == {}


def test_gpus_of_one_node_need_no_network() -> None:
    assert names(gpus(), replace(GPU_RUN, nodes=1)) == {"NCCL_DEBUG": "WARN", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_slow_ethernet_needs_no_more_sockets() -> None:
    found = names(gpus())
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0", "exactly that one: NCCL takes eth0 for eth01 too"
    assert not {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_IB_DISABLE", "NCCL_BUFFSIZE"} & found.keys()


def test_fast_ethernet_gets_more_sockets_but_not_beside_rdma() -> None:
    fast = gpus(interfaces=(LO, ENS8), route="ens8")
    found = names(fast)
    assert (found["NCCL_SOCKET_NTHREADS"], found["NCCL_NSOCKS_PERTHREAD"]) == ("4", "4")
    assert int(found["NCCL_SOCKET_NTHREADS"]) * int(found["NCCL_NSOCKS_PERTHREAD"]) <= 64, "NCCL's limit"
    assert "NCCL_SOCKET_NTHREADS" not in names(replace(fast, rdma=(RdmaPort("mlx5_0"),)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rdma": (RdmaPort("mlx5_0", is_active=False),)}, "no port of mlx5_0 is active"),
        ({"rdma": (RdmaPort("mlx5_0"),), "opens_rdma": False}, "this container has no /dev/infiniband"),
    ],
)
def test_infiniband_that_cannot_be_used_is_disabled(changes: dict[str, object], why: str) -> None:
    found = {each.name: each for each in propose(gpus(**changes), GPU_RUN)}
    assert found["NCCL_IB_DISABLE"].value == "1"
    assert why in found["NCCL_IB_DISABLE"].reason
    assert "NCCL_IB_DISABLE" not in names(gpus(rdma=(RdmaPort("mlx5_0"), RdmaPort("mlx5_1", is_active=False))))


@pytest.mark.parametrize(
    ("path", "module", "level"),
    [("PHB", "nvidia_peermem", "PHB"), ("PIX", "nvidia_peermem", None), ("SYS", "dmabuf", None), ("PHB", "", None)],
)
def test_gpu_direct_is_widened_only_to_the_own_bridge(path: str, module: str, level: str | None) -> None:
    machine = gpus(rdma=(RdmaPort("mlx5_0"),), topology=cards(path), gpu_direct=module)
    assert names(machine).get("NCCL_NET_GDR_LEVEL") == level


def test_small_shared_memory_shrinks_buffers_without_nvlink() -> None:
    small = ProcessLimits(shm_bytes=64 * 2**20)
    by_pcie = GpuTopology({("GPU0", "GPU1"): "PHB", ("GPU1", "GPU0"): "PHB"}, ("GPU0", "GPU1"))
    assert names(replace(gpus(), limits=small, topology=by_pcie))["NCCL_BUFFSIZE"] == str(2**20)
    assert "NCCL_BUFFSIZE" not in names(replace(gpus(), limits=small)), "NVLink uses no shared memory"
    assert "NCCL_BUFFSIZE" not in names(replace(gpus(), topology=by_pcie))


def test_one_queue_is_for_tensor_parallelism_before_blackwell() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in names(gpus(), replace(GPU_RUN, orders_kernels=False))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in names(gpus(compute_capability=10.0))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in names(gpus(compute_capability=0.0)), "not known"


def test_carrier_is_on_the_route_else_the_fastest() -> None:
    both = (LO, ETH0, ENS8, DOCKER)
    assert names(replace(CPUS, interfaces=both, route="eth0"), CPU_RUN)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert names(replace(CPUS, interfaces=both, route=""), CPU_RUN)["GLOO_SOCKET_IFNAME"] == "ens8"
    down = replace(ENS8, is_up=False)
    assert names(replace(CPUS, interfaces=(LO, ETH0, down), route=""), CPU_RUN)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert names(NetworkMachine((LO, DOCKER)), CPU_RUN) == {}, "a bridge of containers leads nowhere"
    unconfigured = replace(ENS8, addresses=("fe80::1", "169.254.7.7"))
    assert names(replace(CPUS, interfaces=(LO, ETH0, unconfigured), route=""), CPU_RUN)["GLOO_SOCKET_IFNAME"] == "eth0"


def test_every_proposal_has_a_reason() -> None:
    machine = gpus(rdma=(RdmaPort("mlx5_0"),), topology=cards("PHB"), gpu_direct="dmabuf")
    assert all(len(each.reason) > 20 for each in propose(machine, GPU_RUN))


def chosen(profile: str, machine: NetworkMachine, run: NetworkRun = GPU_RUN, **environ: str) -> NetworkChoice:
    return choose_variables(profile, machine, run, environ)


def test_profile_none_sets_and_says_nothing() -> None:
    assert chosen("none", gpus()) == NetworkChoice({})


def test_profile_auto_is_what_is_proposed() -> None:
    assert chosen("auto", gpus()).variables == names(gpus())


def test_profile_of_gcp_has_sockets_and_names_jumbo_frames() -> None:
    machine = gpus(interfaces=(LO, ENS8), route="ens8")
    found = chosen("gcp", machine)
    assert found.variables["NCCL_SOCKET_IFNAME"] == "=ens8"
    assert found.variables["NCCL_IB_DISABLE"] == "1"
    assert found.variables["NCCL_BUFFSIZE"] == str(8 * 2**20)
    assert not any("MTU" in decision.choice for decision in found.decisions)
    small = chosen("gcp", replace(machine, interfaces=(LO, replace(ENS8, mtu=1460))))
    assert any("ens8 has an MTU of 1460" in decision.choice for decision in small.decisions)


def test_profile_of_efa_wants_its_device_and_names_the_plugin() -> None:
    efa = gpus(rdma=(RdmaPort("rdmap0s6", layer="EFA"),))
    found = chosen("aws-efa", efa)
    assert (found.variables["FI_PROVIDER"], found.problems) == ("efa", ())
    assert any("aws-ofi-nccl was not found" in decision.choice for decision in found.decisions)
    with_plugin = replace(efa, files=("/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so",))
    assert not any("aws-ofi-nccl" in decision.choice for decision in chosen("aws-efa", with_plugin).decisions)
    (problem,) = chosen("aws-efa", gpus(rdma=(RdmaPort("mlx5_0"),))).problems
    assert "no EFA port" in problem.what
    assert "mlx5_0 (InfiniBand" in problem.why
    assert "eth0 (ethernet)" in problem.why


def test_profile_of_azure_wants_its_topology_file() -> None:
    machine = gpus(rdma=(RdmaPort("mlx5_0"),), files=("/opt/microsoft/ndv5-topo.xml",))
    assert chosen("azure-ib", machine).variables["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml"
    (problem,) = chosen("azure-ib", replace(machine, files=())).problems
    assert "NCCL_TOPO_FILE" in problem.what
    own = chosen("azure-ib", replace(machine, files=()), NCCL_TOPO_FILE="/my.xml")
    assert own.problems == ()
    assert "NCCL_TOPO_FILE" not in own.variables


@pytest.mark.parametrize("profile", CLOUDS)
def test_profile_without_an_interface_names_those_there_are(profile: str) -> None:
    machine = gpus(interfaces=(LO, replace(ETH0, is_up=False)), route="")
    problem = chosen(profile, machine).problems[0]
    assert "no interface" in problem.what
    assert "lo (loopback), eth0 (ethernet, down)" in problem.why


@pytest.mark.parametrize("profile", CLOUDS)
def test_profile_on_cpus_sets_nothing_of_nccl(profile: str) -> None:
    machine = replace(CPUS, rdma=(RdmaPort("a", layer="EFA"), RdmaPort("b")), files=("/opt/microsoft/ndv4-topo.xml",))
    assert chosen(profile, machine, CPU_RUN).variables.keys() == {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


def test_variable_of_the_user_is_kept_and_said() -> None:
    found = chosen("gcp", gpus(), NCCL_SOCKET_NTHREADS="2", NCCL_DEBUG="WARN")
    assert "NCCL_SOCKET_NTHREADS" not in found.variables
    said = [str(decision) for decision in found.decisions]
    assert any(line.startswith("NCCL_SOCKET_NTHREADS=2 is kept: ") and "would set 4" in line for line in said)
    assert not any("NCCL_DEBUG" in line for line in said), "it is what the profile would set"


def test_rank_takes_what_its_launcher_set_for_its_own() -> None:
    first = chosen("gcp", gpus())
    again = choose_variables("gcp", gpus(), GPU_RUN, first.to_environ())
    assert again == first


def test_wrong_interface_is_named_with_those_there_are() -> None:
    (problem,) = wrong_names(CPUS, {"GLOO_SOCKET_IFNAME": "eth0,eth7"}, uses_nccl=False, who="rank 3 on node1")
    assert problem.what == "rank 3 on node1: GLOO_SOCKET_IFNAME=eth0,eth7, but this machine has no interface eth7"
    assert "lo (loopback), eth0 (ethernet), docker0 (docker bridge)" in problem.why
    assert problem.do == "export GLOO_SOCKET_IFNAME=eth0"
    assert not wrong_names(CPUS, {"NCCL_SOCKET_IFNAME": "ib"}, uses_nccl=False), "nothing reads it"
    assert wrong_names(CPUS, {"NCCL_SOCKET_IFNAME": "ib"}, uses_nccl=True)
    assert not wrong_names(CPUS, {"NCCL_SOCKET_IFNAME": "^docker"}, uses_nccl=True)
    assert not wrong_names(CPUS, {"GLOO_SOCKET_IFNAME": "eth0:1"}, uses_nccl=False)
    assert not wrong_names(NetworkMachine(), {"GLOO_SOCKET_IFNAME": "eth7"}, uses_nccl=False), "nothing is known"


def test_nccl_takes_beginnings_whole_names_and_exclusions() -> None:
    there = ["lo", "eth0", "eth01", "docker0"]
    assert nccl_interfaces("eth0", there) == ["eth0", "eth01"]
    assert nccl_interfaces("=eth0", there) == ["eth0"]
    assert nccl_interfaces("^lo,docker", there) == ["eth0", "eth01"]
    assert nccl_interfaces("=eth", there) == []


def test_document_names_every_variable_and_profile() -> None:
    page = (Path(__file__).parents[2] / "docs" / "network.md").read_text(encoding="utf-8")
    small = ProcessLimits(shm_bytes=2**20)
    by_pcie = replace(cards("PHB"), paths=dict.fromkeys(cards("PHB").paths, "PHB"))
    machines = (
        replace(gpus(rdma=(RdmaPort("mlx5_0"),), topology=by_pcie, gpu_direct="dmabuf"), limits=small),
        gpus(rdma=(RdmaPort("mlx5_0", is_active=False),), interfaces=(LO, ENS8), route="ens8"),
    )
    proposed = {name for machine in machines for name in names(machine)}
    assert len(proposed) == 10, "every proposal is made for one of these machines"
    wanted = {*proposed, *CLOUDS, *(variable.name for cloud in CLOUDS.values() for variable in cloud.variables)}
    assert [word for word in sorted(wanted) if f"`{word}" not in page] == []
