"""NetworkMachine: what connects a machine to others, as plain data. `probe` reads one, tests describe others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal

InterfaceKind = Literal[
    "loopback", "ethernet", "bond", "infiniband", "bridge", "docker bridge", "bridge port", "tunnel"
]
_CARRYING: tuple[InterfaceKind, ...] = ("ethernet", "bond", "infiniband")


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of this machine, or of this container."""

    name: str
    kind: InterfaceKind = "ethernet"
    is_up: bool = True
    addresses: tuple[str, ...] = ()
    speed_mbit: int = 0  # the link's nominal rate; 0: not known
    mtu: int = 0
    driver: str = ""  # "": it is virtual, or the kernel does not tell

    @property
    def reachable_at(self) -> tuple[str, ...]:
        """Its addresses without those that the system gives to any interface, which lead no further than its link."""
        return tuple(address for address in self.addresses if not ip_address(address).is_link_local)

    @property
    def carries(self) -> bool:
        """Whether it may lead to another machine: containers' bridges and tunnels seldom do, and are left out."""
        return self.is_up and bool(self.reachable_at) and self.kind in _CARRYING

    @property
    def gbit(self) -> str:
        """
        >>> NetworkInterface("eth0", speed_mbit=2500).gbit, NetworkInterface("eth0").gbit
        ('2.5 Gbit/s', '')
        """
        return f"{self.speed_mbit / 1000:g} Gbit/s" if self.speed_mbit else ""


@dataclass(frozen=True)
class RdmaPort:
    """A port of an InfiniBand, RoCE or EFA device."""

    device: str
    port: int = 1
    layer: str = "InfiniBand"  # or Ethernet (RoCE), or EFA
    is_active: bool = True
    rate_gbit: float = 0.0
    state: str = ""  # as the driver says it, where it is not active
    model: str = ""
    firmware: str = ""

    @property
    def kind(self) -> str:
        return "RoCE" if self.layer == "Ethernet" else self.layer


@dataclass(frozen=True)
class GpuTopology:
    """How the GPUs of a machine and its network cards are joined: NV18, PIX, PXB, PHB, NODE or SYS, nearest first."""

    paths: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (GPU, GPU or network card)
    gpus: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()  # by their device's name

    def between_gpus(self) -> tuple[str, ...]:
        """The kinds of path between any two GPUs, each once."""
        pairs = (self.paths.get((one, other), "") for one in self.gpus for other in self.gpus if one != other)
        return tuple(dict.fromkeys(path for path in pairs if path))

    def nearest_card(self, gpu: str) -> str:
        """The path from a GPU to the network card that is nearest to it; "": there is none."""
        found = [self.paths[gpu, card] for card in self.cards if (gpu, card) in self.paths]
        return min(found, key=_distance, default="")


@dataclass(frozen=True)
class ProcessLimits:
    """What a container or the system keeps from a process. None: there is no limit, or none is known."""

    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    open_files: int | None = None
    memory_bytes: int | None = None
    cpus: float | None = None
    is_container: bool = False


@dataclass(frozen=True)
class NetworkMachine:
    """What connects a machine to others, and its GPUs to each other."""

    interfaces: tuple[NetworkInterface, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    opens_rdma: bool = True  # whether /dev/infiniband is there: a container may have the ports without it
    gpus: int = 0
    compute_capability: float = 0.0  # the lowest of them; 0: not known
    topology: GpuTopology = field(default_factory=GpuTopology)
    gpu_direct: str = ""  # what lets a network card read GPU memory: "nvidia_peermem", "dmabuf"; "": nothing
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    route: str = ""  # the interface on the way to the other nodes, or of the default route
    files: tuple[str, ...] = ()  # of those that profiles look for, the ones that are there

    def named(self, name: str) -> NetworkInterface | None:
        return next((one for one in self.interfaces if one.name == name), None)

    @property
    def usable_rdma(self) -> tuple[RdmaPort, ...]:
        return tuple(port for port in self.rdma if port.is_active and self.opens_rdma)

    @property
    def carrier(self) -> NetworkInterface | None:
        """The interface that leads to other machines: the one of the route; else the fastest."""
        on_route = self.named(self.route)
        if on_route is not None and on_route.kind != "loopback":
            return on_route
        return max((one for one in self.interfaces if one.carries), key=lambda one: one.speed_mbit, default=None)


def list_interfaces(machine: NetworkMachine) -> str:
    """The interfaces in words, for an error.

    >>> list_interfaces(NetworkMachine((NetworkInterface("lo", "loopback"), NetworkInterface("eth1", is_up=False))))
    'lo (loopback), eth1 (ethernet, down)'
    """
    described = (f"{one.name} ({one.kind}{'' if one.is_up else ', down'})" for one in machine.interfaces)
    return ", ".join(described) or "no interface"


def _distance(path: str) -> int:
    """
    >>> sorted(["SYS", "PHB", "PIX", "NV4"], key=_distance)
    ['NV4', 'PIX', 'PHB', 'SYS']
    """
    order = ("PIX", "PXB", "PXN", "PHB", "NODE", "SYS")
    return order.index(path) if path in order else -1
