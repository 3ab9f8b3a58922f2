"""Object stores on loopback: a server as a process of its own, and a proxy before it that is slow or fails."""

from __future__ import annotations

import http.client
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.parse import urlsplit

import torch

from distributed.core.env import WorkerEnv
from distributed.launch.ports import free_port
from distributed.runtime.session import Session

Refuse = Callable[[str, str, bytes], int]  # method, path and body to a status; 0: it goes through


class Trouble:
    """What the proxy does to requests."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.every: int | None = None  # each so many-th request fails
        self.writes_left: int | None = None  # after so many writes all others fail
        self.status = 503
        self.count, self._lock = 0, threading.Lock()

    def strikes(self, method: str) -> bool:
        with self._lock:
            self.count += 1
            if self.writes_left is not None and method in ("PUT", "POST"):
                self.writes_left -= 1
                return self.writes_left < 0
            return self.every is not None and self.count % self.every == 0


@contextmanager
def proxied(upstream: str, refuses: Refuse = lambda method, path, body: 0) -> Iterator[tuple[str, Trouble]]:
    """The address of a proxy, and its trouble."""
    trouble = Trouble()
    proxy = _make_proxy(upstream, trouble, refuses)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}", trouble
    finally:
        proxy.shutdown()
        proxy.server_close()


def _make_proxy(upstream: str, trouble: Trouble, refuses: Refuse) -> ThreadingHTTPServer:
    target = urlsplit(upstream)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(trouble.delay_s)
            status = trouble.status if trouble.strikes(self.command) else refuses(self.command, self.path, body)
            if status:
                self.send_error(status)
                return
            assert target.hostname
            peer = http.client.HTTPConnection(target.hostname, target.port, timeout=30)
            peer.request(self.command, self.path, body, dict(self.headers))
            answer = peer.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(content)
            peer.close()

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Proxy)


@contextmanager
def server(command: Sequence[str], cwd: str | None = None) -> Iterator[str]:
    """The address of a server, which the word PORT in its command is given the port of, once it answers."""
    port = free_port()
    words = [str(port) if word == "PORT" else word for word in command]
    process = subprocess.Popen(words, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except HTTPError:
                break  # an answer all the same
            except OSError:
                assert process.poll() is None, f"{words[0]} ended"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"frozen": torch.arange(2.0**20), "w": torch.randn(2**19, generator=generator)}}
