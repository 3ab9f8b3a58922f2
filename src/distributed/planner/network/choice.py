"""NetworkChoice: the variables that a run's network_profile sets on this node, with reasons; and names that are wrong.

network_profile ──┐
NetworkMachine ───┼─ choose ─▶ variables for the ranks of this node, decisions, problems
environment ──────┘            a variable that the user has set stays as it is, and that is said
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from distributed.core.env import NETWORK
from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.planner.network.machine import NetworkMachine, list_interfaces
from distributed.planner.network.profiles import CLOUDS, CloudProfile
from distributed.planner.network.proposals import NetworkRun, Proposal, name_interface, propose

_EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # names, with commas between them


@dataclass(frozen=True)
class NetworkChoice:
    """What a profile comes to on one node."""

    variables: Mapping[str, str]
    decisions: tuple[Decision, ...] = ()
    problems: tuple[Problem, ...] = ()

    def to_environ(self) -> dict[str, str]:
        """The variables, and which of them are not the user's own: a rank that chooses again would take them for it."""
        return {**self.variables, NETWORK: ",".join(self.variables)} if self.variables else {}


def choose_variables(
    profile: str, machine: NetworkMachine, run: NetworkRun, environ: Mapping[str, str]
) -> NetworkChoice:
    """`environ`: that of the process whose children the ranks are, or of a rank itself.

    >>> from distributed.planner.network.machine import NetworkInterface
    >>> machine = NetworkMachine((NetworkInterface("eth0", addresses=("10.0.0.1",)),))
    >>> choose_variables("auto", machine, NetworkRun(device="cpu"), {"TP_SOCKET_IFNAME": "eth0"}).variables
    {'GLOO_SOCKET_IFNAME': 'eth0'}
    """
    if profile == "none":
        return NetworkChoice({})
    cloud = CLOUDS.get(profile)
    proposed, problems = list(propose(machine, run)), []
    if cloud is not None:
        problems = list(_not_there(profile, cloud, machine))
        proposed = list(_of_cloud(cloud, machine, run, problems, environ))
    ours = environ.get(NETWORK, "").split(",")
    own = {name: value for name, value in environ.items() if name not in ours}
    taken = [each for each in proposed if each.name not in own]
    decisions = [Decision(each.assignment, each.reason, f"network_profile={profile}") for each in taken]
    decisions += [
        Decision(
            f"{each.name}={own[each.name]} is kept",
            f"the environment has it; network_profile={profile} would set {each.value}",
        )
        for each in proposed
        if each.name in own and own[each.name] != each.value
    ]
    decisions += [] if cloud is None or problems else _remarks(profile, cloud, machine)
    if not proposed and not problems:
        decisions.append(Decision(f"network_profile={profile} sets nothing", _why_nothing(machine, run)))
    return NetworkChoice({each.name: each.value for each in taken}, tuple(decisions), tuple(problems))


def _of_cloud(
    cloud: CloudProfile, machine: NetworkMachine, run: NetworkRun, problems: list[Problem], environ: Mapping[str, str]
) -> Iterator[Proposal]:
    yield from name_interface(machine, run)
    if run.device != "cuda":
        return  # all others are NCCL's, and of what is under it
    yield from (each for each in propose(machine, replace(run, nodes=1)) if each.name != "NCCL_BUFFSIZE")
    for variable in cloud.variables:
        found = fnmatch.filter(machine.files, variable.file)
        if variable.file and not found and variable.name not in environ:
            problems.append(
                Problem(
                    f"{variable.name}: there is no file {variable.file}",
                    why=f"{variable.reason}; it is on the host, and a container has it only if it is mounted there",
                    do=f"docker run -v /opt/microsoft:/opt/microsoft:ro …, or export {variable.name}=FILE",
                )
            )
        elif found or not variable.file:
            value = variable.value.replace("{file}", found[0] if found else "")
            yield Proposal(variable.name, value, variable.reason)


