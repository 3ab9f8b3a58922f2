"""distributed doctor --network: what connects this machine to others, what keeps it back, and what it calls for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from distributed.core.choices import FindingState
from distributed.planner.network.machine import NetworkMachine, RdmaPort
from distributed.planner.network.profiles import CLOUDS
from distributed.planner.network.proposals import SMALL_SHM_BYTES, NetworkRun, Proposal, propose

_FEWEST_FILES = 4096  # sockets of a rank with many peers are open files
_MEMLOCK_BYTES = 2**30


@dataclass(frozen=True)
class Finding:
    """One fact. `state` is ok, missing (something optional), or broken (nothing can be trained)."""

    name: str
    value: str
    state: FindingState = "ok"
    do: str = ""


def show_network(machine: NetworkMachine, environ: Mapping[str, str], *, as_json: bool, console: Console) -> None:
    """Print all of it. `environ`: what the user has set already stands beside what is proposed."""
    run = NetworkRun(nodes=2, device="cuda" if machine.gpus else "cpu")
    proposals, findings = propose(machine, run), list(_findings(machine))
    if as_json:
        print(json.dumps(_record(machine, findings, proposals, environ), indent=2))
        return
    for table in (_interfaces(machine), _ports(machine), _facts(findings), _proposals(proposals, environ)):
        console.print(table)
        console.print()
    console.print("set by: network_profile=auto, for several nodes; others: " + ", ".join(CLOUDS))
    console.print("measure: distributed bench network --num-nodes 2 --master-addr HOST   (on both nodes)")


def _record(
    machine: NetworkMachine,
    findings: list[Finding],
    proposals: tuple[Proposal, ...],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    paths = [{"from": one, "to": other, "path": path} for (one, other), path in machine.topology.paths.items()]
    plain = asdict(machine) | {"topology": asdict(machine.topology) | {"paths": paths}}
    return {
        "machine": plain,
        "carrier": machine.carrier.name if machine.carrier is not None else None,
        "findings": [asdict(finding) for finding in findings],
        "proposals": [asdict(each) | {"is_set_to": environ.get(each.name)} for each in proposals],
    }


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _interfaces(machine: NetworkMachine) -> Table:
    table = _table("Interfaces", ("name", "kind", "", "speed", "MTU", "driver", "addresses"))
    for one in machine.interfaces:
        leads = " → other nodes" if machine.carrier is one else ""
        state, addresses = "up" if one.is_up else "down", ", ".join(one.addresses) or "–"
        row = (one.name + leads, one.kind, state, one.gbit or "not known", str(one.mtu), one.driver or "–", addresses)
        table.add_row(*row, style=None if one.carries or one.kind == "loopback" else "dim")
    return table


def _ports(machine: NetworkMachine) -> Table | str:
    if not machine.rdma:
        return "InfiniBand, RoCE, EFA: none that /sys, ibstat or ibstatus show"
    table = _table("InfiniBand, RoCE, EFA", ("port", "kind", "", "speed", "model", "firmware"))
    for port in machine.rdma:
        speed = f"{port.rate_gbit:g} Gbit/s" if port.rate_gbit else "not known"
        row = (f"{port.device}/{port.port}", port.kind, _state_of(port), speed, port.model or "–", port.firmware or "–")
        table.add_row(*row, style=None if port.is_active else "yellow")
    return table


def _state_of(port: RdmaPort) -> str:
    return "active" if port.is_active else port.state.lower() or "not active"


def _facts(findings: list[Finding]) -> Table:
    table = _table("GPUs and limits", ("", "", ""))
    for found in findings:
        advice = f"{found.value}\ndo: {found.do}" if found.do else found.value
        table.add_row(found.state, found.name, advice, style="yellow" if found.state == "missing" else None)
    return table


def _proposals(proposals: tuple[Proposal, ...], environ: Mapping[str, str]) -> Table | str:
    if not proposals:
        return "Proposed: nothing, as no interface leads to other machines, and there are no GPUs"
    table = _table("Proposed", ("variable", "for runs", "reason"))
    for each in proposals:
        own = environ.get(each.name)
        is_set = "" if own is None else " (as it is set)" if own == each.value else f" (is set to {own})"
        table.add_row(each.assignment + is_set, each.when or "all", each.reason)
    return table


def _findings(machine: NetworkMachine) -> Iterator[Finding]:
    yield from _gpus(machine)
    yield from _limits(machine)


def _gpus(machine: NetworkMachine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("GPUs", "none that nvidia-smi shows: ranks are CPU processes, and gloo sends")
        return
    topology = machine.topology
    kinds = topology.between_gpus()
    if machine.gpus > 1:
        yield Finding("between GPUs", ", ".join(kinds) or "not known: nvidia-smi topo -m says nothing")
    for gpu in topology.gpus:
        cards = [f"{card} {topology.paths[gpu, card]}" for card in topology.cards if (gpu, card) in topology.paths]
        if cards:
            yield Finding(f"{gpu} to network cards", ", ".join(cards))
    if machine.rdma:
        yield Finding(
            "GPUDirect",
            machine.gpu_direct or "neither nvidia_peermem nor dmabuf: what cards send goes through host memory",
            "ok" if machine.gpu_direct else "missing",
            "" if machine.gpu_direct else "on the host: modprobe nvidia_peermem",
        )


def _limits(machine: NetworkMachine) -> Iterator[Finding]:
    limits = machine.limits
    where = "this container" if limits.is_container else "this machine"
    if limits.shm_bytes is not None:
        small = limits.shm_bytes < SMALL_SHM_BYTES
        text = f"{limits.shm_bytes / 2**30:.2f} GiB" + ("; ranks of one node exchange through it" if small else "")
        do = "docker run --shm-size=2g …, or --ipc=host" if small else ""
        yield Finding("/dev/shm", text, "missing" if small else "ok", do)
    memlock, needs = limits.memlock_bytes, bool(machine.rdma)
    low = needs and memlock is not None and memlock < _MEMLOCK_BYTES
    yield Finding(
        "locked memory",
        ("unlimited" if memlock is None else f"{memlock / 2**20:g} MiB")
        + ("; InfiniBand registers its buffers there" if low else ""),
        "missing" if low else "ok",
        "docker run --ulimit memlock=-1 …, or LimitMEMLOCK=infinity of the service" if low else "",
    )
    files = limits.open_files
    few = files is not None and files < _FEWEST_FILES
    yield Finding(
        "open files",
        "unlimited" if files is None else str(files),
        "missing" if few else "ok",
        f"ulimit -n {_FEWEST_FILES}, which a rank with many peers needs" if few else "",
    )
    memory = "no limit" if limits.memory_bytes is None else f"{limits.memory_bytes / 2**30:.1f} GiB"
    cpus = "no limit" if limits.cpus is None else f"{limits.cpus:g} cores"
    yield Finding(f"cgroup of {where}", f"memory: {memory}; CPU time: {cpus}")
    if machine.rdma and not machine.opens_rdma:
        do = "docker run --device=/dev/infiniband …"
        yield Finding("/dev/infiniband", f"{where} cannot open the ports", "missing", do)
