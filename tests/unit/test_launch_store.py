"""The run's store does what torch's stores do, for those who know the run's secret and nobody else."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from distributed.core.env import StoreDoor
from distributed.core.protocol.store_client import StoreClient
from distributed.core.protocol.store_wire import (
    CLIENT_BYTES,
    HELLO,
    NONCE_BYTES,
    StoreLateError,
    StoreLostError,
    StoreRefusedError,
    pack,
)
from distributed.launch.rendezvous.store_server import LocalStore, StoreServer
from distributed.runtime.rank_store import RankStore

SECRET = "the secret of this run"


@pytest.fixture
def local() -> Iterator[StoreDoor]:
    store = LocalStore()
    yield store.door
    store.close()


@pytest.fixture
def tcp() -> Iterator[StoreDoor]:
    """As between nodes."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = StoreServer(listener, SECRET)
    yield StoreDoor(f"tcp:127.0.0.1:{port}", SECRET)
    server.close()


def port_of(door: StoreDoor) -> int:
    return int(door.address.rpartition(":")[2])


def use(store: dist.Store) -> list[Any]:
    """What comes of a number of calls, as torch makes them: from C++, with a prefix."""
    front = dist.PrefixStore("a", dist.PrefixStore("b", store))
    front.set("text", "käse")
    front.set("bytes", bytes(range(256)))
    other = front.clone()
    other.set("of the clone", "1")
    return [
        front.get("text"),
        front.get("bytes"),
        front.get("of the clone"),
        front.check(["text", "bytes"]),
        front.check(["text", "missing"]),
        front.add("count", 5),
        front.add("count", -2),
        front.get("count"),
        front.compare_set("fresh", "", "first"),
        front.compare_set("fresh", "other", "second"),
        front.compare_set("fresh", "first", "second"),
        front.compare_set("never", "expected", "desired"),
        front.check(["never"]),
        front.append("grown", "ab"),
        front.append("grown", "cd"),
        front.get("grown"),
        front.multi_set(["m1", "m2"], ["1", "2"]),
        front.multi_get(["m2", "m1"]),
        front.delete_key("m1"),
        front.delete_key("m1"),
        front.check(["m1"]),
        front.wait(["text"], timedelta(seconds=1)),
    ]


def test_rank_store_behaves_like_torchs_hash_store(local):
    store = RankStore(local, attempt=3, timeout_s=10.0)
    assert use(store) == use(dist.HashStore())
    assert len(store.list_keys()) == store.num_keys() == 7
    assert RankStore(local, attempt=4, timeout_s=10.0).num_keys() == 0  # another world
    with pytest.raises(dist.DistStoreError, match="never comes"):
        store.wait(["never comes"], timedelta(milliseconds=20))
    assert store.check([])  # as usable as before


def test_store_wait_ends_with_the_last_key_or_when_cut(local):
    client, other = (StoreClient(local.address, local.secret) for _ in range(2))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(client.wait(["a", "b"], 30.0)))
    waiting.start()
    other.set("b", "2")
    other.set("a", "1")
    waiting.join(10)
    assert found == [[b"1", b"2"]]
    with pytest.raises(StoreLateError):
        client.wait(["c"], 0.02)

    def get_cut() -> None:
        with pytest.raises(StoreLostError):
            client.get("c")
        found.append("cut")

    waiting = threading.Thread(target=get_cut)
    waiting.start()
    time.sleep(0.1)
    client.cut()
    waiting.join(10)
    assert found[-1] == "cut"
    with pytest.raises(StoreLostError):
        client.get("a")
    assert other.get("a") == b"1"


def test_client_of_a_closed_store_raises():
    store = LocalStore()
    client = StoreClient(store.door.address, store.door.secret)
    store.close()
    for _ in range(2):  # the second time there is nobody to connect to
        with pytest.raises(StoreLostError):
            client.get("a")


def test_unauthenticated_clients_read_and_set_nothing(tcp):
    client = StoreClient(tcp.address, tcp.secret)
    client.set("asked", "no")
    port = port_of(tcp)
    with pytest.raises(StoreRefusedError, match="another join token"):
        StoreClient(tcp.address, "a guess of the secret")
    with pytest.raises(dist.DistNetworkError):
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    request = pack([b"set", b"asked", b"yes"])
    for said in (request * 20, b"\0" * 64 + request, b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(5000)):
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(said.ljust(64, b"\0"))
            heard = b""
            try:
                while part := stranger.recv(65536):
                    heard += part
            except ConnectionResetError:  # it had said more than was read of it
                pass
        assert len(heard) <= len(HELLO) + NONCE_BYTES
    assert client.keys() == ["asked"]
    assert client.get("asked") == b"no"


def test_flood_of_unauthenticated_clients_does_not_block_ranks():
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = StoreServer(listener, SECRET, max_unauthenticated=20)
    client = StoreClient(f"tcp:127.0.0.1:{address[1]}", SECRET)
    strangers = [socket.create_connection(address, 5) for _ in range(100)]
    client.set("a", "1")
    assert StoreClient(f"tcp:127.0.0.1:{address[1]}", SECRET).get("a") == b"1"
    for stranger in strangers:
        stranger.close()
    server.close()


def test_dropped_client_retries_its_connection():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)
    address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(StoreClient, address, SECRET)
        for _ in range(2):
            line, _ = listener.accept()
            line.sendall(HELLO + bytes(NONCE_BYTES))
            line.recv(CLIENT_BYTES)
            line.close()
        server = StoreServer(listener, SECRET)
        assert client.result(30).check([])
    server.close()


class FirstIsBroken(socket.socket):
    """A listener whose first connection is no use any more when it is accepted."""

    has_accepted = False

    def accept(self) -> tuple[socket.socket, Any]:
        line, peer = super().accept()
        if not self.has_accepted:
            self.has_accepted = True
            line.close()
        return line, peer


def test_broken_connection_does_not_end_the_store():
    listener = FirstIsBroken()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    address = listener.getsockname()
    server = StoreServer(listener, SECRET)
    with socket.create_connection(address, 5) as broken:
        assert broken.recv(1) == b""
    assert StoreClient(f"tcp:127.0.0.1:{address[1]}", SECRET, connect_s=5.0).check([])
    server.close()


def test_bad_request_ends_only_that_connection(tcp):
    client, odd = StoreClient(tcp.address, tcp.secret), StoreClient(tcp.address, tcp.secret)
    for request in ([b"exec", b"x"], [], [b"set", b"key"], [b"add", b"key", b"x"], [b"delete"]):
        with pytest.raises(StoreLostError):
            odd._ask(*request)
    assert client.check([])


def test_client_refuses_a_server_without_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            line, _ = listener.accept()
            with line:
                line.sendall(HELLO + bytes(NONCE_BYTES))
                line.recv(64)
                line.sendall(bytes(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(StoreRefusedError, match="does not know"):
            StoreClient(f"tcp:127.0.0.1:{listener.getsockname()[1]}", SECRET)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_user_of_the_machine_is_refused(local):
    name = local.address.removeprefix("unix:@")
    heard_nothing, heard_something = 3, 4
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            line = socket.socket(socket.AF_UNIX)
            line.connect("\0" + name)
            os._exit(heard_something if line.recv(64) else heard_nothing)
        except ConnectionResetError:
            os._exit(heard_nothing)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == heard_nothing
    assert StoreClient(local.address, local.secret).check([])


def test_store_address_repr_hides_the_secret(local):
    assert local.secret not in repr(local)
