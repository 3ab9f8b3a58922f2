"""One process that has imported what Ray imports, from which the Python processes of the tests' clusters are forked.

Ray starts a fresh Python for every worker, actor and agent, each of which imports the same for seconds. Here
tests/ray_python.py stands for Python, and asks this process. It has all but Ray itself, which takes its variables, its
job and the seed of its identifiers when it is imported, and so must be imported in each of them. Run as a script this
is the process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ != "__main__":
    from tests.ray_python import Forked

_MODULES = (
    *("torch", "torch.distributed", "torch._dynamo", "distributed.trainers.trainer", "distributed.cli.main"),
    *("distributed.tune", "pandas", "pyarrow.dataset", "pyarrow.parquet", "grpc.aio", "google.protobuf.json_format"),
    *("google.protobuf.wrappers_pb2", "google.protobuf.timestamp_pb2", "aiohttp.web", "jsonschema", "requests"),
    *("fsspec.implementations.local", "click", "filelock", "msgpack", "packaging.version", "psutil"),
    *("pydantic.dataclasses", "rich.layout", "tqdm.auto", "sklearn.datasets", "multiprocessing.pool"),
)


class RayTemplate:
    """The process; it ends with the process that started it. `python` is the executable that asks it."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(
            prefix="tpl-", dir="/tmp"
        )  # not TMPDIR: a socket's path has at most 107 letters
        self._socket, self.python = f"{self._folder}/socket", f"{self._folder}/python"
        client = Path(__file__).with_name("ray_python.py")
        command = f'exec {sys.executable} -ISs {client} {sys.executable} {self._socket} "$@"'
        Path(self.python).write_text(f"#!/bin/sh\n{command}\n")
        os.chmod(self.python, 0o700)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._socket)
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
            )
        atexit.register(self._close)

    def start_node(self, arguments: Sequence[str], environ: Mapping[str, str], log: int) -> Forked:
        """`ray start …`, whose own processes ask the template too."""
        command = ["-m", "ray.scripts.scripts", "start", *arguments]
        return Forked(self._socket, command, environ, (0, log, log), self.python)

    def _close(self) -> None:
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def ray_template() -> RayTemplate:
    """The one of this process, started when it is first asked for."""
    return RayTemplate()


class _Server:
    """The loop of the template. `serve` returns in the processes that it forks, with what they are to run."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        gc.disable()  # a collection would write to pages that are shared
        for name in _MODULES:
            with contextlib.suppress(ImportError):  # another version of Ray has other needs
                importlib.import_module(name)
        gc.freeze()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, lambda: os._exit(0))  # whoever started this is gone
        self._selector.register(listening, selectors.EVENT_READ, None)

    def serve(self) -> Callable[[], None]:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    key.data()
                elif (program := self._answer()) is not None:
                    return program

    def _answer(self) -> Callable[[], None] | None:
        line, _ = self._listening.accept()
        _, streams, _, _ = socket.recv_fds(line, 1, 3)
        wanted = json.loads(line.makefile().readline())
        pid = os.fork()
        if pid == 0:
            line.close()
            self._close()
            _become(wanted, streams)
            return lambda: _run(wanted["argv"])
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):
            line.sendall(f"{pid}\n".encode())
        self._watch(line, pid)
        return None

    def _watch(self, line: socket.socket, pid: int) -> None:
        """Until it has ended; it is killed when nobody waits for it any more."""
        handle = os.pidfd_open(pid)

        def ended() -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._selector.unregister(handle)
            with contextlib.suppress(KeyError):
                self._selector.unregister(line)
            with contextlib.suppress(OSError):
                line.sendall(f"{code}\n".encode())
            line.close()
            os.close(handle)

        def left() -> None:
            self._selector.unregister(line)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

        self._selector.register(handle, selectors.EVENT_READ, ended)
        self._selector.register(line, selectors.EVENT_READ, left)

    def _close(self) -> None:
        """What only the template needs."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fd > 0:
                os.close(key.fd)
        self._selector.close()


def _become(wanted: dict[str, Any], streams: Sequence[int]) -> None:
    """What a process takes from whoever starts it, and what numpy and torch read when they are imported."""
    import numpy as np
    import torch

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    sys.executable = wanted["executable"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(number, "w", buffering=1, errors="backslashreplace", closefd=False))  # noqa: SIM115
    np.random.seed()  # the state of programs that make none of their own
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        torch.set_num_threads(int(threads))
    gc.enable()


def _run(argv: list[str]) -> None:
    """A program as Python itself would run it."""
    while argv[0] == "-u":
        argv = argv[1:]
    if argv[0].endswith("/setup_worker.py"):
        argv = _set_up_worker(argv[1:])
    main = sys.modules["__main__"] = ModuleType("__main__")
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        return
    sys.argv = argv
    path = os.path.abspath(argv[0])
    sys.path.insert(0, os.path.dirname(path))
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def _set_up_worker(arguments: list[str]) -> list[str]:
    """Ray's program before each worker sets variables, and then executes Python once more."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers.setup_worker import parser

    known, rest = parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    assert not context.command_prefix, context.command_prefix
    update_envs(context.env_vars)
    return rest


if __name__ == "__main__":
    del sys.path[0]
    _program = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    _program()
