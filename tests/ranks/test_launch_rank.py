"""The bootstrap of a rank runs a program as Python would, and writes down how it failed."""

from __future__ import annotations

import bz2
import dbm.dumb
import gzip
import os
import shelve
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distributed.core.env import FAILURE_MARK, WorkerEnv
from distributed.core.protocol.failure import FailureRecord
from distributed.core.run_dir import AttemptDir
from distributed.launch.node.command import rank_argv

PLAIN_ENV = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def bootstrap(folder: Path, *command: str, **more) -> tuple[subprocess.CompletedProcess[str], FailureRecord | None]:
    attempt = folder / "run" / "attempts" / "0"
    attempt.mkdir(parents=True, exist_ok=True)
    worker = WorkerEnv(rank=3, world_size=4, local_world_size=4, master_port=1, run_dir="run")
    done = subprocess.run(
        rank_argv(sys.executable, command),
        cwd=folder,
        env=PLAIN_ENV | worker.to_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        **more,
    )
    return done, FailureRecord.read(AttemptDir(attempt).failure(3))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_script_sees_the_globals_and_argv_of_plain_python(tmp_path):
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


def test_annotations_of_script_stay_types(tmp_path):
    text = "from dataclasses import dataclass, fields\n@dataclass\nclass C:\n    rate: float = 0.1\n"
    write(tmp_path / "script.py", text + "print(fields(C)[0].type('0.5'))")
    done, _ = bootstrap(tmp_path, "script.py")
    assert done.stdout == "0.5\n", done.stderr


OPEN_FILES = """
import bz2, csv, gzip, os, zipfile
reader, writer = os.pipe()
full = os.fdopen(writer, "wb", buffering=1 << 20)
full.write(bytes(1 << 19))  # more than a pipe holds, and nobody reads it
table = open("table.csv", "w")
csv.writer(table).writerow(["loss", 0.5])
numbers = open("numbers.bin", "wb")
numbers.write(b"12345")
packed, other = gzip.open("log.gz", "wt"), bz2.open("log.bz2", "wt")
packed.write("text")
other.write("text")
archive = zipfile.ZipFile("archive.zip", "w")
archive.writestr("member", "text")
def kept_by_a_function():
    inner = open("inner.txt", "w")
    inner.write("inner")
    yield inner
generator = kept_by_a_function()
next(generator)
"""


