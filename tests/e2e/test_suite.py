"""The suite's own rules: an unexpected skip fails, a failed test leaves nothing running, Ctrl-C is not ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import clean_environ
from tests.expected_skips import ExpectedSkips
from tests.schedule import LONG

ROOT = Path(__file__).parents[2]
CONFTEST = "from tests.conftest import pytest_configure\n"


def run_suite(folder: Path, text: str, *options: str, ignores_sigint: bool = False) -> subprocess.CompletedProcess[str]:
    """pytest over one file, with this suite's plugins."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_inner.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    environ = clean_environ(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    ignore = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignores_sigint else None
    return subprocess.run(
        [*command, "test_inner.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=ignore,
    )


SKIPS = """
import pytest

def test_passes():
    pass

def test_skips():
    pytest.skip("of no reason that anybody knows")
"""
SKIPS_AS_A_WHOLE = "import pytest\npytest.importorskip('no_such_module', reason='not at all')\n"


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize(("text", "reason"), [(SKIPS, "of no reason"), (SKIPS_AS_A_WHOLE, "not at all")])
def test_unexpected_skip_fails_the_session(tmp_path: Path, text: str, reason: str, options: tuple[str, ...]) -> None:
    done = run_suite(tmp_path, text, *options)
    assert done.returncode != 0, done.stdout
    told = done.stdout.partition("not in tests/expected_skips.txt")[2]
    assert reason in told, done.stdout


def test_expected_skip_passes(tmp_path: Path) -> None:
    report = pytest.TestReport(
        "a/test_b.py::test_c", ("", 0, ""), {}, "skipped", ("f", 1, "Skipped: no GPU: 0"), "call"
    )
    expected, other = ExpectedSkips("# why\na/test_b.py no GPU: *\n"), ExpectedSkips("a/test_b.py no TPU\n")
    for skips in (expected, other):
        skips.pytest_runtest_logreport(report)
    assert not expected.unexpected
    assert other.unexpected == ["a/test_b.py::test_c: no GPU: 0"]


def test_files_in_expected_skips_and_schedule_exist() -> None:
    lines = (ROOT / "tests/expected_skips.txt").read_text().splitlines()
    skipping = {line.split()[0] for line in lines if not line.startswith("#")}
    files = {*skipping, *(f"tests/{name}" for name in LONG)}
    assert not [name for name in sorted(files) if not any(ROOT.glob(name))]


FAILS = """
import subprocess, sys
from pathlib import Path

import pytest

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
HOW = "start_new_session=True, stdout=subprocess.DEVNULL"
ORPHAN = f"import subprocess; print(subprocess.Popen({SLEEP}, {HOW}).pid)"

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(SLEEP)
    yield process
    assert process.poll() is None, "what a fixture started was ended with a test that failed"
    process.kill()
    process.wait()

def test_fails(server):
    made = subprocess.Popen(SLEEP)
    orphan = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    Path("pids").write_text(f"{made.pid} {orphan.stdout}")
    raise AssertionError("on purpose")

def test_passes(server):
    pass
"""


def test_failed_test_leaves_nothing_running(tmp_path: Path) -> None:
    done = run_suite(tmp_path, FAILS)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


INTERRUPTS = """
import signal, subprocess, sys

def test_what_is_started_can_be_interrupted():
    show = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", show], stdout=subprocess.PIPE, text=True).stdout == "True\\n"
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_ctrl_c_reaches_background_processes_of_tests(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_suite(tmp_path, INTERRUPTS, *options, ignores_sigint=True)
    assert done.returncode == 0, done.stdout
