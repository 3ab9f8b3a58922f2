"""Stacks: from faulthandler's text to the kind of work and the line of a process that makes no progress."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from distributed.core.choices import Activity
from distributed.core.engines.engine import ENGINES

_HEADER = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')

# Packages with their own training step: they call the user's code, or wait for the other ranks.
_ENGINES = sorted({engine.package for engine in ENGINES.entries.values() if engine.needs})
_OWN = f"{Path(__file__).parents[2]}/"
_LIBRARIES = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD = re.compile(r"<frozen |.*/lib/python3[.\d]*/")  # what is neither a library nor generated
_TORCH = re.compile(
    rf".*(?:(?:site|dist)-packages|pytorch)/(?=(?:torch|triton|{'|'.join(_ENGINES)})/)|.*/(?=torchinductor_[^/]*/)"
)

_COMPILERS = ("torch/_dynamo/", "torch/_inductor/", "torch/utils/cpp_extension.py", "triton/")
# These are also on the stack of calls of code that is already compiled.
_COMPILED = re.compile(
    r"torch/_dynamo/(eval_frame|external_utils|decorators)\.py|torch/_inductor/(output_code|utils|cudagraph_\w+)\.py"
    r"|torch/_inductor/runtime/|triton/runtime/(jit|driver)\.py|triton/backends/\w+/driver\.py"
)
_BUILD_LOCK = "torch/utils/file_baton.py"
# Frames that torch puts around a call: the frame outside of them names the call.
_PLUMBING = re.compile(r"torch/(_ops|_compile|utils/_contextlib|_dynamo/eval_frame|autograd/function)\.py")
_DATA = ("torch/utils/data/", "distributed/data/")
_WAITING = (
    "torch/distributed/",
    "distributed/comm/",
    "distributed/runtime/session.py",
    "distributed/runtime/world.py",
    *(f"{name}/" for name in _ENGINES),
)
_DDP, _DDP_RUNS_THE_MODEL = "torch/nn/parallel/distributed.py", {"forward", "_run_ddp_forward", "inner"}
_BACKWARD = "_engine_run_backward"
_WORKER_WAITS = {"_try_get_data", "_get_data"}


@dataclass(frozen=True)
class Frame:
    path: str
    line: int  # 0: not known
    name: str

    @property
    def module(self) -> str:
        """The path from the package on for torch, engines and this library; "" for the standard library."""
        if self.path.startswith(_OWN):
            return f"distributed/{self.path[len(_OWN) :]}"
        torch = _TORCH.match(self.path)
        if torch:
            return self.path[torch.end() :]
        is_standard = not _LIBRARIES.match(self.path) and (_STANDARD.match(self.path) or self.path == "<string>")
        return "" if is_standard else self.path

    @property
    def is_foreign(self) -> bool:
        """Whether the frame is the user's code, or of a library other than torch, an engine or this one."""
        return self.module == self.path

    @property
    def is_users(self) -> bool:
        return self.is_foreign and not _LIBRARIES.match(self.path)

    def __str__(self) -> str:
        library = _LIBRARIES.match(self.path)
        ours = self.module and not self.is_foreign
        short = self.module if ours else self.path[library.end() :] if library else PurePath(self.path).name
        return f"{short}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Thread:
    ident: str
    frames: tuple[Frame, ...]  # the innermost first

    @property
    def is_native(self) -> bool:
        """Whether native code started the thread, as for the backward pass on a GPU."""
        return not any(PurePath(frame.path).name == "threading.py" for frame in self.frames[-3:])


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is."""

    kind: Activity
    where: str
    needs_worker: bool = False  # the line that matters is in a worker of a data loader

    @property
    def waits(self) -> bool:
        return self.kind == "collective"


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """The threads of the last dump in a text, the main thread last, as faulthandler lists them.

    >>> parse_stacks('Current thread 0x7f (most recent call first):\\n  File "a.py", line 3 in wait\\n')
    (Thread(ident='0x7f', frames=(Frame(path='a.py', line=3, name='wait'),)),)
    """
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.replace("\0", "").splitlines():
        header = _HEADER.match(line)
        if header:
            if any(ident == header[1] for ident, _ in threads):  # the same thread again: another dump begins
                threads.clear()
            threads.append((header[1], []))
            continue
        frame = _FRAME.match(line)
        if frame and threads:
            threads[-1][1].append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return tuple(Thread(ident, tuple(frames)) for ident, frames in threads)


def standing(threads: Sequence[Thread], collective: str = "") -> Whereabouts:
    """The whereabouts of the main thread; `collective` is the one in the heartbeat."""
    if collective:
        return Whereabouts("collective", f"the collective {collective!r}")
    if not threads or not threads[-1].frames:
        return Whereabouts("unknown", "unknown: it shows no Python stack")
    frames = threads[-1].frames
    found = _standing(frames)
    if found.waits and any(frame.name == _BACKWARD for frame in frames):
        # On a GPU, backward runs in other threads, whose whereabouts explain why the main thread waits.
        busy = [_standing(thread.frames) for thread in threads[:-1] if thread.is_native and thread.frames]
        return next((other for other in busy if other.kind in ("compiling", "user code")), found)
    return found


def data_line(threads: Sequence[Thread]) -> str:
    """The user's line in which a data loader worker is; "" if the worker is idle."""
    if not threads:
        return ""
    line = _users_line(threads[-1].frames, _outermost(threads[-1].frames, _DATA))
    return str(line) if line is not None else ""


