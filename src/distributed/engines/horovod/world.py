"""The worlds of ranks that horovodrun started: their rendezvous and, in an elastic run, the world after this one.

Horovodrun's driver keeps keys and values over HTTP, and forgets them whenever it makes a new world. Rank 0, which it
takes from those that have been there longest, writes there where the others find it and how far the run has come: a
process that was started later learns from it that it joins a run that is under way.
"""

from __future__ import annotations

import functools
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import LaunchError
from distributed.core.protocol.rank_protocol import Joined, Message
from distributed.engines.horovod.env import (
    DriverAddress,
    horovod_driver,
    remember_world,
    rendezvous_timeout_s,
    take_out_elastic,
    take_place,
)
from distributed.engines.horovod.ring import end_horovod, refuse_spent
from distributed.runtime.rendezvous import Rendezvous

_ANSWER_S = 10.0  # for one answer of a driver that has nothing to wait for
_PLACE_S = 3600.0  # for one that waits for enough hosts: horovodrun gives up before, after its --elastic-timeout
_LOOK_EVERY_S = 0.05


class DriverLost(LaunchError):
    """Horovodrun's driver does not answer."""

    collateral = True

    @staticmethod
    def at(address: DriverAddress, why: str) -> DriverLost:
        return DriverLost(
            f"horovodrun does not answer at {address}",
            why=why,
            do="see its output; between hosts, name the network that they share with --network-interface",
        )


class Driver:
    """Horovodrun's driver, as a rank sees it."""

    def __init__(self, address: DriverAddress) -> None:
        self.address = address
        self.own_host = ""  # this host's address on the network that leads there

    def write(self, key: str, value: str) -> None:
        if self._ask("PUT", f"/distributed/{key}", _ANSWER_S, value) is None:
            raise DriverLost.at(self.address, f"it did not take {key}")

    def read(self, key: str) -> str | None:
        return self._ask("GET", f"/distributed/{key}", _ANSWER_S)

    def next_place(self) -> str:
        """Waits until every process of the present world has asked for its next place, or has ended."""
        place = self._ask("GET", f"/rank_and_size/{self.address.slot}", _PLACE_S)
        if place is None:
            raise DriverLost.at(self.address, f"it knows nothing of {self.address.slot}")
        return place

    def _ask(self, method: str, path: str, timeout_s: float, body: str | None = None) -> str | None:
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=timeout_s)
        try:
            connection.connect()
            self.own_host = str(connection.sock.getsockname()[0])
            connection.request(method, path, body)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as failed:
            raise DriverLost.at(self.address, str(failed) or type(failed).__name__) from failed
        finally:
            connection.close()
        return text if answer.status == 200 else None


class _RendezvousCount:
    """Of the present world: a process may leave its group and join the same ranks again."""

    held = 0


def find_meeting(env: WorkerEnv, run_dir: str, timeout_s: float) -> Rendezvous:
    """The rendezvous of the ranks of this world, through horovodrun's driver.

    Horovodrun knows nothing of a run directory either: all take rank 0's.
    """
    env = replace(env, nominal_ranks=env.nominal_ranks or env.world_size, run_dir=run_dir)
    if env.world_size == 1:
        remember_world(env)
        return Rendezvous(env)
    driver, key = Driver(horovod_driver()), f"meeting-{_RendezvousCount.held}"
    _RendezvousCount.held += 1
    if env.local_rank == 0:
        driver.write(f"node-of-{env.rank}", str(env.node_rank))
    if env.is_main:
        rendezvous = _announce(driver, key, env)
    else:
        limit_s = min(timeout_s, rendezvous_timeout_s()) if env.restarts else timeout_s
        rendezvous = Rendezvous(_look_up(driver, key, env, limit_s))
    remember_world(rendezvous.env)
    return rendezvous


_PUBLISHED = ("master_addr", "master_port", "num_nodes", "attempt", "restarts", "nominal_ranks", "run_dir")


def _announce(driver: Driver, key: str, env: WorkerEnv) -> Rendezvous:
    """The port is taken before it is published, so that no other process can have it."""
    listener = socket.create_server(("", 0), backlog=1024)
    try:
        driver.read(key)  # learns the address by which the driver's network knows this host
        env = replace(env, master_addr=driver.own_host, master_port=listener.getsockname()[1])
        driver.write(key, json.dumps({name: getattr(env, name) for name in _PUBLISHED}))
    except BaseException:
        listener.close()
        raise
    return Rendezvous(env, listener)


