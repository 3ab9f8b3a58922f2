"""The warm parent: a process that has done the slow imports and forks the ranks of a node on request.

`entry.py warm <fd of its socket> <launcher's pid> module…`. The protocol is described in `warm_parent.py`, the
launcher's side. The modules are names, since nothing here may depend on them; the user's own modules are not among
them, and are imported in every rank.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from distributed.core.env import CONTROL_FD, LAUNCHER_PID, become_environ, inherited_environ
from distributed.launch.node import rank
from distributed.launch.node.command import command_of, warm_argv

LENGTH_BYTES = 8  # before every request: how long it is
CANNOT_FORK = 3  # exit code of a rank that could not be forked: a LaunchError's
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def main(arguments: list[str]) -> NoReturn:
    light = frozenset(sys.modules)
    begin(socket.socket(fileno=int(arguments[0])), int(arguments[1]), arguments[2:], light)


def begin(line: socket.socket, launcher: int, modules: list[str], light: Collection[str]) -> NoReturn:
    """Import, then fork until the launcher disconnects. `light`: the modules of a new interpreter."""
    inherited: dict[int, Any] = {number: signal.getsignal(number) or signal.SIG_DFL for number in _STOPS}
    for number in _STOPS:  # the launcher handles these
        signal.signal(number, signal.SIG_IGN)
    rank.die_with(launcher)
    gc.disable()  # a collection would write to pages that the children share
    greedy = _preload(modules)
    if greedy is not None:
        print(f"not preloaded: {greedy} opens the GPU at import, and a fork could not use it then", flush=True)
        line.set_inheritable(True)
        others = [name for name in modules if name.strip() and name != greedy]
        os.execv(sys.executable, warm_argv(sys.executable, line.fileno(), launcher, others))
    line.set_inheritable(False)
    gc.freeze()
    _Server(line, light, inherited).serve()


def _preload(modules: list[str]) -> str | None:
    """Import all modules, or those up to the first one that must not be imported before a fork; returns that one."""
    for name in filter(str.strip, modules):
        begin = time.perf_counter()
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a rank that needs the module fails with it as well
            print(f"not preloaded: {name}: {error!r}", flush=True)
        else:
            print(f"preloaded {name} in {time.perf_counter() - begin:.2f} s", flush=True)
        if _holds_the_gpu():
            return name
    return None


def _holds_the_gpu() -> bool:
    """Whether any library opened the GPU driver, CUDA or NVML; torch knows only of itself."""
    descriptors = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return any(os.readlink(path).startswith("/dev/nvidia-uvm") for path in descriptors if os.path.islink(path))


@dataclass(frozen=True)
class _Request:
    id: int
    argv: list[str]
    environ: dict[str, str]
    cwd: str
    log: int
    input: int | None
    control: int | None


class _Server:
    def __init__(self, line: socket.socket, light: Collection[str], handlers: Mapping[int, Any]) -> None:
        self._line = line
        self._handlers = handlers  # of stop signals, as a rank that is not forked inherits them
        self._light = light  # the modules that a rank which is not forked has loaded too
        self._ids: dict[int, int] = {}  # pid -> request
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> NoReturn:
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # for its byte in the wakeup socket
        self._selector.register(self._line, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
            if self._line in ready:
                request = self._receive()
                if request is None:
                    os._exit(0)  # the launcher disconnected; the kernel ends the remaining ranks
                self._fork(request)

    def _receive(self) -> _Request | None:
        head, ancillary, _, _ = self._line.recvmsg(LENGTH_BYTES, socket.CMSG_SPACE(3 * 4), socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        head += self._exactly(LENGTH_BYTES - len(head)) if head else b""
        body = self._exactly(int.from_bytes(head, "big")) if head else b""
        if not body:
            return None
        asked, received = json.loads(body), list(descriptors)
        log, input_ = received.pop(0), received.pop(0) if asked.pop("has_input") else None
        return _Request(**asked, log=log, input=input_, control=received[0] if received else None)

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            part = self._line.recv(count - len(received))
            if not part:
                os._exit(0)
            received += part
        return bytes(received)

    def _fork(self, request: _Request) -> None:
        # A signal that arrives before the child has its own handlers is blocked; an ignored one would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        parent = os.getpid()
        try:
            with warnings.catch_warnings():  # a fork beside threads warns; those of BLAS handle forks themselves
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            os.write(request.log, f"this rank could not be forked: {error}\n".encode())
            self._send(id=request.id, status=CANNOT_FORK << 8)
        else:
            if pid == 0:
                self._child(request, parent)
            self._ids[pid] = request.id
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        for descriptor in (request.log, request.input, request.control):
            if descriptor is not None:
                os.close(descriptor)

    def _reap(self) -> None:
        for pid in list(self._ids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._send(id=self._ids.pop(pid), status=status)

    def _send(self, **report: int) -> None:
        try:
            self._line.sendall(json.dumps(report).encode() + b"\n")
        except OSError:
            os._exit(0)  # the launcher has ended

    def _child(self, request: _Request, parent: int) -> NoReturn:
        """The rank's side of the fork."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number, handler in {**self._handlers, signal.SIGCHLD: signal.SIG_DFL}.items():
                signal.signal(number, handler)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(request.log, 1)
            os.dup2(request.log, 2)
            os.close(request.log)
            if request.input is not None:
                os.dup2(request.input, 0)
                os.close(request.input)
            # From the child itself, since only now a signal to its group reaches it.
            self._send(id=request.id, pid=os.getpid())
            for mine in (self._selector, self._line, self._woken, self._wake):
                mine.close()
            command = list(command_of(request.argv))
            _become(request, command, parent, self._light)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            rank.run(command)
        except KeyboardInterrupt:  # before or after the program itself
            os._exit(130)
        except BaseException:  # noqa: BLE001 - the boundary of a forked process
            traceback.print_exc()
        finally:
            os._exit(1)


def _become(request: _Request, command: list[str], parent: int, light: Collection[str]) -> None:
    """Make this fork equal to a fresh interpreter for the request."""
    threads = inherited_environ().get("OMP_NUM_THREADS")
    line = {} if request.control is None else {CONTROL_FD: str(request.control)}
    become_environ({**request.environ, **line, LAUNCHER_PID: str(parent)})
    os.chdir(request.cwd)
    if not sys.flags.safe_path:
        _forget_shadowed(request.cwd if command[0] == "-m" else os.path.dirname(os.path.realpath(command[0])), light)
    importlib.invalidate_caches()
    _refresh(sys.modules.get("numpy"), sys.modules.get("torch"), threads, request.environ.get("OMP_NUM_THREADS"))
    gc.enable()


def _forget_shadowed(folder: str, light: Collection[str]) -> None:
    """Forget preloaded packages that a user's own module shadows, such as `datasets.py`."""
    try:
        names = {name.partition(".")[0] for name in os.listdir(folder)}
    except OSError:
        return
    for name in names & sys.modules.keys() - set(light):
        spec = PathFinder.find_spec(name, [folder])
        loaded = getattr(sys.modules[name], "__file__", None)
        if spec is not None and spec.loader is not None and spec.origin != loaded:
            for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
                del sys.modules[module]


def _refresh(numpy: Any, torch: Any, threads_before: str | None, threads: str | None) -> None:
    """Reseed numpy and set torch's threads, both fixed at import; Python's `random` reseeds itself after a fork."""
    if numpy is not None:
        numpy.random.seed()
    if torch is not None and threads != threads_before and (threads or "").isdigit():
        torch.set_num_threads(int(threads or 1))


if __name__ == "__main__":
    main(sys.argv[1:])
