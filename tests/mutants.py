"""How strong the tests are: each fault of a list is put into a copy of the package, and its tests must find it.

    python -m tests.mutants                         all faults; exit code 1 if fewer than 95 % are found or one is stale
    python -m tests.mutants --area data,train       those of some folders of the package
    python -m tests.mutants --suite ../old/tests    the same faults against the tests of another checkout

torch is imported once, and each run of pytest is a fork of that process: most faults cost seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch  # noqa: F401 - what is forked need not import it

from tests.seeded_faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
LEAST_FOUND = 0.95
_TIMEOUT_S = 300  # for each test: a fault may make one hang
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_NO_TEST = {4: "no such test", 5: "no test"}  # pytest's exit codes
_CODES = _NO_TEST | {2: "an error while tests are collected"}


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a package."""

    code: int  # pytest's: 0 all passed, 1 some failed
    failed: str  # the first test that did
    output: str


@dataclass(frozen=True)
class Result:
    """What became of one fault."""

    name: str
    area: str
    status: str  # found, survived or stale
    by: str = ""  # the test that found it, or why it is stale
    seconds: float = 0.0


class Package:
    """A copy of src/ with at most one fault in it."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.src = folder / "src"
        shutil.copytree(source, self.src, ignore=shutil.ignore_patterns("*.egg-info"))
        self._newest = time.time()

    def plant(self, fault: Fault) -> Callable[[], None]:
        """Put a fault in; returns what takes it out again."""
        path = self.src / "distributed" / fault.file
        text, before = path.read_text(), path.stat()
        self._newest += 10  # compiled files are told apart by whole seconds
        path.write_text(text.replace(fault.before, fault.after))
        os.utime(path, (self._newest, self._newest))

        def restore() -> None:
            path.write_text(text)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

        return restore


class Suite:
    """The tests of a checkout, run against a package."""

    def __init__(self, tests: Path) -> None:
        self._root = tests.resolve().parent
        self.is_other = self._root != ROOT  # which need not have the tests that the list names
        self._running: set[int] = set()
        self._sound: dict[str, bool] = {}  # by test: whether it passes without a fault
        self._lock = threading.Lock()
        self._is_stopped = False

    def passes_without(self, test: str, package: Package) -> bool:
        """Whether a test that a fault fails passes in the package as it is; asked once for each."""
        if test not in self._sound:
            self._sound[test] = self.run([test], package).code == 0
        return self._sound[test]

    def run(self, tests: Sequence[str], package: Package) -> Outcome:
        """In a process of its own, and a group of processes that ends with it."""
        with tempfile.TemporaryFile("w+") as output:
            with self._lock:
                if self._is_stopped:
                    raise KeyboardInterrupt
                pid = os.fork()
                if pid == 0:
                    _run_pytest(self._root, package.src, tests, output.fileno())
                self._running.add(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._end(pid)
            output.seek(0)
            text = output.read()
        failed = _FAILED.search(text)
        return Outcome(code, failed.group(1) if failed else "", text)

    def stop(self) -> None:
        """End the tests that run, and start no more."""
        with self._lock:
            self._is_stopped = True
            for pid in list(self._running):
                self._end(pid)

    def _end(self, pid: int) -> None:
        self._running.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a test that failed has left behind


def _run_pytest(root: Path, src: Path, tests: Sequence[str], output: int) -> None:
    """In a fork, which ends here."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = f"{src}{os.pathsep}{root}"
        sys.path[:0] = [str(src), str(root)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "distributed")]:
            del sys.modules[name]
        import distributed

        assert Path(distributed.__file__ or "").is_relative_to(src), "another package would be tested"
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not soak", f"--timeout={_TIMEOUT_S}"]
        code = int(pytest.main([*options, *tests]))
    except BaseException:  # noqa: BLE001 - the boundary of a forked process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def why_stale(fault: Fault, src: Path) -> str:
    """Why a fault cannot be put in as it is written; "": it can."""
    path = src / "distributed" / fault.file
    if not path.exists():
        return f"there is no {fault.file}"
    count = path.read_text().count(fault.before)
    return "" if count == 1 else f"its snippet occurs {count} times in {fault.file}"