def _not_there(profile: str, cloud: CloudProfile, machine: NetworkMachine) -> Iterator[Problem]:
    """What a profile is for, and this machine has not."""
    if machine.carrier is None:
        yield Problem(
            f"network_profile={profile!r}: no interface of this machine leads to others",
            why=f"there is {list_interfaces(machine)}",
            do="connect it, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface by yourself",
        )
    if cloud.link != "TCP" and not any(port.layer == cloud.link for port in machine.usable_rdma):
        ports = [f"{one.device} ({one.kind}, {one.state or 'not active'})" for one in machine.rdma]
        hidden = " and /dev/infiniband is missing" if machine.rdma and not machine.opens_rdma else ""
        yield Problem(
            f"network_profile={profile!r}: no {cloud.link} port can be used here",
            why=f"the profile is for {cloud.machines}; there is {', '.join(ports) or 'no such device'}{hidden}, and "
            f"{list_interfaces(machine)}",
            do="set network_profile='auto', or see `distributed doctor --network`",
        )


def _remarks(profile: str, cloud: CloudProfile, machine: NetworkMachine) -> list[Decision]:
    """What the profile cannot set, and is not as it could be."""
    carrier, found = machine.carrier, []
    if carrier is not None and 0 < carrier.mtu < cloud.mtu:
        why = f"the network of {profile} can have {cloud.mtu}, with fewer packets for as many bytes"
        found.append(Decision(f"{carrier.name} has an MTU of {carrier.mtu}", why, f"ip link set {carrier.name} mtu …"))
    if cloud.plugins and not any(fnmatch.filter(machine.files, pattern) for pattern in cloud.plugins):
        why = f"it is in none of {', '.join(cloud.plugins)}; unless LD_LIBRARY_PATH has it, NCCL goes over TCP"
        found.append(Decision("aws-ofi-nccl was not found", why))
    return found


def _why_nothing(machine: NetworkMachine, run: NetworkRun) -> str:
    if run.nodes < 2:
        return "the ranks of one machine talk over its loopback"
    return f"no interface leads to other machines: there is {list_interfaces(machine)}"


def wrong_names(
    machine: NetworkMachine, environ: Mapping[str, str], *, uses_nccl: bool, who: str = ""
) -> list[Problem]:
    """Interfaces that the environment names and this machine has not: gloo and NCCL would fail with other words.

    `who`: whose environment it is, if a reader could not know.
    """
    names = [one.name for one in machine.interfaces]
    if not names:  # not known
        return []
    found = [
        _wrong(variable, environ[variable], name, machine, who)
        for variable in _EXACT
        for name in environ.get(variable, "").split(",")
        if name and name.partition(":")[0] not in names  # eth0:1 is a second address of eth0
    ]
    text = environ.get("NCCL_SOCKET_IFNAME", "")
    if uses_nccl and text and not nccl_interfaces(text, names):
        found.append(_wrong("NCCL_SOCKET_IFNAME", text, text.lstrip("=^"), machine, who))
    return found


def nccl_interfaces(text: str, names: list[str]) -> list[str]:
    """Those that NCCL_SOCKET_IFNAME selects: beginnings of names, whole ones after `=`, all others after `^`.

    >>> nccl_interfaces("eth", ["lo", "eth0", "eth1"]), nccl_interfaces("^=eth1,lo", ["lo", "eth0", "eth1"])
    (['eth0', 'eth1'], ['eth0'])
    """
    excludes = text.startswith("^")
    rest = text.removeprefix("^")
    is_whole = rest.startswith("=")
    wanted = [each for each in rest.removeprefix("=").split(",") if each]
    hits = [n for n in names if any(n == each if is_whole else n.startswith(each) for each in wanted)]
    return [name for name in names if (name in hits) != excludes]


def _wrong(variable: str, text: str, name: str, machine: NetworkMachine, who: str) -> Problem:
    carrier = machine.carrier
    return Problem(
        f"{f'{who}: ' if who else ''}{variable}={text}, but this machine has no interface {name}",
        why=f"there is {list_interfaces(machine)}",
        do=f"export {variable}={carrier.name}" if carrier is not None else f"unset {variable}",
    )
