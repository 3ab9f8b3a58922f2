"""Who takes part: nodes that meet at the rendezvous of a run, or, on one machine, this process and one of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from distributed.bench.network.node import NodeMeasurement, Notify
from distributed.bench.network.rdma import measurable
from distributed.bench.network.turns import MeasuredNode, NetworkAsked, NetworkTimes
from distributed.bench.processes import ended_by_signals, kill_all
from distributed.core.env import JOIN_TOKEN, StoreDoor, inherited_environ, join_token_in_env
from distributed.core.errors import ConfigError, LaunchError
from distributed.launch.rendezvous.elastic import elastic_nodes
from distributed.launch.rendezvous.join_token import read_join_token
from distributed.launch.rendezvous.nodes import News, Nodes
from distributed.launch.rendezvous.store_server import LocalStore
from distributed.launch.request import LaunchRequest
from distributed.planner.hardware import Hardware
from distributed.planner.network.machine import NetworkInterface, NetworkMachine, list_interfaces
from distributed.planner.network.probe import probe_network

_LEAVE_S = 10.0  # for the other process to end by itself


@dataclass(frozen=True)
class NodesAsked:
    """Which machines: as for `distributed train`."""

    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    join_token: str | None = None  # as it was given; None: in the environment, or in a file that node 0 leaves


def measure_network(
    nodes: NodesAsked, asked: NetworkAsked, interface: str, *, notify: Notify, say: Callable[[str], None]
) -> NetworkTimes:
    """`interface`: to measure; "": the one on the way to master_addr, or the loopback of one machine."""
    _check_alone(nodes)
    machine = probe_network(Hardware(), nodes.master_addr or "")
    chosen = choose_interface(machine, interface, is_alone=nodes.num_nodes == 1)
    with ended_by_signals():
        if nodes.num_nodes == 1:
            return _on_one_machine(machine, chosen, asked, notify)
        return _between_nodes(nodes, machine, chosen, asked, notify=notify, say=say)


def _check_alone(nodes: NodesAsked) -> None:
    given = {name: value for name, value in asdict(nodes).items() if name != "num_nodes" and value is not None}
    if nodes.num_nodes == 1 and given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        why = "one machine is measured with itself, and meets no other"
        raise ConfigError(f"{option}, but --num-nodes is 1", why=why, do=f"--num-nodes 2, or leave {option} out")


def choose_interface(machine: NetworkMachine, name: str, *, is_alone: bool) -> NetworkInterface:
    """The interface that is asked for, which has to be there, be up and have an address; else the one that leads on.

    >>> lo = NetworkInterface("lo", "loopback", addresses=("127.0.0.1",))
    >>> choose_interface(NetworkMachine((lo,)), "", is_alone=True).name
    'lo'
    """
    there, carrier = f"there is {list_interfaces(machine)}", machine.carrier
    do = f"--interface {carrier.name}" if carrier is not None else "distributed doctor --network"
    if not name:
        loopback = next((one for one in machine.interfaces if one.kind == "loopback" and one.addresses), None)
        found = loopback if is_alone else carrier
        if found is None or not found.reachable_at:
            raise LaunchError("no interface of this machine leads to others", why=there, do=do)
        return found
    found = machine.named(name)
    if found is None:
        raise ConfigError(f"--interface {name}: this machine has no such interface", why=there, do=do)
    if not (found.is_up and found.reachable_at):
        why = "it is down" if not found.is_up else "it has no address"
        raise ConfigError(f"--interface {name} cannot be measured", why=f"{why}; {there}", do=do)
    return found


def _introduce(rank: int, host: str, machine: NetworkMachine, interface: NetworkInterface) -> MeasuredNode:
    four = [address for address in interface.reachable_at if ":" not in address]
    return MeasuredNode(
        rank,
        host,
        interface=interface.name,
        address=(four or list(interface.reachable_at))[0],
        speed_mbit=interface.speed_mbit,
        mtu=interface.mtu,
        rdma=measurable(machine.usable_rdma),
    )


def _between_nodes(
    nodes: NodesAsked,
    machine: NetworkMachine,
    interface: NetworkInterface,
    asked: NetworkAsked,
    *,
    notify: Notify,
    say: Callable[[str], None],
) -> NetworkTimes:
    request = _request(nodes)
    host, port = request.rendezvous_endpoint
    say(f"rendezvous at {host}:{port}: waiting for {nodes.num_nodes} nodes")
    members = elastic_nodes(request)
    try:
        first = members.gather(0)
        place = first.place
        me = _introduce(place.node_rank, socket.gethostname(), machine, interface)
        say(f"this is node {me.rank} of {', '.join(first.hosts)}, over {me.interface}")
        check = _watching(members, first.hosts)
        try:
            found = NodeMeasurement(members.door(), me, place.num_nodes, check=check).run(asked, notify)
        except BaseException as failed:
            what = failed.problems[0].what if isinstance(failed, LaunchError) else repr(failed)
            members.tell(News(place.node_rank, me.host, "failed", what))
            members.leave(ok=False)
            raise
        members.leave(ok=True)
        return found
    finally:
        members.close()


def _request(nodes: NodesAsked) -> LaunchRequest:
    if nodes.master_addr is None:
        raise ConfigError(
            f"--num-nodes {nodes.num_nodes}, but no --master-addr",
            why="the nodes need one address to meet at",
            do="--master-addr HOST, the name or address of one of them, the same on all",
        )
    text = nodes.join_token if nodes.join_token is not None else join_token_in_env()
    source = JOIN_TOKEN if nodes.join_token is None else "--join-token"
    return LaunchRequest(
        command=("",),
        run_dir="",
        ranks_per_node=1,
        num_nodes=nodes.num_nodes,
        node_rank=nodes.node_rank,
        master_addr=nodes.master_addr,
        master_port=nodes.master_port,
        join_token=read_join_token(text, source) if text else "",
    )


def _watching(members: Nodes, hosts: tuple[str, ...]) -> Callable[[], None]:
    """What raises once another node is lost or has given up, and names it."""

    def check() -> None:
        news = members.news()
        if news is None or news.kind == "done":
            return
        if news.node_rank < 0:
            what = "this node is cut off from the others"
        else:
            how = "was lost" if news.kind == "lost" else "has ended the measurement"
            what = f"node {news.node_rank} ({hosts[news.node_rank]}) {how}"
        raise LaunchError(what, why=news.message, do="start the measurement again on all nodes")

    return check


def _on_one_machine(
    machine: NetworkMachine, interface: NetworkInterface, asked: NetworkAsked, notify: Notify
) -> NetworkTimes:
    """Both sides on this machine: what its kernel carries between two processes, which no link has to do with."""
    store, host = LocalStore(), socket.gethostname()
    both = [_introduce(rank, host, machine, interface) for rank in range(2)]
    try:
        with _other_process(store.door, both[1]) as check:
            return NodeMeasurement(store.door, both[0], 2, check=check).run(asked, notify)
    finally:
        store.close()


@contextmanager
def _other_process(door: StoreDoor, node: MeasuredNode) -> Iterator[Callable[[], None]]:
    command = [sys.executable, "-m", "distributed.bench.network.process", json.dumps(asdict(node))]
    other = subprocess.Popen(
        command, env=inherited_environ() | door.to_environ(), stdin=subprocess.DEVNULL, start_new_session=True
    )

    def check() -> None:
        if other.poll():
            raise LaunchError(f"the other process ended with exit code {other.returncode}", why="it has said why")

    try:
        yield check
        with suppress(subprocess.TimeoutExpired):
            other.wait(_LEAVE_S)
    finally:
        kill_all(other)
