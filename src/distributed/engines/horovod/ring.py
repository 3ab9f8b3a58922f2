"""The ring: Horovod's own world of the same ranks, made beside the session's and unmade with it.

Horovod's rendezvous is a server that horovodrun would start, and it reads everything else from variables while it is
initialised; here rank 0 serves, for as long as that takes. A ring that the script or mpirun made is used as it is.

A peer that dies in the fraction of a second in which Horovod connects makes it abort the process: it has no way to
fail there. Such a run resumes from its last checkpoint.
"""

from __future__ import annotations

import functools
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil

from distributed.core.env import environ_with, inherited_environ
from distributed.core.errors import LaunchError, MissingExtraError, PlanError
from distributed.core.protocol.failure import is_collateral
from distributed.engines.horovod.deadline import Deadline
from distributed.engines.horovod.env import CYCLE_TIME, knobs_in_environ
from distributed.runtime.abort.sockets import open_sockets, shut_down
from distributed.runtime.session import Session
from distributed.runtime.world import CollectiveError

_LOOPBACK = "127.0.0.1"
_SPEAK_MPI = ("mpirun", "srun")  # launchers


class _Made:
    """How this process made its ring, if it did: Horovod reads its knobs once."""

    knobs: dict[str, str] | None = None
    cut: Callable[[], None] | None = None  # ends its connections
    is_spent = False  # whether Horovod has ended, and cannot be initialised again here
    ending = threading.Lock()
    ended = 0  # how often it has
    script_runs_it = False  # whether the script has initialised it, and may use it after a fit


def import_horovod() -> Any:
    """Horovod for torch, or how to get one that fits this torch."""
    try:
        import horovod.torch as hvd

        if not hasattr(hvd, "is_initialized"):  # all that it does where its library is missing is to warn
            raise ImportError(f"{hvd.__file__} has no library beside it")
    except (ImportError, OSError) as failed:
        raise MissingExtraError(
            "Horovod does not load",
            why=str(failed).strip().splitlines()[0],
            do="make horovod, which builds it for the torch that is installed",
        ) from failed
    return hvd


class Ring:
    """Horovod's world as this rank is in it; made by `join_ring`."""

    def __init__(self, hvd: Any, session: Session, timeline: str, timeout_s: float, *, stays: bool) -> None:
        self._hvd, self._session, self._timeline, self._stays = hvd, session, timeline, stays
        self._after = _Made.ended
        self._deadline = Deadline(timeout_s, session.cut_beside)
        # Whether this process can leave it and join another; horovodrun's are made again by engines/horovod/world.py.
        self.can_rejoin = not stays or (session.env.launcher == "horovodrun" and not _is_tuned())

    @contextmanager
    def wait(self, name: str, missing: Sized) -> Iterator[None]:
        """Around a wait for the other ranks, which has a name and the run's deadline; see `Deadline.begin`."""
        try:
            with self._session.reported(name):
                self._deadline.begin(missing)
                yield
        except (RuntimeError, ValueError) as failed:  # the second where a handle has ended with Horovod
            self.raise_if_lost(name, failed)
            raise
        finally:
            self._deadline.end()

    def raise_if_lost(self, name: str, failed: Exception) -> None:
        """Raise what a collective failed with as the end of the world, where it is that; bad arguments are not."""
        if _Made.ended == self._after and not self._deadline.has_passed and not is_collateral(failed):
            return
        late = f"nothing came from the other ranks for {self._deadline.seconds:g} s (collective_timeout_s)"
        why = late if self._deadline.has_passed else failed
        raise CollectiveError(f"[r{self._session.rank}] in the collective {name!r}: {why}") from failed

    def leave(self, *, failed: bool = False) -> None:
        """Ends it on all ranks, also for one that waits in it; or leaves it to the script, or to the next fit.

        A rank that has failed ends it in any case: the others would wait for what it will never send.
        """
        self._deadline.close()
        if self._timeline:
            self._hvd.stop_timeline()  # waits until all is written: what came later would go into a closed file
        if failed or not (self._stays or _Made.script_runs_it):
            end_horovod()


def end_horovod(after: int | None = None) -> None:
    """End Horovod in this process, if it runs, and every collective in it. For any thread to call.

    `after`: only the one that was made after that many had ended.
    """
    hvd = sys.modules.get("horovod.torch")
    with _Made.ending:
        if hvd is not None and hvd.is_initialized() and after in (None, _Made.ended):
            # MPI can be initialised once in a process. Horovod can once its knobs are set: the second time it forgets
            # that they are, and writes their values to where others are by then.
            _Made.is_spent = _is_tuned() or hvd.mpi_enabled()
            _Made.cut, _Made.ended = None, _Made.ended + 1
            hvd.shutdown()


def refuse_spent() -> None:
    """Where Horovod would be initialised again, and cannot be."""
    if _Made.is_spent:
        raise LaunchError(
            "Horovod has ended in this process and cannot begin again",
            why="with MPI, HOROVOD_FUSION_THRESHOLD or a cycle time it can be initialised once",
            do="start the script again; for an automatic restart, leave out HOROVOD_CYCLE_TIME, cycle_time_ms "
            "and HOROVOD_FUSION_THRESHOLD, for which there is fusion_threshold_mb",
        )


def _is_tuned() -> bool:
    return bool(knobs_in_environ() or _Made.knobs)