def _standing(frames: Sequence[Frame]) -> Whereabouts:
    inside_us = next((at for at, frame in enumerate(frames) if frame.module.startswith("distributed/")), len(frames))
    line = _users_line(frames, inside_us)  # the script's call of this library is not the line that hangs
    if _compiles(frames):
        return Whereabouts("compiling", f"compiling for {line}" if line else "compiling")
    waits_in = _waits_in(frames)
    if waits_in:
        return Whereabouts("collective", waits_in)
    data = _outermost(frames, _DATA)
    if data >= 0:
        line = _users_line(frames, data)
        if line is None and any(frame.name in _WORKER_WAITS for frame in frames):
            return Whereabouts("data", "waits for a data loader worker", needs_worker=True)
        return Whereabouts("data", str(line or next(frame for frame in frames if frame.module)))
    if line is not None:
        return Whereabouts("user code", str(line))
    return Whereabouts("unknown", str(next((frame for frame in frames if frame.module), frames[0])))


def _users_line(frames: Sequence[Frame], end: int) -> Frame | None:
    """The innermost line of the user's code, or else of a library, among the frames before `end`."""
    inner = frames[: max(end, 0)]
    own = next((frame for frame in inner if frame.is_users), None)
    return own or next((frame for frame in inner if frame.is_foreign), None)


def _outermost(frames: Sequence[Frame], places: tuple[str, ...]) -> int:
    return max((at for at, frame in enumerate(frames) if frame.module.startswith(places)), default=-1)


def _compiles(frames: Sequence[Frame]) -> bool:
    if any(frame.module == _BUILD_LOCK for frame in frames):
        return False  # another process compiles, or died while it did
    for frame in frames:
        if frame.is_users:  # compiled code may call the user's code again
            return False
        if frame.module.startswith(_COMPILERS) and not _COMPILED.match(frame.module):
            return True
    return False


def _waits_in(frames: Sequence[Frame]) -> str:
    """The collective of the innermost calls; "" if they are no collective."""
    inner = [frame for frame in frames if frame.module and not _PLUMBING.match(frame.module)]
    if not inner:
        return ""
    first = inner[0]
    if first.module == _BUILD_LOCK:
        return "the lock of an extension that another process builds"
    if first.module == "torch/autograd/graph.py" and first.name == _BACKWARD:
        return "the reduction of gradients in backward"
    if first.module == _DDP and first.name not in _DDP_RUNS_THE_MODEL:
        return f"the collective {first.name!r}"
    if not first.module.startswith(_WAITING):
        return ""
    name = first.name
    for frame in inner:  # the call of the user or of this library, not torch's calls inside it
        if not frame.module.startswith(_WAITING):
            break
        if frame.name != "wrapper":
            name = frame.name
        if not frame.module.startswith("torch/"):
            break
    return f"the collective {name!r}"
