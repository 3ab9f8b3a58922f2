"""Programs in Python without the seconds that imports take: a process that has them behind it forks for each.

`WarmPython(…).command` stands in the place of `sys.executable`: what it starts asks that process for a fork with its
arguments, folder, variables and output, passes signals on to it, and ends as it does. Run as a script this is either.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_READ_AT_START = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "LD_PRELOAD")


class WarmPython:
    """The process that has imported `modules`; it is started when it is first wanted, and ends with this one."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._command: list[str] = []

    @property
    def command(self) -> list[str]:
        """To be followed by a script and its words, or by `-m` and a module."""
        if not self._command:
            self._command = [sys.executable, "-I", "-S", __file__, "ask", self._start()]
        return list(self._command)

    def _start(self) -> str:
        import atexit
        import subprocess
        import tempfile

        folder = tempfile.TemporaryDirectory(prefix="wpy-")
        address = os.path.join(folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen(64)
            number = listening.fileno()
            arguments = [sys.executable, __file__, "serve", str(number), *self._modules]
            process = subprocess.Popen(arguments, pass_fds=[number], stdin=subprocess.PIPE, start_new_session=True)

        def close() -> None:
            process.kill()
            process.communicate()
            folder.cleanup()

        atexit.register(close)
        return address


# For scripts that train; what they import while they run is imported here too.
SCRIPTS = WarmPython(
    *("torch", "torch.distributed", "torch._dynamo", "numpy", "distributed", "distributed.cli.main"),
    *("distributed.worker", "distributed.trainers.trainer", "distributed.strategies.torch_mesh"),
    *("distributed.strategies.sharded", "torch._inductor.compile_fx"),
)


def ask(address: str, arguments: list[str]) -> NoReturn:
    """Be the program, as far as whoever started this can tell."""
    pid, early = 0, []

    def pass_on(number: int, frame: object) -> None:
        if pid:
            _send(pid, number)
        else:
            early.append(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    wanted = {"arguments": arguments, "folder": os.getcwd(), "environ": dict(os.environ), "pid": os.getpid()}
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        socket.send_fds(line, [b"?"], [0, 1, 2])
        line.sendall(json.dumps(wanted).encode() + b"\n")
        answers = line.makefile()
        pid = int(answers.readline() or 0)
        if not pid:
            os.execv(sys.executable, [sys.executable, *arguments])
        for number in early:
            _send(pid, number)
        code = os.waitstatus_to_exitcode(int(answers.readline() or signal.SIGKILL))
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def serve(listening: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Forks, and says of each fork its number and how it ended; one that nobody waits for any more is killed."""
    import gc
    import importlib
    import selectors

    gc.disable()  # a collection would write to pages that the children share
    before = {name: os.environ.get(name) for name in _READ_AT_START}  # imports may add variables of their own
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # for its byte
    selector, waiting = selectors.DefaultSelector(), dict[int, socket.socket]()

    def accept() -> None:
        asking, _ = listening.accept()
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 3)
        wanted = json.loads(asking.makefile().readline())
        is_alike = all(wanted["environ"].get(name) == value for name, value in before.items())
        pid = os.fork() if is_alike else 0
        if is_alike and not pid:
            mine = (asking, listening, woken, wake, selector, *waiting.values())
            _become(wanted, list(descriptors), [each.close for each in mine])
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            asking.sendall(f"{pid}\n".encode())
        if pid:
            waiting[pid] = asking
            selector.register(asking, selectors.EVENT_READ, lambda: lose(pid, asking))
        else:
            asking.close()

    def lose(pid: int, asking: socket.socket) -> None:
        selector.unregister(asking)
        _send(pid, signal.SIGKILL)

    def reap() -> None:
        woken.recv(4096)
        for pid, asking in list(waiting.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(KeyError):
                    selector.unregister(asking)
                with contextlib.suppress(OSError):
                    asking.sendall(f"{status}\n".encode())
                waiting.pop(pid).close()

    for place, then in ((listening, accept), (woken, reap), (0, lambda: os._exit(0))):
        selector.register(place, selectors.EVENT_READ, then)
    while True:
        for key, _ in selector.select():
            key.data()


def _become(wanted: dict[str, object], descriptors: list[int], closing: list[Callable[[], None]]) -> NoReturn:
    """Make this fork what a fresh interpreter with these arguments would be, and run its program."""
    import atexit
    import gc
    import runpy
    import threading

    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for close in closing:
            close()
        for number, target in enumerate(descriptors):
            os.dup2(target, number)
            os.close(target)
        _join(int(wanted["pid"]))  # type: ignore[call-overload]
        os.chdir(str(wanted["folder"]))
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ.clear()
        os.environ.update(wanted["environ"])  # type: ignore[call-overload]
        now = os.environ.get("OMP_NUM_THREADS")
        if "torch" in sys.modules and now and now != threads:
            sys.modules["torch"].set_num_threads(int(now))
        gc.enable()
        name, *words = wanted["arguments"]  # type: ignore[misc]
        if name == "-m":
            sys.argv = words
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [name, *words]
            sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
            runpy.run_path(name, run_name="__main__")
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # noqa: BLE001 - the boundary of a forked process
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _join(pid: int) -> None:
    """Be where that process is: on its host, if that is a network namespace."""
    import ctypes

    opened = []
    for name in ("net", "uts", "mnt"):
        if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            opened.append(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY))
    for space in opened:
        if ctypes.CDLL(None, use_errno=True).setns(space, 0):
            raise OSError(ctypes.get_errno(), "a namespace could not be joined")
        os.close(space)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    del sys.path[0]
    serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