def join_ring(session: Session, wanted: Mapping[str, Any], timeout_s: float) -> Ring:
    """Join the ring of this session's ranks. Every rank comes here."""
    hvd = import_horovod()
    knobs, timeline = _knobs(wanted), wanted["timeline"]
    if hvd.is_initialized():
        is_kept_for_script = _Made.cut is not None and not _is_tuned()
        is_ours = (hvd.size(), hvd.rank()) == (session.world_size, session.rank)
        if is_ours and not (is_kept_for_script and knobs):
            _use_as_it_is(hvd, knobs, timeline)
            session.also_cut(_Made.cut or functools.partial(_end_beside, _Made.ended))
            return Ring(hvd, session, timeline, timeout_s, stays=True)
        if not is_ours:
            _refuse_lonely(hvd, session)
        _Made.script_runs_it = True
        end_horovod()  # a script's `hvd.init()` that does not know the other ranks
    refuse_spent()
    variables = knobs | ({"HOROVOD_TIMELINE": timeline} if timeline else {})
    over_mpi = wanted["controller"] == "mpi"
    if over_mpi:
        _join_over_mpi(hvd, session, variables)
        session.also_cut(functools.partial(_end_beside, _Made.ended))
    else:
        wait = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(timeout_s))}
        _Made.cut = _join_over_gloo(hvd, session, variables | wait)
        session.also_cut(_Made.cut)
    _Made.knobs = knobs
    return Ring(hvd, session, timeline, timeout_s, stays=over_mpi or _is_tuned())


def _end_beside(after: int) -> None:
    """Where Horovod's connections are not known, and it has to end by itself, which it cannot if a peer is stopped."""
    if not _Made.ending.locked():
        threading.Thread(target=end_horovod, args=(after,), name="end-horovod", daemon=True).start()


def _refuse_lonely(hvd: Any, session: Session) -> None:
    """Horovod that was initialised for another world than this, and cannot be for this one."""
    if hvd.mpi_enabled():
        why = "MPI did not start these ranks, and once it is initialised Horovod cannot do without it"
        do = "set HOROVOD_CONTROLLER=gloo and HOROVOD_CPU_OPERATIONS=gloo where the ranks are started"
    elif _is_tuned():
        names = " and ".join(knobs_in_environ() or _Made.knobs or ())
        why, do = f"Horovod can be initialised once with {names}", f"leave {names} out"
    else:
        return
    over = "over MPI" if hvd.mpi_enabled() else "over gloo"
    raise LaunchError(
        f"hvd.init() found {hvd.size()} rank{'s' * (hvd.size() > 1)} {over}, and this run has {session.world_size}",
        why=why,
        do=f"leave hvd.init() out of the script (fit does it), or {do}",
    )


def _knobs(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Horovod's own words for the settings that are given."""
    return {} if wanted["cycle_ms"] is None else {CYCLE_TIME: str(wanted["cycle_ms"])}


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
    with _horovod_environ(variables | {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}):
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
        why="Horovod without MPI can reduce over gloo only",
        do="apt-get install libopenmpi-dev openmpi-bin, then make horovod MPI=1",
    )


def _join_over_gloo(hvd: Any, session: Session, variables: dict[str, str]) -> Callable[[], None]:
    """Between two barriers of all ranks, so that no rank waits in Horovod for one that comes late.

    Returns what ends its collectives."""
    nodes = session.gather_texts("nodes of the ranks", str(session.env.node_rank))
    own_host = _LOOPBACK if len(set(nodes)) == 1 else _own_address(session, nodes)
    before = set(open_sockets())
    serves = _serve(_places(nodes), own_host) if session.is_main else nullcontext(0)
    with serves as port:
        address = session.share_text("horovod", f"{own_host}:{port}" if session.is_main else None)
        host, _, port_text = address.rpartition(":")
        session.also_cut(lambda: shut_down(set(open_sockets()) - before))
        where = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port_text,
            "HOROVOD_GLOO_IFACE": _interface_of(own_host),
        }
        is_set = "HOROVOD_LOG_LEVEL" in inherited_environ()
        quiet = {} if is_set else {"HOROVOD_LOG_LEVEL": "fatal"}  # lost peers are reported by us
        variables = variables | quiet | where | _places(nodes)[session.rank]
        with session.named("connecting Horovod"), _horovod_environ(variables):
            hvd.init()
        session.barrier("connecting Horovod")
    connections = set(open_sockets()) - before
    return lambda: shut_down(connections)


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
    """Horovod's rendezvous endpoint, at a port of this host."""
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


def _own_address(session: Session, nodes: list[str]) -> str:
    """This host's address on the network of all nodes.

    The node of rank 0 does not ask for its own name, which may well mean 127.0.1.1 there: it asks which way leads to
    the others, and they know the way to it.
    """
    is_elsewhere = nodes[session.rank] != nodes[0]
    mine = _address_towards(session.env.master_addr) if is_elsewhere else ""
    theirs = session.gather_texts("addresses of the ranks", mine)
    return mine or _address_towards(next(address for address in theirs if address))


def _address_towards(host: str) -> str:
    """The address from which this machine sends to that host."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as failed:
        raise LaunchError(
            f"no way from {socket.gethostname()} to {host}, where other ranks are",
            why=str(failed),
            do="check that the hosts know each other's names and share a network",
        ) from failed


def _interface_of(address: str) -> str:
    """The name of this machine's network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise LaunchError(f"no network interface has the address {address}", why="Horovod needs the name of an interface")


@contextmanager
def _horovod_environ(variables: dict[str, str]) -> Iterator[None]:
    """Variables for Horovod, which nothing else in the environment needs."""
    try:
        with environ_with(variables):
            yield
    except ValueError as failed:  # Horovod's own kind for a failure to initialise
        raise CollectiveError(f"Horovod did not connect: {failed}") from failed
