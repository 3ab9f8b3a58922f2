"""Ranks forked from a warm parent cannot be told from ranks that are started by themselves, and end with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed.core.env import CONTROL_FD, LAUNCHER_PID, WorkerEnv
from distributed.core.errors import LaunchError
from distributed.core.protocol.failure import FailureRecord
from distributed.core.run_dir import RunDir
from distributed.launch.node.command import rank_argv
from distributed.launch.node.preloading import preloads
from distributed.launch.node.processes import RankProcess, end_all
from distributed.launch.node.warm_parent import WarmParent
from distributed.launch.request import ProcessSpec
from tests.conftest import clean_environ

pytestmark = [
    pytest.mark.skipif(not WarmParent.is_supported(), reason="ranks are forked on Linux only"),
    pytest.mark.usefixtures("own_warm_parents"),
]
SLEEP = "import time\nprint('up')\ntime.sleep(600)"
Start = Callable[..., RankProcess]


def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def ended(process: RankProcess) -> int:
    until(process.is_gone)
    code = process.poll()
    assert code is not None
    return code


def text_of(process: RankProcess) -> str:
    return Path(process.log_path).read_text()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def spec_of(folder: Path, script: str, *args: str, rank: int = 0) -> tuple[ProcessSpec, dict[str, str]]:
    """A script, or `-m` and a module, in `folder`, and the whole environment of its rank."""
    worker = WorkerEnv(rank=rank, world_size=4, local_world_size=4, master_port=1, run_dir=str(folder / "run"))
    attempt = RunDir(worker.run_dir).attempt(worker.attempt).path
    attempt.mkdir(parents=True, exist_ok=True)
    argv = rank_argv(sys.executable, (script, *args))
    spec = ProcessSpec(rank, argv, worker.to_environ(), str(attempt / f"rank-{rank}.log"))
    return spec, clean_environ(PYTHONUNBUFFERED="1", **worker.to_environ()) | {LAUNCHER_PID: str(os.getpid())}


@pytest.fixture
def warm() -> Iterator[WarmParent]:
    """With nothing preloaded but what is quick to import."""
    parent = WarmParent(sys.executable, clean_environ(), ("statistics", "no_such_module"))
    yield parent
    parent.close()


@pytest.fixture(params=["forked", "spawned"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start a program as a rank, once in either way."""
    parent = WarmParent(sys.executable, clean_environ(), ("statistics",)) if request.param == "forked" else None
    started: list[RankProcess] = []

    def start_rank(program: str, *args: str, with_control: bool = False, rank: int = 0, **more: str) -> RankProcess:
        (tmp_path / "script.py").write_text(program)
        spec, environ = spec_of(tmp_path, str(tmp_path / "script.py"), *args, rank=rank)
        if parent is not None:
            started.append(parent.start(spec, environ | more, with_control))
        else:
            started.append(RankProcess(spec, environ | more, with_control=with_control))
        return started[-1]

    yield start_rank
    end_all(started, 0.0)
    for process in started:
        if process.control is not None:
            process.control.close()
    if parent is not None:
        parent.close()


