"""What is read of a machine's network: trees like /sys, and what ibstat, ibstatus and nvidia-smi print."""

from __future__ import annotations

from pathlib import Path

from distributed.planner.network.interfaces import interface_towards, read_interfaces
from distributed.planner.network.limits import read_limits
from distributed.planner.network.machine import NetworkInterface, RdmaPort
from distributed.planner.network.rdma import parse_ibstat, parse_ibstatus, read_rdma
from distributed.planner.network.topology import find_gpu_direct, parse_topology

IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4123
\tNumber of ports: 1
\tFirmware version: 20.31.1014
\tHardware version: 0
\tNode GUID: 0x0c42a10300f2a1b4
\tSystem image GUID: 0x0c42a10300f2a1b4
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 200
\t\tBase lid: 133
\t\tLMC: 0
\t\tSM lid: 1
\t\tCapability mask: 0x2651e848
\t\tPort GUID: 0x0c42a10300f2a1b4
\t\tLink layer: InfiniBand
CA 'mlx4_0'
\tCA type: MT4099
\tNumber of ports: 2
\tFirmware version: 2.42.5000
\tPort 1:
\t\tState: Down
\t\tPhysical state: Disabled
\t\tRate: 10
\t\tLink layer: InfiniBand
\tPort 2:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 56
\t\tLink layer: Ethernet
ibpanic: [1323906] main: stat of IB device 'mlx5_8' failed: No such file or directory
"""

IBSTATUS = """\
Infiniband device 'mlx5_0' port 1 status:
\tdefault gid:\t fe80:0000:0000:0000:8ae9:a4ff:fe9c:7f1a
\tbase lid:\t 0x0
\tsm lid:\t\t 0x0
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 100 Gb/sec (4X EDR)
\tlink_layer:\t Ethernet

Infiniband device 'mlx5_1' port 1 status:
\tdefault gid:\t fe80:0000:0000:0000:0000:0000:0000:0000
\tbase lid:\t 0xffff
\tsm lid:\t\t 0x0
\tstate:\t\t 1: DOWN
\tphys state:\t 3: Disabled
\trate:\t\t 2.5 Gb/sec (1X SDR)
\tlink_layer:\t InfiniBand
"""

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tNODE\t0-23,96-119\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tNODE\t0-23,96-119\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tNODE\tPXB\t24-47,120-143\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPHB\t24-47,120-143\t1\t\tN/A
NIC0\tPIX\tNODE\tNODE\tSYS\t X \tNODE
NIC1\tNODE\tNODE\tPXB\tPHB\tNODE\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_3
"""

