"""Ranks of horovodrun find each other through its driver, here the one that Horovod itself starts."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from distributed.core.env import WorkerEnv
from distributed.core.errors import LaunchError
from distributed.core.protocol.failure import is_collateral
from distributed.engines.horovod.env import DriverAddress
from distributed.engines.horovod.world import Driver, find_meeting

http_server = pytest.importorskip("horovod.runner.http.http_server", reason="no Horovod: make horovod")

# Three ranks on two hosts: the second rank of the second one is alone with its local rank.
RANKS = [
    WorkerEnv(0, 0, 3, 1, 0, 2, launcher="horovodrun"),
    WorkerEnv(1, 0, 3, 2, 1, 2, launcher="horovodrun"),
    WorkerEnv(2, 1, 3, 2, 0, 1, launcher="horovodrun"),
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = http_server.RendezvousServer()
    port = server.start()
    server.init([])
    told = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    monkeypatch.setattr(os, "environ", dict(os.environ) | told)
    monkeypatch.setattr("distributed.engines.horovod.world._RendezvousCount.held", 0)
    yield
    server.stop()


def meet_as(number: int, run_dir: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 5.0) -> WorkerEnv:
    """As the process of this rank would, which has been at no rendezvous yet."""
    monkeypatch.setattr("distributed.engines.horovod.world._RendezvousCount.held", 0)
    return find_meeting(RANKS[number], run_dir, timeout_s).env


@pytest.mark.usefixtures("driver")
def test_ranks_rendezvous_at_rank_0_and_share_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    main = find_meeting(replace(RANKS[0], attempt=2, restarts=2, nominal_ranks=4), "runs/a", 5.0)
    assert main.listener is not None
    with main.listener, socket.create_connection((main.env.master_addr, main.env.master_port), timeout=5.0):
        others = [meet_as(rank, "runs/its-own", monkeypatch) for rank in (1, 2)]
    told = {"run_dir": "runs/a", "attempt": 2, "restarts": 2, "nominal_ranks": 4, "num_nodes": 2}
    for rank, other in zip((1, 2), others, strict=True):
        point = {"master_addr": main.env.master_addr, "master_port": main.env.master_port}
        assert other == replace(RANKS[rank], node_rank=1, **told, **point)


@pytest.mark.usefixtures("driver")
def test_rank_waiting_in_vain_names_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="rank 0 published no address") as failed:
        meet_as(1, "", monkeypatch, timeout_s=0.2)
    assert not is_collateral(failed.value)


@pytest.mark.usefixtures("driver")
def test_missing_rank_0_in_a_later_world_is_collateral(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="rank 0 published no address") as failed:
        find_meeting(replace(RANKS[1], restarts=1), "", 0.2)
    assert is_collateral(failed.value)


def test_driver_that_refuses_a_write_is_named() -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_error(503)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        driver = Driver(DriverAddress("127.0.0.1", server.server_address[1], "localhost:0"))
        with pytest.raises(LaunchError, match="does not answer") as failed:
            driver.write("meeting-0", "here")
        server.shutdown()
    assert "did not take meeting-0" in str(failed.value)
    assert is_collateral(failed.value)


def test_unreachable_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    told = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    monkeypatch.setattr(os, "environ", dict(os.environ) | told)
    with pytest.raises(LaunchError, match=f"horovodrun does not answer at 127.0.0.1:{port}"):
        meet_as(1, "", monkeypatch)