def test_files_left_open_are_written_at_the_end(tmp_path):
    write(tmp_path / "script.py", OPEN_FILES)
    done, _ = bootstrap(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table.csv").read_text() == "loss,0.5\n"
    assert (tmp_path / "numbers.bin").read_bytes() == b"12345"
    assert gzip.decompress((tmp_path / "log.gz").read_bytes()) == b"text"
    assert bz2.decompress((tmp_path / "log.bz2").read_bytes()) == b"text"
    assert zipfile.ZipFile(tmp_path / "archive.zip").read("member") == b"text"
    assert (tmp_path / "inner.txt").read_text() == "inner"


LEFT_TO_THE_END = """
import ctypes, dbm.dumb, shelve, tempfile
table = shelve.open("shelf", writeback=True)
table["a"] = []
table["a"].append(2)
base = dbm.dumb.open("base", "c")
base["a"] = "b"
scratch = tempfile.NamedTemporaryFile(dir=".", prefix="scratch")
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
native = libc.fopen(b"native.txt", b"w")
libc.fputs(b"text of C", ctypes.c_void_p(native))
libc.printf(b"printed by C\\n")
class Report:
    def __del__(self):
        self.file.write("written by __del__")
report = Report()
report.file, report.itself = open("report.txt", "w"), report
"""


def test_what_is_left_to_pythons_end_is_done(tmp_path):
    write(tmp_path / "script.py", LEFT_TO_THE_END)
    done, _ = bootstrap(tmp_path, "script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "printed by C\n", "")
    with shelve.open(str(tmp_path / "shelf")) as table, dbm.dumb.open(str(tmp_path / "base")) as base:
        assert (dict(table), base["a"]) == ({"a": [2]}, b"b")
    assert (tmp_path / "native.txt").read_text() == "text of C"
    assert (tmp_path / "report.txt").read_text() == "written by __del__"
    assert not list(tmp_path.glob("scratch*"))


@pytest.mark.parametrize(
    ("module", "program", "read"),
    [
        ("h5py", "file = h5py.File('left', 'w')\nfile['a'] = [1, 2]", "list(h5py.File('left')['a'])"),
        (
            "pyarrow.parquet",
            "import pyarrow\ntable = pyarrow.table({'a': [1, 2]})\n"
            "writer = pyarrow.parquet.ParquetWriter('left', table.schema)\nwriter.write_table(table)",
            "pyarrow.parquet.read_table('left')['a'].to_pylist()",
        ),
    ],
)
def test_writer_of_a_package_left_open_is_closed(tmp_path, module, program, read):
    pytest.importorskip(module, reason=f"{module} comes with other packages only")
    write(tmp_path / "script.py", f"import {module}\n{program}")
    done, _ = bootstrap(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    write(tmp_path / "reads.py", f"import {module}\nprint({read} == [1, 2])")
    done, _ = bootstrap(tmp_path, "reads.py")
    assert done.stdout == "True\n", done.stderr


def test_summary_writer_left_open_keeps_all_events(tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('logs')\n"
    text += "for step in range(100):\n    writer.add_scalar('loss', 1.0, step)\n"
    # As TensorBoard's own switch has it: else TensorFlow is imported, seconds of it.
    write(tmp_path / "script.py", "import sys\nsys.modules['tensorboard.compat.notf'] = sys\n" + text)
    done, _ = bootstrap(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    assert len(EventAccumulator(str(tmp_path / "logs")).Reload().Scalars("loss")) == 100


def test_end_of_rank_adds_no_warning_of_torch(tmp_path):
    write(tmp_path / "script.py", "import torch.distributed\ntorch.distributed.reduce_op\nleft = open('left', 'w')")
    done, _ = bootstrap(tmp_path, "script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


SLOW_AT_EXIT = """
import atexit, sys, time
sys.modules["distributed.launch.node.exit.leaving"]._EXIT_FUNCTIONS_S = 0.2
table = open("table.csv", "w")
table.write("1")
print("done")

def never_ends():
    time.sleep(600)

atexit.register(never_ends)
"""


def test_exit_function_that_never_ends_is_named(tmp_path):
    write(tmp_path / "script.py", SLOW_AT_EXIT)
    done, _ = bootstrap(tmp_path, "script.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "functions registered with atexit, or a __del__, still run" in done.stderr
    assert "in never_ends" in done.stderr


@pytest.mark.parametrize("stream", ["None", "Tee(sys.stderr)", "io.StringIO()", "open('log.txt', 'w')"])
def test_program_that_replaces_its_streams_ends_as_python_does(tmp_path, stream):
    text = (
        "import atexit, io, sys\nclass Tee:\n    def __init__(self, to): self.write, self.flush = to.write, to.flush\n"
    )
    text += f"sys.stdout = Tee(sys.stdout)\nsys.stderr = {stream}\natexit.register(print, 'at exit')\n"
    write(tmp_path / "script.py", text + "left = open('left.txt', 'w')\nleft.write('text')\nprint('done')")
    done, record = bootstrap(tmp_path, "script.py")
    assert (done.returncode, done.stdout, done.stderr, record) == (0, "done\nat exit\n", "", None)
    assert (tmp_path / "left.txt").read_text() == "text"


def test_failure_beside_a_stream_without_flush_is_recorded(tmp_path):
    text = "import sys\nclass Words:\n    def write(self, text): pass\nsys.stdout = Words()\n"
    write(tmp_path / "script.py", text + "left = open('left.txt', 'w')\nleft.write('text')\nraise ValueError('boom')")
    done, record = bootstrap(tmp_path, "script.py")
    assert (done.returncode, record.message) == (1, "boom")
    assert done.stderr.count("Traceback") == 1
    assert (tmp_path / "left.txt").read_text() == "text"


def test_a_module_runs_as_with_dash_m(tmp_path):
    write(tmp_path / "pack" / "__init__.py", "")
    write(
        tmp_path / "pack" / "__main__.py", "import sys\nfrom . import part\nprint(__name__, __package__, sys.argv[1:])"
    )
    write(tmp_path / "pack" / "part.py", "")
    done, record = bootstrap(tmp_path, "-m", "pack", "x")
    assert done.stdout == "__main__ pack ['x']\n"
    assert record is None


def test_pickle_and_spawn_find_classes_of_the_script(tmp_path):
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


def test_exception_is_recorded_without_our_frames(tmp_path):
    write(tmp_path / "script.py", "import os\nos.chdir('/')\ndef inner():\n    raise ValueError('boom')\ninner()\n")
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == 1
    assert (record.rank, record.type, record.message, record.exit_code) == (3, "ValueError", "boom", 1)
    assert "in inner" in record.traceback
    assert "launch/node/rank.py" not in record.traceback
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
def test_failed_program_records_exit_code_and_type(tmp_path, program, code, kind):
    write(tmp_path / "script.py", program)
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == code
    assert (record.type, record.exit_code) == (kind, code)


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit", 0), ("import sys\nsys.exit(0)", 0), ("raise KeyboardInterrupt", 130)],
)
def test_clean_exit_or_interrupt_records_no_failure(tmp_path, program, code):
    write(tmp_path / "script.py", program)
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == code
    assert record is None


def test_native_crash_leaves_a_python_stack(tmp_path):
    write(
        tmp_path / "script.py", "import os, signal\ndef inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\ninner()\n"
    )
    done, record = bootstrap(tmp_path, "script.py")
    assert done.returncode == -signal.SIGSEGV
    assert record is None
    assert "in inner" in done.stderr


def test_rank_bootstrap_imports_no_torch_or_numpy(tmp_path):
    write(
        tmp_path / "script.py", "import sys\nprint(sorted({'torch', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done, _ = bootstrap(tmp_path, "script.py")
    assert done.stdout == "[]\n"