OLDER_TOPOLOGY = """\
        GPU0    GPU1    mlx5_0  mlx5_1  CPU Affinity
GPU0     X      PHB     PIX     SYS     0-23,48-71
GPU1    PHB      X      SYS     SYS     0-23,48-71
mlx5_0  PIX     SYS      X      SYS
mlx5_1  SYS     SYS     SYS      X
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def interface(name: str, **files: str) -> dict[str, str]:
    known = {"type": "1", "operstate": "up", "flags": "0x1003", "mtu": "1500"} | files
    return {f"class/net/{name}/{file}": text for file, text in known.items()}


def test_interfaces_are_told_apart_by_what_sys_says(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **interface("lo", type="772", operstate="unknown", flags="0x9", mtu="65536"),
            **interface("ens5", speed="25000", mtu="9001"),
            **interface("docker0", operstate="down"),
            **interface("br-0123456789ab"),
            **interface("br0"),
            **interface("veth12"),
            **interface("ib0", type="32", speed="200000", mtu="2044"),
            **interface("bond0", speed="-1"),
            **interface("wg0", type="65534", operstate="unknown"),
            **interface("tap0", tun_flags="0x1002"),
            **interface("eno2", flags="0x1002"),
            "class/net/bonding_masters": "bond0",
        },
    )
    for folder in ("docker0/bridge", "br0/bridge", "br-0123456789ab/bridge", "bond0/bonding", "veth12/brport"):
        (root / "class/net" / folder).mkdir()
    (root / "drivers/ena").mkdir(parents=True)
    (root / "class/net/ens5/device").mkdir()
    (root / "class/net/ens5/device/driver").symlink_to(root / "drivers/ena")
    found = {one.name: one for one in read_interfaces(root, {"ens5": ["10.0.0.5"], "ib0": ["10.1.0.5"]})}
    assert {name: one.kind for name, one in found.items()} == {
        "lo": "loopback",
        "ens5": "ethernet",
        "docker0": "docker bridge",
        "br-0123456789ab": "docker bridge",
        "br0": "bridge",
        "veth12": "bridge port",
        "ib0": "infiniband",
        "bond0": "bond",
        "wg0": "tunnel",
        "tap0": "tunnel",
        "eno2": "ethernet",
    }
    ens5 = NetworkInterface("ens5", "ethernet", True, ("10.0.0.5",), speed_mbit=25000, mtu=9001, driver="ena")
    assert found["ens5"] == ens5
    assert found["ens5"].carries
    assert [name for name, one in found.items() if not one.is_up] == ["docker0", "eno2"]
    assert found["bond0"].speed_mbit == 0
    assert not found["bond0"].carries, "it has no address"


def test_real_loopback_of_this_machine_is_found() -> None:
    loopback = [one for one in read_interfaces() if one.kind == "loopback"]
    assert loopback
    assert "127.0.0.1" in loopback[0].addresses
    assert loopback[0].is_up


def test_interface_towards_a_host_has_the_source_address() -> None:
    far = [one for one in read_interfaces() if one.carries]
    for one in far[:1]:
        assert interface_towards(one.addresses[0], 9, far) == one.name
    assert interface_towards("127.0.0.1", 9, [NetworkInterface("lo", "loopback", addresses=("127.0.0.1",))]) == ""
    assert interface_towards("no-such-host.invalid", 9, []) == ""


def test_ibstat_shows_each_port_of_each_device() -> None:
    assert parse_ibstat(IBSTAT) == (
        RdmaPort("mlx5_0", 1, "InfiniBand", True, 200.0, "Active", "MT4123", "20.31.1014"),
        RdmaPort("mlx4_0", 1, "InfiniBand", False, 10.0, "Down", "MT4099", "2.42.5000"),
        RdmaPort("mlx4_0", 2, "Ethernet", True, 56.0, "Active", "MT4099", "2.42.5000"),
    )
    assert parse_ibstat("") == () == parse_ibstat("ibpanic: [7] main: can't list devices")


def test_ibstatus_shows_ports_and_roce() -> None:
    first, second = parse_ibstatus(IBSTATUS)
    assert (first.device, first.kind, first.is_active, first.rate_gbit) == ("mlx5_0", "RoCE", True, 100.0)
    assert (second.device, second.kind, second.is_active, second.state) == ("mlx5_1", "InfiniBand", False, "Down")
    assert second.rate_gbit == 2.5


def test_sys_shows_ports_and_ibstat_their_models(tmp_path: Path) -> None:
    port = {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)", "link_layer": "InfiniBand"}
    files = {f"class/infiniband/mlx5_0/ports/1/{name}": text for name, text in port.items()}
    files |= {f"class/infiniband/rdmap0s6/ports/1/{name}": text for name, text in port.items()}
    root = write(tmp_path, files | {"class/infiniband/rdmap0s6/ports/1/link_layer": "Unspecified"})
    (root / "drivers/efa").mkdir(parents=True)
    (root / "class/infiniband/rdmap0s6/device").mkdir()
    (root / "class/infiniband/rdmap0s6/device/driver").symlink_to(root / "drivers/efa")
    first, second = read_rdma(root, lambda command: IBSTAT if command == ["ibstat"] else "")
    assert (first.device, first.model, first.rate_gbit, first.is_active) == ("mlx5_0", "MT4123", 200.0, True)
    assert (second.device, second.kind) == ("rdmap0s6", "EFA")


def test_hidden_sys_leaves_it_to_the_tools(tmp_path: Path) -> None:
    assert len(read_rdma(tmp_path, lambda command: IBSTAT if command == ["ibstat"] else "")) == 3
    assert len(read_rdma(tmp_path, lambda command: IBSTATUS if command == ["ibstatus"] else "")) == 2
    assert read_rdma(tmp_path, lambda command: "") == ()


def test_topology_has_paths_by_names_of_cards() -> None:
    found = parse_topology(TOPOLOGY)
    assert found.gpus == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert found.cards == ("mlx5_0", "mlx5_3")
    assert found.between_gpus() == ("NV18",)
    assert [found.nearest_card(gpu) for gpu in found.gpus] == ["PIX", "NODE", "PXB", "PHB"]


def test_topology_of_older_drivers_names_cards_itself() -> None:
    found = parse_topology(OLDER_TOPOLOGY)
    assert found.cards == ("mlx5_0", "mlx5_1")
    assert found.between_gpus() == ("PHB",)
    assert [found.nearest_card(gpu) for gpu in found.gpus] == ["PIX", "SYS"]


def test_topology_without_cards_or_without_output_is_empty() -> None:
    alone = parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t\tN/A\n")
    assert alone.gpus == ("GPU0",)
    assert not alone.cards
    assert not alone.paths
    assert parse_topology("").gpus == () == parse_topology("No devices were found\n").gpus


def test_gpu_direct_needs_a_module_or_open_driver() -> None:
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161"
    assert find_gpu_direct("ib_core 1 0\nnv_peer_mem 1 0", closed, "4.18.0") == "nv_peer_mem"
    assert find_gpu_direct("ib_core 1 0", closed, "6.1.0") == ""
    assert find_gpu_direct("", "NVIDIA UNIX Open Kernel Module for x86_64", "5.4.0") == "", "dmabuf came with 5.12"


def test_limits_are_those_of_either_cgroup_version(tmp_path: Path) -> None:
    second = write(tmp_path / "2", {"sys/fs/cgroup/memory.max": "1073741824", "sys/fs/cgroup/cpu.max": "150000 100000"})
    write(second, {".dockerenv": ""})
    found = read_limits(second)
    assert (found.memory_bytes, found.cpus, found.is_container, found.shm_bytes) == (2**30, 1.5, True, None)
    first = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    found = read_limits(write(tmp_path / "1", first))
    assert (found.memory_bytes, found.cpus, found.is_container) == (None, None, False)