def try_fault(fault: Fault, suite: Suite, package: Package) -> Result:
    """Run its tests until one finds it."""
    begun = time.monotonic()

    def result(status: str, by: str = "") -> Result:
        return Result(fault.name, fault.area, status, by, round(time.monotonic() - begun, 1))

    if why := why_stale(fault, package.src):
        return result("stale", why)
    for tests in fault.tests:
        restore = package.plant(fault)
        try:
            outcome = suite.run(shlex.split(tests), package)
        finally:
            restore()
        if outcome.code == 1 and suite.passes_without(outcome.failed, package):
            return result("found", outcome.failed)
        if outcome.code == 1:
            return result("stale", f"{outcome.failed} fails without it too")
        if outcome.code and not (suite.is_other and outcome.code in _NO_TEST):
            why = _CODES.get(outcome.code, f"exit code {outcome.code}")
            return result("stale", f"{tests} ends with {why}\n{outcome.output[-2000:]}")
    return result("survived", " ".join(fault.tests))


def try_all(faults: Sequence[Fault], suite: Suite, source: Path, jobs: int, tell: Callable[[Result], None]) -> None:
    """Each job has a copy of the package. Ctrl-C ends the tests that run."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        packages: SimpleQueue[Package] = SimpleQueue()
        for number in range(jobs):
            packages.put(Package(source, Path(folder) / str(number)))

        def one(fault: Fault) -> Result:
            package = packages.get()
            try:
                return try_fault(fault, suite, package)
            finally:
                packages.put(package)

        try:
            for result in pool.map(one, faults):
                tell(result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            suite.stop()
            raise


def table(results: Sequence[Result]) -> str:
    """How many of each area were found, by which layer of tests, and each that was not."""
    lines = [f"{'area':<12}{'faults':>7}{'found':>7}{'survived':>10}{'stale':>7}"]
    areas = sorted({result.area for result in results})
    for area in [*areas, ""]:
        count = Counter(result.status for result in results if result.area == area or not area)
        row = f"{area or 'all':<12}{sum(count.values()):>7}{count['found']:>7}"
        lines.append(f"{row}{count['survived']:>10}{count['stale']:>7}")
    layers = Counter(result.by.split("/")[1] for result in results if result.status == "found")
    lines.append("found by: " + ", ".join(f"tests/{layer} {count}" for layer, count in layers.most_common()))
    lines += [f"{result.status}: {result.name}: {result.by}" for result in results if result.status != "found"]
    return "\n".join(lines)


def is_enough(results: Sequence[Result]) -> bool:
    """Whether the list can be trusted, and the tests."""
    count = Counter(result.status for result in results)
    return not count["stale"] and count["found"] >= LEAST_FOUND * len(results)


def choose(only: Iterable[str], areas: Iterable[str]) -> list[Fault]:
    names, folders = {fault.name for fault in FAULTS}, {fault.area for fault in FAULTS}
    wanted, within = set(only) or names, set(areas) or folders
    if unknown := wanted - names | within - folders:
        raise SystemExit(f"no fault or area is called {', '.join(sorted(unknown))}")
    return [fault for fault in FAULTS if fault.name in wanted and fault.area in within]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults")
    parser.add_argument("--area", default="", help="folders of the package, with commas between them")
    parser.add_argument("--suite", type=Path, default=ROOT / "tests", help="the tests folder of another checkout")
    parser.add_argument("--json", type=Path, help="write the results there too")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tried at a time")
    told = parser.parse_args()
    faults, results = choose(told.only, filter(None, told.area.split(","))), list[Result]()

    def tell(result: Result) -> None:
        results.append(result)
        place = f"[{len(results)}/{len(faults)}]"
        print(f"{place} {result.status:<8} {result.name} ({result.seconds:.0f} s) {result.by}", flush=True)

    code = 130
    try:
        try_all(faults, Suite(told.suite), ROOT / "src", told.jobs, tell)
        code = 0 if is_enough(results) else 1
    except KeyboardInterrupt:
        print("interrupted")
    print(table(results))
    if told.json:
        told.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
