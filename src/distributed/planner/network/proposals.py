"""What a machine's network calls for: variables of NCCL and gloo, each with its reason, and none without effect.

described machine + what is known of the run ──propose──▶ proposals: pure, so that any machine can be described
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distributed.core.choices import Device
from distributed.core.errors import first_of
from distributed.planner.network.machine import NetworkInterface, NetworkMachine

SMALL_SHM_BYTES = 512 * 2**20
_FAST_MBIT = 40_000  # from here on, one TCP connection does not fill a link
_SMALL_BUFFER = 2**20
_OVERLAPS_BY_ITSELF = 10.0  # compute capability: Blackwell has no single queue any more


@dataclass(frozen=True)
class Proposal:
    """A variable for the ranks, and why."""

    name: str
    value: str
    reason: str
    when: str = ""  # the runs it is for; "": all on this machine

    @property
    def assignment(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class NetworkRun:
    """What of a run decides on its variables."""

    nodes: int = 2
    device: Device = "cuda"
    orders_kernels: bool = True  # tensor parallelism, whose collectives are to start before the work beside them


def propose(machine: NetworkMachine, run: NetworkRun) -> tuple[Proposal, ...]:
    """All that apply, the interface first.

    >>> machine = NetworkMachine((NetworkInterface("eth0", addresses=("10.0.0.1",)),))
    >>> [each.assignment for each in propose(machine, NetworkRun(device="cpu"))]
    ['GLOO_SOCKET_IFNAME=eth0', 'TP_SOCKET_IFNAME=eth0']
    """
    return (*name_interface(machine, run), *_for_gpus(machine, run))


def name_interface(machine: NetworkMachine, run: NetworkRun) -> Iterator[Proposal]:
    carrier = machine.carrier
    if carrier is None or run.nodes < 2:
        return
    others = [one.name for one in machine.interfaces if one.reachable_at and one is not carrier]
    beside = f", and not {first_of(others)}" if others else ""
    how = "the other nodes are reached over it" if carrier.name == machine.route else "it is the fastest that is up"
    why = f"{how}{f' ({carrier.gbit})' if carrier.gbit else ''}{beside}"
    yield Proposal(
        "GLOO_SOCKET_IFNAME", carrier.name, f"{why}; gloo would take the address of the host's name", "between nodes"
    )
    yield Proposal(
        "TP_SOCKET_IFNAME", carrier.name, "the same for torch.distributed.rpc", "between nodes, in scripts that use rpc"
    )
    if run.device == "cuda":
        # The equals sign: NCCL takes a name for the beginning of names.
        does = "NCCL begins its connections there" if machine.usable_rdma else "NCCL sends over it"
        yield Proposal("NCCL_SOCKET_IFNAME", f"={carrier.name}", f"{does}: {why}", "between nodes")


def _for_gpus(machine: NetworkMachine, run: NetworkRun) -> Iterator[Proposal]:
    if run.device != "cuda":
        return
    yield Proposal("NCCL_DEBUG", "WARN", "NCCL says what failed, and prints nothing in a good run")
    if run.nodes > 1:
        yield from _between_nodes(machine)
    yield from _shared_memory(machine)
    if run.orders_kernels and 0 < machine.compute_capability < _OVERLAPS_BY_ITSELF:
        yield Proposal(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            "kernels start in the order in which they were launched, so that a collective starts before the matrix "
            "product that it overlaps with",
            "tensor_parallel > 1 without sharded parameters",
        )


def _between_nodes(machine: NetworkMachine) -> Iterator[Proposal]:
    if machine.rdma and not machine.usable_rdma:
        yield Proposal("NCCL_IB_DISABLE", "1", f"{_why_unusable(machine)}, and NCCL would try", "between nodes")
    if machine.usable_rdma:
        yield from _gpu_direct(machine)
    elif machine.carrier is not None and machine.carrier.speed_mbit >= _FAST_MBIT:
        yield from sockets(machine.carrier)


def sockets(carrier: NetworkInterface) -> Iterator[Proposal]:
    """Threads and sockets for a link that one connection does not fill; NCCL allows 64 sockets in all."""
    why = f"one connection, which one core serves, does not fill {carrier.gbit or 'the link'} of {carrier.name}"
    yield Proposal("NCCL_SOCKET_NTHREADS", "4", f"{why}; NCCL has 1 by default", "between nodes")
    yield Proposal("NCCL_NSOCKS_PERTHREAD", "4", f"{why}: 4 for each of 4 threads", "between nodes")


def _why_unusable(machine: NetworkMachine) -> str:
    names = ", ".join(dict.fromkeys(port.device for port in machine.rdma))
    if not any(port.is_active for port in machine.rdma):
        return f"no port of {names} is active"
    return f"{names} cannot be used: this container has no /dev/infiniband"


def _gpu_direct(machine: NetworkMachine) -> Iterator[Proposal]:
    """Where every GPU's nearest card is on its own processor's bridge; through another processor it costs more."""
    topology = machine.topology
    nearest = {topology.nearest_card(gpu) for gpu in topology.gpus}
    if machine.gpu_direct and "PHB" in nearest and nearest <= {"PIX", "PXB", "PHB"}:
        yield Proposal(
            "NCCL_NET_GDR_LEVEL",
            "PHB",
            f"with {machine.gpu_direct}, cards can read GPU memory, and the nearest card of a GPU is behind the "
            "processor's PCIe bridge (PHB), where NCCL would go through host memory",
            "between nodes",
        )


def _shared_memory(machine: NetworkMachine) -> Iterator[Proposal]:
    """GPUs that cannot reach each other exchange through /dev/shm, in buffers for each pair and channel."""
    shm, kinds = machine.limits.shm_bytes, machine.topology.between_gpus()
    by_nvlink = bool(kinds) and all(kind.startswith("NV") for kind in kinds)
    if machine.gpus > 1 and shm is not None and shm < SMALL_SHM_BYTES and not by_nvlink:
        yield Proposal(
            "NCCL_BUFFSIZE",
            str(_SMALL_BUFFER),
            f"/dev/shm has {shm / 2**20:.0f} MiB, and NCCL's buffers of 4 MiB for each pair of GPUs and channel may "
            "not fit; better is more of it: docker run --shm-size=2g …",
        )
