"""A Ray cluster of several nodes on this machine, with nodes that can be killed and nodes that join."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import psutil

from tests.conftest import clean_environ
from tests.ray_python import Forked
from tests.ray_template import ray_template

QUICK = {  # Ray starts no process before there is work for it, and its workers get their share of the processor
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else tests beside these starve them: Ray's own is 15
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # an agent that is forked is not the raylet's child
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RayNode:
    """One node: `ray start --block` and everything that it starts."""

    def __init__(self, process: Forked) -> None:
        self.process, self._is_killed = process, False

    def processes(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def raylet(self) -> psutil.Process:
        return next(one for one in self.processes() if one.name() == "raylet")

    def kill(self) -> None:
        """As when a machine loses its power: the raylet first, so that nothing is said in good order."""
        found = [] if self._is_killed else self.processes()  # another process may have its number by now
        self._is_killed = True
        for process in sorted(found, key=lambda one: one.name() != "raylet"):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


class RayNodes:
    """The head and its nodes; `environ` is what a driver needs to be let in, `python` starts one in less time."""

    def __init__(self, folder: Path, head_cpus: int) -> None:
        # Sockets have paths of at most 107 letters, which a test's own folder is too long for.
        self._temp = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._folder = folder
        self.environ = {
            **clean_environ(),
            **QUICK,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # else it waits a minute for a node that was just killed
            "RAY_health_check_initial_delay_ms": "500",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "10",
        }
        self._template = ray_template()
        self.python = self._template.python
        self.address = f"127.0.0.1:{free_port()}"
        self._nodes: list[RayNode] = []
        port = self.address.rpartition(":")[2]
        self._start("--head", "--port", port, "--ray-client-server-port", str(free_port()), cpus=head_cpus)

    def join(self, cpus: int) -> RayNode:
        """A node more."""
        return self._start("--address", self.address, cpus=cpus)

    def _start(self, *how: str, cpus: int) -> RayNode:
        command = [*how, "--num-cpus", str(cpus), "--num-gpus", "0", "--block", "--object-store-memory", "80000000"]
        command += ["--include-log-monitor", "false"]  # drivers do not show what workers print
        if "--head" in how:
            command += ["--include-dashboard=false", "--no-monitor", "--temp-dir", self._temp]
        path = self._folder / f"node-{len(self._nodes)}.log"
        with path.open("wb") as log:
            node = RayNode(self._template.start_node(command, self.environ, log.fileno()))
        self._nodes.append(node)
        deadline = time.monotonic() + 200
        while "Ray runtime started" not in path.read_text(errors="replace"):
            assert node.processes(), path.read_text(errors="replace")
            assert time.monotonic() < deadline, "the node did not come up"
            time.sleep(0.1)
        return node

    def close(self) -> None:
        for node in reversed(self._nodes):
            node.kill()
        shutil.rmtree(self._temp, ignore_errors=True)