def _look_up(driver: Driver, key: str, env: WorkerEnv, timeout_s: float) -> WorkerEnv:
    found = json.loads(_await(driver, key, env, timeout_s))
    if env.num_nodes != found["num_nodes"]:  # among hosts with as many ranks as this one, and others have fewer
        first = env.rank - env.local_rank
        env = replace(env, node_rank=int(_await(driver, f"node-of-{first}", env, timeout_s)))
    return replace(env, **{name: found[name] for name in _PUBLISHED})


def _await(driver: Driver, key: str, env: WorkerEnv, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while (text := driver.read(key)) is None:
        if time.monotonic() > deadline:
            kind = DriverLost if env.restarts else LaunchError  # later, rank 0 has died, and there is a next world
            raise kind(
                f"the rendezvous of rank {env.rank} failed: rank 0 published no address within {timeout_s:.0f} s",
                why=f"rank 0 publishes it through horovodrun at {driver.address} when it calls `fit`",
                do="see its output; if it only needs longer before `fit`, set collective_timeout_s",
            )
        time.sleep(_LOOK_EVERY_S)
    return text


class HorovodLine:
    """What an elastic horovodrun is to a rank: it gives the next place, and says when hosts have come or gone."""

    replaces = False  # it shuts out the host of a rank that ends
    closes_gates = False

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._hosts_changed = threading.Event()
        self._script_runs_horovod = _runs_horovod()  # then a rank that joins does so too, before it calls `fit`
        self._placed_at, self._timeout_s = time.monotonic(), rendezvous_timeout_s()
        self.regroups = False
        self._end_collective: Callable[[], None] = lambda: None

    def tell(self, message: Message) -> None:
        """Nothing: horovodrun needs no messages of its ranks."""
        if isinstance(message, Joined):
            self.regroups = message.regroups

    def on_cut_off(self, end: Callable[[], None]) -> None:
        self._end_collective = end

    def cut_off(self) -> None:
        self._end_collective()

    def on_close(self, attempt: int, close: Callable[[], None]) -> None:
        """Nothing: no rank of horovodrun has a gate."""

    def asked_to_leave(self, attempt: int) -> bool:
        return self.regroups and self._hosts_changed.is_set()

    def is_cut_off(self, attempt: int) -> bool:
        """Called during the rendezvous: horovodrun does not report at once that a process which it started has ended.

        Later, a rank that leaves closes its connections, which the others notice.
        """
        return attempt > 0 and time.monotonic() - self._placed_at > self._timeout_s

    def next_world(self, after_attempt: int) -> WorkerEnv | None:
        """Request a place in the next world, as all survivors do. A host that was removed has none."""
        attempt = after_attempt
        while True:
            attempt += 1
            end_horovod()
            refuse_spent()
            self._hosts_changed.clear()  # what changes from here on may come too late for this answer
            if not take_place(self._driver.next_place(), attempt):
                print("horovodrun has taken this host out of the run: this rank ends", file=sys.stderr, flush=True)
                raise SystemExit(0)
            _RendezvousCount.held, self._placed_at = 0, time.monotonic()
            if not self._script_runs_horovod or _begin_horovod():
                return worker_env()

    def on_hosts_updated(self, timestamp: float, update: Any) -> None:
        """Called by Horovod, in a thread of its own."""
        self._hosts_changed.set()

    def listen(self) -> None:
        """Receive changes of the hosts: the driver sends them to rank 0 of the current world."""
        from horovod.runner.elastic.worker import WorkerNotificationManager  # horovodrun's own package

        notifications = WorkerNotificationManager()
        notifications.init()
        notifications.register_listener(self)


@functools.cache
def horovod_line() -> HorovodLine | None:
    """The line of this process, which horovodrun started, if that is elastic."""
    if not take_out_elastic():
        return None
    line = HorovodLine(Driver(horovod_driver()))
    line.listen()
    return line


def _horovod() -> Any:
    return sys.modules.get("horovod.torch")


def _runs_horovod() -> bool:
    hvd = _horovod()
    return hvd is not None and bool(hvd.is_initialized())


def _begin_horovod() -> bool:
    """False when a rank was lost again during the rendezvous."""
    try:
        _horovod().init()
    except (ValueError, RuntimeError):  # Horovod has no kind of its own for it
        return False
    return True