def test_forked_rank_has_the_environment_of_a_cold_one(tmp_path, warm, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("X = 5")
    (tmp_path / "code" / "statistics.py").write_text("mine = True")  # one of this name was preloaded
    (tmp_path / "code" / "script.py").write_text(
        "import gc, json, os, signal, sys, threading\nimport helper, statistics\n"
        "place = [__name__, __file__, repr(__spec__), sorted(globals()), sys.argv, sys.orig_argv, sys.path]\n"
        "env = {k: v for k, v in os.environ.items() if k not in ('DISTRIBUTED_RUN_DIR', '_')}\n"
        "numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)\n"
        "handlers = [repr(signal.getsignal(number)) for number in numbers]\n"
        "mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
        "ids = [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), threading.active_count(), gc.isenabled()]\n"
        "links = [os.readlink('/proc/self/fd/0'), os.isatty(1), os.fstat(1).st_ino == os.fstat(2).st_ino]\n"
        "main = sys.modules['__main__'].__dict__ is globals()\n"
        "own = [main, os.getcwd(), statistics.mine, helper.X]\n"
        "print(json.dumps([place, own, env, handlers, mask, ids, links], default=str))\n"
    )
    monkeypatch.chdir(tmp_path)  # after the warm parent began
    said = []
    for begin in (warm.start, RankProcess):
        spec, environ = spec_of(tmp_path, "code/script.py", "--a", "b c")
        process = begin(spec, environ | {"ODD": "a\nb=\udcff"})
        assert ended(process) == 0, text_of(process)
        said.append(json.loads(text_of(process)))
    assert said[0] == said[1]
    assert said[0][2]["ODD"] == "a\nb=\udcff"
    assert LAUNCHER_PID not in said[0][2]


def test_a_module_runs_as_with_dash_m(tmp_path, warm, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    process = warm.start(*spec_of(tmp_path, "-m", "pack", "x"))
    assert ended(process) == 0, text_of(process)
    assert text_of(process) == "__main__ pack ['x']\n"


WORLD_OF_SCRIPT = """
import gc, json, locale, logging, os, signal, sys, threading, warnings
frame, world = sys._getframe(), {}
world["main"] = {name: str(value) for name, value in globals().items() if name not in ("__loader__", "world", "frame")}
world["main"] = sorted(world["main"].items())[:20]
world["flags"], world["argv"], world["words"] = str(sys.flags), sys.argv, sys.orig_argv[1:]
world["path"], world["executable"] = sys.path, sys.executable
world["limits"] = [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()]
world["filters"] = [str(found) for found in warnings.filters]
world["handlers"] = [str(signal.getsignal(number)) for number in range(1, 32)]
world["mask"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
world["umask"], world["locale"] = os.umask(0o22), locale.setlocale(locale.LC_ALL)
world["threads"], world["logging"] = threading.active_count(), [str(logging.root.handlers), logging.root.level]
world["gc"] = [gc.isenabled(), gc.get_threshold()]
world["hooks"] = [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile(), len(sys.path_hooks)]
json.dump(world, open("world.json", "w"), default=str)
"""


def test_world_of_script_is_that_of_plain_python(tmp_path, start, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ended(process := start(WORLD_OF_SCRIPT, "--a", "b")) == 0, text_of(process)
    ours = json.loads((tmp_path / "world.json").read_text())
    subprocess.run([sys.executable, str(tmp_path / "script.py"), "--a", "b"], env=clean_environ(), check=True)
    assert ours == json.loads((tmp_path / "world.json").read_text())


def test_ps_shows_the_script_and_not_our_bootstrap(tmp_path, start):
    process = start(SLEEP, "--rate", "0.1")
    until(lambda: text_of(process) == "up\n")
    words = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert [word.decode() for word in words] == [sys.executable, str(tmp_path / "script.py"), "--rate", "0.1"]


@pytest.mark.parametrize("place", ["beside", "in the working directory", "on PYTHONPATH"])
@pytest.mark.parametrize("program", ["print(distributed.mine)", "raise ValueError(distributed.mine)"])
def test_users_own_distributed_py_hides_nothing_of_ours(tmp_path, start, monkeypatch, place, program):
    cwd, folder = tmp_path / "cwd", tmp_path / "folder"
    for path in (cwd, folder):
        path.mkdir()
    monkeypatch.chdir(cwd)
    where = {"beside": tmp_path, "in the working directory": cwd, "on PYTHONPATH": folder}[place]
    (where / "distributed.py").write_text("mine = 7")
    is_found = place == "beside"  # the other two are not on the path of these processes
    process = start(f"import distributed\n{program}" if is_found else "from distributed import DistributedConfig as C")
    fails = is_found and program.startswith("raise")
    assert ended(process) == fails, text_of(process)
    if is_found:
        assert ("ValueError: 7" if fails else "7\n") in text_of(process)


@pytest.mark.parametrize(
    ("program", "code", "kind"),
    [
        ("import sys\nsys.exit(3)", 3, "SystemExit"),
        ("print(1)", 0, None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(60)", 130, None),
        ("def inner():\n    raise ValueError('boom')\ninner()", 1, "ValueError"),
    ],
)
def test_forked_rank_reports_exit_code_and_failure(tmp_path, start, program, code, kind):
    process = start(program, rank=2)
    assert ended(process) == code
    record = FailureRecord.read(RunDir(tmp_path / "run").attempt(0).failure(2))
    assert (record.type if record else None) == kind
    if kind == "ValueError":
        assert (record.rank, record.message, record.pid) == (2, "boom", process.pid)
        assert record.traceback.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/script.py", line 3')
        assert record.traceback in text_of(process)
    assert not process.ended_by_us


def test_control_socket_is_two_way_and_not_inherited(start):
    process = start(
        "import os, socket, subprocess\n"
        f"line = socket.socket(fileno=int(os.environ['{CONTROL_FD}']))\n"
        "open_here = subprocess.Popen(['ls', '/proc/self/fd'], stdout=subprocess.PIPE, close_fds=False)\n"
        "line.sendall(str(line.fileno() in map(int, open_here.communicate()[0].split())).encode())\n"
        "print(line.recv(10))\n"
        "assert line.recv(10) == b''\n",
        with_control=True,
    )
    assert process.control.recv(10) == b"False"
    process.control.sendall(b"hello")
    until(lambda: "b'hello'" in text_of(process))
    process.control.shutdown(socket.SHUT_WR)
    assert ended(process) == 0
    assert process.control.recv(1) == b""


def test_rank_without_control_socket_does_not_get_the_launchers(start):
    process = start("import os\nprint('DISTRIBUTED_CONTROL_FD' in os.environ)", **{CONTROL_FD: "7"})
    assert ended(process) == 0
    assert process.control is None
    assert text_of(process) == "False\n"


def test_forked_rank_has_no_foreign_file_descriptors(start):
    process = start(
        "import os\n"
        "names = sorted(os.listdir('/proc/self/fd'), key=int)\n"
        "print([os.path.basename(os.readlink(f'/proc/self/fd/{n}')).split(':')[0] for n in names"
        " if os.path.lexists(f'/proc/self/fd/{n}')])\n",
        with_control=True,
    )
    assert ended(process) == 0
    first, *rest = eval(text_of(process))
    assert first == "null"
    assert sorted(rest) == ["rank-0.log", "rank-0.log", "socket", "stack-0.txt"]


def test_child_of_a_killed_rank_is_ended(start):
    process = start(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)\ntime.sleep(600)"
    )
    until(lambda: text_of(process).endswith("\n"))
    child = int(text_of(process))
    assert runs(child)
    os.kill(process.pid, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    assert not runs(child)


def test_sigusr2_dumps_the_stacks_of_a_forked_rank(tmp_path, start):
    process = start("import time\ndef inner():\n    print('up')\n    time.sleep(600)\ninner()")
    until(lambda: text_of(process) == "up\n")
    process.signal(signal.SIGUSR2)
    stacks = tmp_path / "run" / "attempts" / "0" / "stack-0.txt"
    until(lambda: "in inner" in stacks.read_text())
    assert process.poll() is None


def test_signal_before_the_fork_reaches_the_rank(tmp_path):
    (tmp_path / "script.py").write_text(SLEEP)
    parent = WarmParent(sys.executable, clean_environ(), ("torch",))
    ranks = [parent.start(*spec_of(tmp_path, str(tmp_path / "script.py"), rank=r)) for r in range(2)]
    ranks[0].signal(signal.SIGTERM)
    ranks[1].signal(signal.SIGINT)
    assert [ended(process) for process in ranks] == [-signal.SIGTERM, 130]
    assert parent.is_alive
    parent.close()


def test_ranks_not_yet_forked_are_ended_at_once(tmp_path):
    (tmp_path / "hang.py").write_text("import time\ntime.sleep(600)")
    (tmp_path / "script.py").write_text(SLEEP)
    parent = WarmParent(sys.executable, clean_environ(PYTHONPATH=str(tmp_path)), ("hang",))
    ranks = [parent.start(*spec_of(tmp_path, str(tmp_path / "script.py"), rank=r)) for r in range(2)]
    end_all(ranks, 0.0)
    assert [(process.poll(), process.ended_by_us) for process in ranks] == [(-signal.SIGKILL, True)] * 2
    with pytest.raises(LaunchError):
        _ = ranks[0].pid
    assert not parent.is_alive


def test_ranks_of_a_killed_warm_parent_end_and_are_reported(tmp_path, warm):
    (tmp_path / "script.py").write_text(SLEEP)
    ranks = [warm.start(*spec_of(tmp_path, str(tmp_path / "script.py"), rank=r)) for r in range(2)]
    until(lambda: all(text_of(process) == "up\n" for process in ranks))
    pids = [process.pid for process in ranks]
    assert warm.is_alive
    os.kill(warm.pid, signal.SIGKILL)
    until(lambda: all(process.poll() is not None for process in ranks))
    assert not any(map(runs, pids))
    assert [ended(process) for process in ranks] == [-signal.SIGKILL] * 2
    assert not warm.is_alive
    with pytest.raises(LaunchError):
        warm.start(*spec_of(tmp_path, str(tmp_path / "script.py")))


def test_warm_parent_ignores_sigint_and_sigterm(tmp_path, warm):
    (tmp_path / "script.py").write_text(SLEEP)
    process = warm.start(*spec_of(tmp_path, str(tmp_path / "script.py")))
    until(lambda: text_of(process) == "up\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(warm.pid, number)
    process.signal(signal.SIGINT)
    assert ended(process) == 130
    again = warm.start(*spec_of(tmp_path, str(tmp_path / "script.py")))
    until(lambda: text_of(again) == "up\n")
    end_all([again], 5.0)
    assert (again.poll(), again.ended_by_us) == (-signal.SIGTERM, True)


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from distributed.launch.node.warm_parent import WarmParent
from tests.ranks.test_launch_warm import spec_of
parent = WarmParent(sys.executable, {{}}, ("statistics",))
process = parent.start(*spec_of(Path({folder!r}), {script!r}))
print(parent.pid, process.pid, flush=True)
while process.poll() is None:
    try:
        time.sleep(0.01)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A launcher in a process group of its own, with a warm parent and a rank; and the pids of these two."""
    (tmp_path / "script.py").write_text(SLEEP)
    root = Path(__file__).parents[2]
    text = LAUNCHER.format(root=str(root), folder=str(tmp_path), script=str(tmp_path / "script.py"))
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=clean_environ(), start_new_session=True
    ) as process:
        assert process.stdout is not None
        parent, rank = map(int, process.stdout.readline().split())
        until(lambda: (tmp_path / "run" / "attempts" / "0" / "rank-0.log").read_text() == "up\n")
        yield process, parent, rank
        process.kill()


def test_killed_launcher_ends_warm_parent_and_ranks(launcher):
    process, parent, rank = launcher
    assert runs(parent)
    assert runs(rank)
    process.kill()
    until(lambda: not runs(parent) and not runs(rank))


def test_ctrl_c_reaches_the_launcher_but_not_its_ranks(launcher):
    process, parent, rank = launcher
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    os.kill(rank, 0)
    assert runs(parent)
    assert runs(rank)
    os.kill(rank, signal.SIGKILL)
    assert process.wait(60) == 0


def test_forked_ranks_share_torch_but_not_random_state(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\nloaded = [name in sys.modules for name in ('torch', 'torch._dynamo', 'distributed.worker')]\n"
        "import json, random, numpy, torch\n"
        "product = (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()\n"  # with threads: none was lost
        "torch.nn.functional.mse_loss(torch.nn.Linear(9, 9)(torch.ones(4, 9)), torch.ones(4, 9)).backward()\n"
        "print(json.dumps([loaded, product, torch.get_num_threads(), numpy.random.random(), random.random()]))"
    )
    parent = WarmParent(sys.executable, clean_environ(OMP_NUM_THREADS="3"), preloads(tmp_path / "script.py").modules)
    ranks = []
    for rank in range(4):
        spec, environ = spec_of(tmp_path, str(tmp_path / "script.py"), rank=rank)
        ranks.append(parent.start(spec, environ | {"OMP_NUM_THREADS": str(1 + rank % 2)}))
    assert [ended(process) for process in ranks] == [0] * 4, text_of(ranks[0])
    said = [json.loads(text_of(process)) for process in ranks]
    assert [one[0] for one in said] == [[True] * 3] * 4
    assert [one[1] for one in said] == [300.0**3] * 4
    assert [one[2] for one in said] == [1, 2, 1, 2]
    assert len({one[3] for one in said}) == len({one[4] for one in said}) == 4
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text()
    assert children == ""  # no zombies
    parent.close()


def test_only_safe_imports_of_the_script_are_preloaded(tmp_path):
    always = preloads(None).modules
    assert "torch" in always
    (tmp_path / "script.py").write_text(
        "import numpy as np, mine.part\nfrom sklearn.datasets import load_digits\nfrom . import x\nimport deepspeed\n"
        "def later():\n    import scipy\n"
    )
    assert preloads(tmp_path / "script.py").modules == (*always, "sklearn.datasets")
    (tmp_path / "script.py").write_text("import (")
    assert preloads(tmp_path / "script.py").modules == always
    assert preloads(tmp_path / "none.py").modules == always


@pytest.mark.parametrize(
    ("program", "is_forked", "left_out"),
    [
        ("import torch\nos.environ['OMP_NUM_THREADS'] = '4'\nimport numpy", True, ()),
        ("os.environ['OMP_NUM_THREADS'] = '4'\nimport torch", False, ("torch", "numpy")),
        ("os.environ.setdefault('TORCH_LOGS', 'dynamo')\nfrom mine import model", False, ("torch", "numpy")),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'\nimport torch", True, ()),
        ("os.environ.update(HF_HOME='/hf')\nimport torch, datasets, yaml", True, ("datasets", "yaml")),
        (
            "os.environ |= chosen\nimport torch, matplotlib.pyplot",
            False,
            ("torch", "numpy", "matplotlib"),
        ),
        ("os.environ['MPLBACKEND'] = 'Agg'\nimport torch, matplotlib.pyplot", True, ("matplotlib",)),
        ("def prepare():\n    os.putenv(name, value)\nprepare()\nimport torch", False, ("torch", "numpy")),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", False, ("torch", "numpy")),
        ("exec(open('settings.txt').read())\nimport torch", False, ("torch", "numpy")),
        ("import torch, transformers\nexec(open('configurator.py').read())\nimport mine", True, ()),
        ("import torchvision\ndel os.environ['A']\nimport pandas", True, ("pandas",)),
        ("from mine import model\nos.environ['A'] = 'late'", True, ()),
        ("print(os.environ['A'], os.environ.get('B'))\nimport torch", True, ()),
        ("from os import environ as env\nenv['MPLBACKEND'] = 'Agg'\nimport torch, matplotlib", True, ("matplotlib",)),
        ("env = os.environ\nenv['TORCH_LOGS'] = 'dynamo'\nimport torch", False, ("torch", "numpy")),
    ],
)
def test_package_is_not_preloaded_before_its_variables_are_set(tmp_path, program, is_forked, left_out):
    (tmp_path / "script.py").write_text(f"import os\n{program}")
    found = preloads(tmp_path / "script.py")
    assert bool(found.modules) == is_forked
    assert found.left_out == left_out
    assert ("script.py:" in found.why) == bool(left_out)


@pytest.mark.parametrize(
    ("program", "left_out", "why"),
    [
        ("import settings\nimport torch", ("torch", "numpy"), "settings.py:2 sets OMP_NUM_THREADS before"),
        ("from settings import N\nimport torch", ("torch", "numpy"), "settings.py:2 sets OMP_NUM_THREADS before"),
        ("from pack.inner import f\nimport torch, yaml", ("yaml",), "base.py:2 sets HF_HOME before"),
        ("import torch\nimport settings", (), ""),
        ("import late\nimport yaml", (), ""),
        ("if False:\n    import torch\nimport settings, torch", ("torch", "numpy"), "settings.py:2 sets"),
    ],
)
def test_variables_are_looked_for_in_the_programs_own_modules(tmp_path, program, left_out, why):
    (tmp_path / "pack").mkdir()
    files = {
        "script.py": program,
        "settings.py": "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nN = 1",
        "late.py": "import os, torch, yaml\nos.environ['A'] = 'late'\nimport pack.inner",
        "pack/__init__.py": "",
        "pack/inner.py": "from . import base\nimport script\nf = 1",
        "pack/base.py": "import os\nos.environ['HF_HOME'] = '/hf'",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = preloads(tmp_path / "script.py")
    assert found.left_out == left_out
    assert found.why.startswith(why)
    assert bool(found.why) == bool(why)
