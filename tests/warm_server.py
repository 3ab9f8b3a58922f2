"""The process behind `warm_scripts`: it has imported modules, and forks scripts and the warm parents of launches.

It computes nothing itself, so that what it forks finds the modules as new.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from typing import Any

from tests.template import _alike


def serve(listening: socket.socket, modules: list[str]) -> None:
    from distributed.launch.node import warm, warm_parent

    light = frozenset(sys.modules)
    mine, before = _alike(os.environ, str(warm_parent.__file__)), dict(os.environ)
    gc.disable()  # a collection would write to pages that the children share
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    added = os.environ.keys() - before.keys()  # by the imports; a launcher that has done them has those too
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(0, select.POLLHUP)  # whoever started this is gone
    while not any(number == 0 for number, _ in poll.poll()):
        asking, _ = listening.accept()
        with asking:
            _, descriptors, _, _ = socket.recv_fds(asking, 1, 2)
            request = json.loads(asking.makefile().read())
            is_script = "argv" in request
            if not is_script and _comparable(request["alike"], added) != _comparable(mine, added):
                asking.sendall(b"0")
            elif (pid := os.fork()) == 0:
                listening.close()
                try:
                    if is_script:
                        _watch_script(request, descriptors, asking)
                    else:
                        asking.close()
                        _become_parent(warm, request, descriptors, light)
                finally:
                    os._exit(1)
            elif not is_script:
                asking.sendall(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)


def _comparable(alike: list[Any], added: set[str]) -> list[Any]:
    """Without the variables that TensorFlow sets, or reads after its import."""
    place, environ, *rest = alike
    kept = {
        name: value for name, value in environ.items() if not name.startswith(("GRPC_", "TF_")) and name not in added
    }
    return [place, kept, *rest]


def _as_started(request: dict[str, Any], out: int, err: int) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((0, nothing), (1, out), (2, err)):
        os.dup2(target, number)
    for number in {nothing, out, err}:
        os.close(number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])


def _become_parent(warm: Any, request: dict[str, Any], descriptors: list[int], light: frozenset[str]) -> None:
    line, log = descriptors
    launcher = os.getppid()
    _as_started(request, log, log)
    warm.begin(socket.socket(fileno=line), launcher, request["modules"], light)


def _watch_script(request: dict[str, Any], descriptors: list[int], asking: socket.socket) -> None:
    """Answers with the script's number and, once it has ended, with its exit code."""
    _as_started(request, *descriptors)
    script = os.fork()
    if script == 0:
        asking.close()
        os._exit(_run_script(request["argv"]))
    asking.sendall(f"{script}\n".encode())
    asking.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])}\n".encode())
    os._exit(0)


def _run_script(argv: list[str]) -> int:
    code = 0
    is_module = argv[0] == "-m"
    sys.argv = argv[1:] if is_module else argv
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(argv[0])))
    gc.enable()
    try:
        if is_module:
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the boundary of a forked process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    del sys.path[0]
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
