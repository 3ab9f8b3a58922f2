"""The ring: Horovod's own world of the same ranks, made beside the session's and unmade with it.

Horovod meets over a server that horovodrun would start, and reads everything else from variables while it is
initialised; here rank 0 serves, for as long as that takes. A ring that the script or mpirun made is used as it is.

A peer that dies in the fraction of a second in which Horovod connects makes it abort the process: it has no way to
fail there. Such a run goes on from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil

from distributed.core.errors import LaunchError, MissingExtraError, PlanError
from distributed.runtime.session import CollectiveError, Session
from distributed.runtime.sockets import open_sockets, shut_down

_LOOPBACK = "127.0.0.1"
_SPEAK_MPI = ("mpirun", "srun")  # launchers


class _Made:
    """How this process made its ring, if it did: Horovod reads its knobs once."""

    knobs: dict[str, str] | None = None


def import_horovod() -> Any:
    """Horovod for torch, or how to get one that fits this torch."""
    try:
        import horovod.torch as hvd
    except ImportError as failed:
        raise MissingExtraError(
            "Horovod does not load",
            why=str(failed).strip().splitlines()[0],
            do="make horovod, which builds it for the torch that is installed",
        ) from failed
    return hvd


class Ring:
    """Horovod's world as this rank is in it; made by `join_ring`."""

    def __init__(self, hvd: Any, timeline: str, stays: bool, is_horovodruns: bool = False) -> None:
        self._hvd, self._timeline, self._stays = hvd, timeline, stays
        # Whether this process can leave it and join another; horovodrun's are made anew by runtime/horovod_world.py.
        self.can_rejoin = not stays or is_horovodruns

    def leave(self) -> None:
        """Ends it on all ranks, also for one that waits in it; or leaves it to the script, or to the next fit."""
        if self._timeline:
            self._hvd.stop_timeline()  # waits until all is written: what came later would go into a closed file
        if not self._stays:
            self._hvd.shutdown()


def join_ring(session: Session, wanted: Mapping[str, Any], timeout_s: float) -> Ring:
    """Join the ring of this session's ranks. Every rank comes here."""
    hvd = import_horovod()
    knobs, timeline = _knobs(wanted), wanted["timeline"]
    if hvd.is_initialized():
        if (hvd.size(), hvd.rank()) == (session.world_size, session.rank):
            _use_as_it_is(hvd, knobs, timeline)
            return Ring(hvd, timeline, stays=True, is_horovodruns=session.env.launcher == "horovodrun")
        _refuse_lonely_mpi(hvd, session)
        hvd.shutdown()  # a script's `hvd.init()` that nobody told of the other ranks
    variables = knobs | ({"HOROVOD_TIMELINE": timeline} if timeline else {})
    over_mpi = wanted["controller"] == "mpi"
    if over_mpi:
        _join_over_mpi(hvd, session, variables)
    else:
        _join_over_gloo(hvd, session, variables | {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(timeout_s))})
    _Made.knobs = knobs
    # MPI can be initialised once in a process. Horovod can once its knobs are set: the second time it forgets that they
    # are, and writes their values to where others are by then.
    return Ring(hvd, timeline, stays=over_mpi or bool(knobs))


def _refuse_lonely_mpi(hvd: Any, session: Session) -> None:
    if hvd.mpi_enabled():
        raise LaunchError(
            f"hvd.init() found {hvd.size()} rank over MPI, and this run has {session.world_size}",
            why="MPI did not start these ranks, and once it is initialised Horovod cannot do without it",
            do="leave hvd.init() out of the script (fit does it), or set HOROVOD_CONTROLLER=gloo and "
            "HOROVOD_CPU_OPERATIONS=gloo where the ranks are started",
        )


