"""One process that has imported torch, from which the warm parents of all launches of a test session are forked.

A warm parent of its own would cost each launch the seconds of those imports. Run as a script this is that process;
launchers that tests start find it by `TEST_TEMPLATE` in their environment. It answers only a launcher that has its
user, limits, namespaces and variables: any other one starts its warm parent as users' do.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

SOCKET = "TEST_TEMPLATE"
# What ranks import beside the modules of every warm parent: those of meshes, and of compiled blocks and DeepSpeed.
MORE = ("distributed.strategies.sharded", "distributed.strategies.torch_mesh", "torch._inductor.compile_fx")
_SITE = str(Path(__file__).with_name("site"))
# Those that nothing reads while it is imported. OMP_NUM_THREADS is, and is set again after the fork.
_FREE = (
    *("DISTRIBUTED_", "GLOO_", "GROUP_", "HOROVOD_", "MASTER_", "NCCL_", "_MLFLOW_"),
    *("PYTEST_", "RAY_", "ROLE_", "SLURM_", "SURVIVAL_", "TORCH_FR_", "TORCHELASTIC_", "TORCHINDUCTOR_", "TUNE_"),
)
_FREE_NAMES = frozenset(
    "COLUMNS CUDA_VISIBLE_DEVICES FORCE_COLOR LINES LOCAL_RANK LOCAL_WORLD_SIZE NO_COLOR NODE_RANK OLDPWD "
    "ENVIRONMENT OMP_NUM_THREADS PL_DISABLE_FORK PWD PYTHONBREAKPOINT PYTHONUNBUFFERED PYTORCH_NVML_BASED_CUDA_CHECK "
    f"RANK SHLVL SPT_NOENV TERM TMPDIR WORLD_SIZE XDG_CACHE_HOME _ {SOCKET}".split()
)


class Template:
    """The process; it ends with the one that started it. Until it is started, launches do without it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tpl-")
        self._process: subprocess.Popen[bytes] | None = None
        os.environ[SOCKET] = os.path.join(self._folder.name, "socket")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _SITE]))

    def start(self) -> None:
        from distributed.launch.node import warm_parent

        install(warm_parent)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(os.environ[SOCKET])
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(listening.fileno())],
                env=_lasting(os.environ),
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()


def install(warm_parent: ModuleType) -> None:
    """Let WarmParent ask the template first."""
    own, place = warm_parent.WarmParent.spawn, str(warm_parent.__file__)

    def spawn(argv: list[str], environ: Mapping[str, str], line: socket.socket, log: int) -> Any:
        is_wanted = argv[0] == sys.executable and SOCKET in os.environ
        forked = _ask(argv, environ, line, log, place) if is_wanted else None
        return forked or own(argv, environ, line, log)

    warm_parent.WarmParent.spawn = staticmethod(spawn)


def _ask(argv: list[str], environ: Mapping[str, str], line: socket.socket, log: int, place: str) -> _Forked | None:
    request = {"modules": argv[6:], "environ": dict(environ), "cwd": os.getcwd(), "alike": _alike(environ, place)}
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(os.environ[SOCKET])
            socket.send_fds(asking, [b"?"], [line.fileno(), log])
            asking.sendall(json.dumps(request).encode())
            asking.shutdown(socket.SHUT_WR)
            pid = int(asking.makefile().read() or 0)
            return _Forked(pid) if pid else None
    except OSError:
        return None


class _Forked:
    """What a launcher wants of a warm parent that is not its child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self) -> int:
        select.select([self._handle], [], [])
        return 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _alike(environ: Mapping[str, str], place: str) -> list[Any]:
    """What a process takes from whoever starts it, and what imports read; `place` is that of the package's code."""
    limits = [resource.getrlimit(number) for name, number in sorted(vars(resource).items()) if name[:7] == "RLIMIT_"]
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid", "user", "ipc")]
    mask = os.umask(0)
    os.umask(mask)
    user = [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()]
    found = [place, _lasting(environ), limits, spaces, mask, user, sorted(os.sched_getaffinity(0)), os.nice(0)]
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # as it comes to the other side


def _lasting(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if name not in _FREE_NAMES and not name.startswith(_FREE)}


def serve(listening: socket.socket) -> None:
    from distributed.launch.node import preloading, warm, warm_parent

    light = frozenset(sys.modules)
    mine = _alike(os.environ, str(warm_parent.__file__))  # before imports add variables of their own
    gc.disable()  # a collection would write to pages that the children share
    for name in (*preloading.ALWAYS, *MORE):
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(0, select.POLLHUP)  # whoever started this is gone
    while not any(number == 0 for number, _ in poll.poll()):
        asking, _ = listening.accept()
        with asking:
            _, descriptors, _, _ = socket.recv_fds(asking, 1, 2)
            request = json.loads(asking.makefile().read())
            pid = 0
            if request["alike"] == mine:
                pid = os.fork()
                if pid == 0:
                    listening.close()
                    asking.close()
                    _become(warm, request, array.array("i", descriptors), light)
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                asking.sendall(str(pid).encode())


def _become(warm: ModuleType, request: dict[str, Any], descriptors: array.array[int], light: frozenset[str]) -> None:
    line, log = descriptors
    parent = os.getppid()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, number)
    os.close(nothing)
    os.close(log)
    os.chdir(request["cwd"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(request["environ"])
    warm._refresh(None, sys.modules["torch"], before, request["environ"].get("OMP_NUM_THREADS"))
    try:
        warm.begin(socket.socket(fileno=line), parent, request["modules"], light)
    finally:
        os._exit(1)


if __name__ == "__main__":
    del sys.path[0]
    serve(socket.socket(fileno=int(sys.argv[1])))
