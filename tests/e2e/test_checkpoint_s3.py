"""Checkpoints on S3, against a real endpoint on loopback, with a proxy in between that is slow or fails."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from distributed.checkpoint.restore.candidates import find
from distributed.checkpoint.restore.reading import load, verify
from distributed.checkpoint.restore.restoring import restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.remote import RemoteStorage
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError
from distributed.launch.ports import free_port
from distributed.runtime.session import Session

pytest.importorskip("s3fs", reason="s3fs is not installed")


def alone() -> Session:
    return Session(WorkerEnv(), torch.device("cpu"), None)


class Trouble:
    """What the proxy does to requests."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.every: int | None = None  # each so many-th request fails
        self.writes_left: int | None = None  # after so many writes all others fail
        self.count, self._lock = 0, threading.Lock()

    def strikes(self, method: str) -> bool:
        with self._lock:
            self.count += 1
            if self.writes_left is not None and method in ("PUT", "POST"):
                self.writes_left -= 1
                return self.writes_left < 0
            return self.every is not None and self.count % self.every == 0


def make_proxy(upstream: str, trouble: Trouble) -> ThreadingHTTPServer:
    target = urlsplit(upstream)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(trouble.delay_s)
            if trouble.strikes(self.command):
                self.send_error(503, "Slow Down")
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


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """moto's server as a process of its own."""
    command = shutil.which("moto_server", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("moto_server is not installed")
    port = free_port()
    process = subprocess.Popen(
        [command, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "moto_server ended"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def trouble(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trouble]:
    """Requests go through a proxy; the environment names it as a user's would."""
    trouble = Trouble()
    proxy = make_proxy(s3, trouble)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    request = urllib.request.Request(f"{s3}/bucket", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    yield trouble
    proxy.shutdown()


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"frozen": torch.arange(2.0**20), "w": torch.randn(2**19, generator=generator)}}


def test_save_restore_and_retention_on_s3(trouble: Trouble, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/checkpoints"
    assert find(url, True) == []
    saver = Saver(url, alone(), TensorStaging(), keep_last=2)
    saver.prepare(state(1), {})
    for step in (1, 2, 3):
        saver.save(step, state(step), {"rng": {"n": torch.tensor(step)}})
    assert saver.wait() == f"{url}/step-000003"
    assert saver.last_saved is not None
    assert saver.last_saved.written_bytes < 0.4 * saver.last_saved.total_bytes, "what is frozen is there already"
    assert [found.step for found in find(url, True)] == [3, 2]
    restored = restore(url, True, alone())
    assert restored is not None
    assert torch.equal(restored.shared["model"]["w"], state(3)["model"]["w"])
    assert not verify(f"{url}/step-000002").problems
    used = set(load(f"{url}/step-000002").manifest.chunks) | set(restored.manifest.chunks)
    assert len(RemoteStorage(url).list("chunks")) == len(used)
    assert RemoteStorage(url).list("parts") == []


def test_saves_to_slow_and_flaky_s3_are_retried_to_success(trouble: Trouble, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/flaky"
    trouble.every, trouble.delay_s = 3, 0.02
    saver = Saver(url, alone(), TensorStaging())
    for step in (1, 2):
        saver.save(step, state(step), {})
    saver.close()
    assert trouble.count > 6
    restored = restore(url, True, alone())
    assert restored is not None
    assert torch.equal(restored.shared["model"]["w"], state(2)["model"]["w"])


def test_failed_saves_to_s3_leave_the_last_good_checkpoint(trouble: Trouble, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/failing"
    storage = RemoteStorage(
        url, tries=2, first_pause_s=0.01, options={"config_kwargs": {"retries": {"max_attempts": 1}}}
    )
    saver = Saver(storage, alone(), TensorStaging(), keep_last=1)
    saver.save(1, state(1), {}, wait=True)
    for writes in (0, 1, 3):  # that still go through: two chunks and a part come before the manifest
        trouble.writes_left = writes
        saver.save(2, state(2 + writes), {"rng": {"n": torch.tensor(writes)}})
        with pytest.raises(CheckpointError, match="cannot write"):
            saver.wait()
        trouble.writes_left = None
        restored = restore(url, True, alone())
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(restored.shared["model"]["w"], state(1)["model"]["w"])
    saver.save(3, state(3), {}, wait=True)
    assert [found.step for found in find(url, True)] == [3]
    assert not verify(f"{url}/step-000003").problems