def _knobs(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Horovod's own words for the settings that are given."""
    found: dict[str, str] = {}
    if wanted["fusion_mb"] is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(round(wanted["fusion_mb"] * 2**20))
    if wanted["cycle_ms"] is not None:
        found["HOROVOD_CYCLE_TIME"] = str(wanted["cycle_ms"])
    return found


def _use_as_it_is(hvd: Any, knobs: dict[str, str], timeline: str) -> None:
    if knobs != (_Made.knobs or {}):
        raise PlanError(
            f"{', '.join(knobs | (_Made.knobs or {}))} cannot be changed any more",
            why="Horovod reads them once, when it is initialised: by the script's hvd.init(), or in an earlier fit",
            do="leave hvd.init() out of the script (fit does it), and keep these settings the same in every fit",
        )
    if timeline:
        try:
            hvd.start_timeline(timeline)
        except ValueError as refused:
            raise PlanError(
                f"timeline={timeline!r}, and Horovod is initialised without one",
                why=str(refused),
                do="leave hvd.init() out of the script, or set HOROVOD_TIMELINE=DYNAMIC where it is started",
            ) from refused


def _join_over_mpi(hvd: Any, session: Session, variables: dict[str, str]) -> None:
    if not hvd.mpi_built():
        raise no_mpi_in_wheel()
    if session.env.launcher not in _SPEAK_MPI:
        raise mpi_did_not_start(session.world_size, f"{session.env.launcher} started them")
    with _told(variables | {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}):
        hvd.init()
    if (hvd.size(), hvd.rank()) != (session.world_size, session.rank):
        raise mpi_did_not_start(
            session.world_size, f"MPI knows {hvd.size()} ranks, and rank {session.rank} as {hvd.rank()}"
        )


def mpi_did_not_start(ranks: int, why: str) -> LaunchError:
    return LaunchError(
        f"communication_backend='mpi', but MPI does not start the {ranks} ranks of this run",
        why=why,
        do=f"mpirun -np {ranks} python train.py",
    )


def no_mpi_in_wheel() -> PlanError:
    return PlanError(
        "communication_backend='mpi', but the installed Horovod was built without MPI",
        why="it can reduce over gloo only",
        do="apt-get install libopenmpi-dev openmpi-bin, then make horovod MPI=1",
    )


def _join_over_gloo(hvd: Any, session: Session, variables: dict[str, str]) -> None:
    """Between a first and a last meeting of all ranks, so that nobody waits in Horovod for one that comes late."""
    nodes = session.gather_texts("nodes of the ranks", str(session.env.node_rank))
    is_local = len(set(nodes)) == 1
    host = _LOOPBACK if is_local else socket.gethostbyname(session.env.master_addr)
    before = set(open_sockets())
    serves = _serve(_places(nodes), host if is_local else "") if session.is_main else nullcontext(0)
    with serves as port:
        address = session.share_text("horovod", f"{host}:{port}" if session.is_main else None)
        host, _, port_text = address.rpartition(":")
        session.cut_more = lambda: shut_down(set(open_sockets()) - before)
        where = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port_text,
            "HOROVOD_GLOO_IFACE": "lo" if is_local else _interface_to(host),
        }
        quiet = {} if "HOROVOD_LOG_LEVEL" in os.environ else {"HOROVOD_LOG_LEVEL": "fatal"}  # lost peers are told of
        variables = variables | quiet | where | _places(nodes)[session.rank]
        with session.named("connecting Horovod"), _told(variables):
            hvd.init()
        session.barrier("connecting Horovod")
    connections = set(open_sockets()) - before
    session.cut_more = lambda: shut_down(connections)


def _places(nodes: list[str]) -> list[dict[str, str]]:
    """Every rank's place among the ranks of its node, and among those with the same place on other nodes.

    >>> _places(["0", "0", "1"])[2]["HOROVOD_LOCAL_RANK"], _places(["0", "0", "1"])[2]["HOROVOD_CROSS_RANK"]
    ('0', '1')
    """
    local = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return [
        {
            "HOROVOD_HOSTNAME": f"node-{node}",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(len(nodes)),
            "HOROVOD_LOCAL_RANK": str(local[rank]),
            "HOROVOD_LOCAL_SIZE": str(nodes.count(node)),
            "HOROVOD_CROSS_RANK": str(local[:rank].count(local[rank])),
            "HOROVOD_CROSS_SIZE": str(local.count(local[rank])),
        }
        for rank, node in enumerate(nodes)
    ]


@contextmanager
def _serve(places: list[dict[str, str]], host: str) -> Iterator[int]:
    """Horovod's meeting point, at a port of this host."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    def slot(place: dict[str, str]) -> Any:
        numbers = ("RANK", "LOCAL_RANK", "CROSS_RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")
        return SlotInfo(place["HOROVOD_HOSTNAME"], *(int(place[f"HOROVOD_{name}"]) for name in numbers))

    server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
    server.daemon_threads = True
    server.init([slot(place) for place in places])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="horovod-meeting", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _interface_to(host: str) -> str:
    """The name of this machine's network interface that leads there, or that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return name
    raise LaunchError(f"no network interface has the address {own}", why=f"it leads to {host}, where rank 0 is")


@contextmanager
def _told(variables: dict[str, str]) -> Iterator[None]:
    """What Horovod is told, which is nothing to whatever else reads the environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    except ValueError as failed:  # Horovod's own kind for a failure to initialise
        raise CollectiveError(f"Horovod did not connect: {failed}") from failed
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
