"""The bootstrap of a rank runs a program as Python would, and writes down how it failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.core.env import FAILURE_MARK, WorkerEnv
from distributed.core.failure import FailureRecord, failure_path

PLAIN_ENV = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def bootstrap(folder: Path, *command: str, **more) -> tuple[subprocess.CompletedProcess[str], FailureRecord | None]:
    attempt = folder / "run" / "attempts" / "0"
    attempt.mkdir(parents=True, exist_ok=True)
    worker = WorkerEnv(rank=3, world_size=4, local_world_size=4, master_port=1, run_dir="run")
    done = subprocess.run(
        [sys.executable, "-m", "distributed.launch.rank", *command],
        cwd=folder,
        env=PLAIN_ENV | worker.to_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        **more,
    )
    return done, FailureRecord.read(failure_path(attempt, 3))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_script_sees_what_python_would_show_it(tmp_path):
    text = (
        "import sys, helper\nprint([__name__, __file__, __spec__, sys.argv, sys.path[0], helper.X, 'launch' in dir()])"
    )
    script = write(tmp_path / "code" / "script.py", text)
    write(tmp_path / "code" / "helper.py", "X = 5")
    ours, _ = bootstrap(tmp_path, "code/script.py", "--a", "b")
    theirs = subprocess.run(
        [sys.executable, "code/script.py", "--a", "b"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == theirs.stdout
    assert str(script.parent) in ours.stdout


def test_a_module_runs_as_with_dash_m(tmp_path):
    write(tmp_path / "pack" / "__init__.py", "")
    write(
        tmp_path / "pack" / "__main__.py", "import sys\nfrom . import part\nprint(__name__, __package__, sys.argv[1:])"
    )
    write(tmp_path / "pack" / "part.py", "")
    done, record = bootstrap(tmp_path, "-m", "pack", "x")
    assert done.stdout == "__main__ pack ['x']\n"
    assert record is None


def test_pickle_and_spawned_processes_find_what_the_script_defines(tmp_path):
    write(
        tmp_path / "script.py",
        "import multiprocessing, pickle\n"
        "class Item:\n    value = 7\n"
        "def work(item): return item.value + 1\n"
        "if __name__ == '__main__':\n"
        "    assert type(pickle.loads(pickle.dumps(Item()))) is Item\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [Item()]))\n",
    )
    done, _ = bootstrap(tmp_path, "script.py")
    assert done.stdout == "[8]\n", done.stderr


def test_an_exception_is_written_down_without_our_own_frames(tmp_path):
    write(tmp_path / "script.py", "import os\nos.chdir('/')\ndef inner():\n    raise ValueError('boom')\ninner()\n")
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == 1
    assert (record.rank, record.type, record.message, record.exit_code) == (3, "ValueError", "boom", 1)
    assert "in inner" in record.traceback
    assert "launch/rank.py" not in record.traceback
    mark, _, shown = done.stderr.partition("\n")
    assert mark == FAILURE_MARK
    assert shown == record.traceback


@pytest.mark.parametrize(
    ("program", "code", "kind"),
    [
        ("import sys\nsys.exit(4)", 4, "SystemExit"),
        ("raise SystemExit('no data')", 1, "SystemExit"),
        ("x = (", 1, "SyntaxError"),
        ("from distributed.core.errors import CheckpointError\nraise CheckpointError('gone')", 5, "CheckpointError"),
        ("class E(Exception):\n    def __str__(self): 1/0\nraise E", 1, "E"),
    ],
)
def test_failing_programs(tmp_path, program, code, kind):
    write(tmp_path / "script.py", program)
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == code
    assert (record.type, record.exit_code) == (kind, code)


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit", 0), ("import sys\nsys.exit(0)", 0), ("raise KeyboardInterrupt", 130)],
)
def test_ends_that_are_no_failure(tmp_path, program, code):
    write(tmp_path / "script.py", program)
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == code
    assert record is None


def test_a_crash_in_native_code_leaves_a_stack(tmp_path):
    write(
        tmp_path / "script.py", "import os, signal\ndef inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\ninner()\n"
    )
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == -signal.SIGSEGV
    assert record is None
    assert "in inner" in done.stderr


def test_nothing_heavy_is_loaded_before_the_program(tmp_path):
    write(
        tmp_path / "script.py", "import sys\nprint(sorted({'torch', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done, _ = bootstrap(tmp_path, "script.py")
    assert done.stdout == "[]\n"
