"""A pytest plugin for the GPU suite: it refuses to run without a GPU, and ends with a record of what was run.

python -m pytest -p tests.gpu_plugin -m gpu --gpu-record benchmarks/gpu-suite.json

With several workers (-n 10) a file stays together where its fixtures serve all of its tests.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests import gpu_record

_LONGEST = (
    "test_own_steps_gpu",
    "test_nccl_ways",
    "test_nccl",
    "test_engines_gpu",
    "test_nccl_runs",
    "test_nccl_exchange",
)
_SHOWN = 4000  # characters of a failure
_APART = ("test_survival_gpu", "test_stuck_gpu", "test_capture_ranks_gpu", "test_shared_gpus")


class Schedule(LoadScopeScheduling):
    """A file goes to one worker, whose fixtures serve all of its tests; long tests that share none go one by one."""

    def _split_scope(self, nodeid: str) -> str:
        module = _file(nodeid)
        return nodeid if Path(module).stem in _APART else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Schedule:
    config.option.loadscopereorder = False  # the order below stays
    return Schedule(config, log)


@pytest.hookimpl(trylast=True)  # the suite's own order has been made
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one worker is busy with for longest comes first."""
    items.sort(key=lambda item: (item.path.stem not in _LONGEST, item.path.stem not in _APART))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", metavar="FILE", help="write what the GPU suite came to into this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-record")
    if path is None or hasattr(config, "workerinput"):  # what a worker of xdist has run, its controller reports
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("no CUDA device here: the GPU suite would skip every test, and show nothing")
    where = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    config.pluginmanager.register(Recorder(Path(path), where))


class Recorder:
    """Counts tests as pytest's own last line does, an error of a fixture as a failure.

    The record of a run that was cut has the files whose tests were all run; another part has the others.
    """

    _terminal: pytest.TerminalReporter | None = None

    def __init__(self, path: Path, where: Mapping[str, str]) -> None:
        self._path, self._where, self._begun = path, where, time.monotonic()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by file
        self._collected: set[str] = set()
        self._ended: set[str] = set()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a file as a whole
            self._counts[report.nodeid]["skipped"] += 1

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._counts[_file(report.nodeid)][report.outcome] += 1
        if report.when == "teardown":
            self._ended.add(report.nodeid)
        if report.failed and self._terminal is not None:  # at once: a run may be cut before its summary
            self._terminal.write_line(report.longreprtext[-_SHOWN:])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            return
        cut = {_file(nodeid) for nodeid in self._collected - self._ended}
        whole = {name: counts for name, counts in self._counts.items() if name not in cut}
        if not whole:
            return
        record = gpu_record.make(
            gpu_record.ROOT,
            sum(whole.values(), Counter()),
            sorted(whole),
            seconds=time.monotonic() - self._begun,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            where=self._where,
        )
        gpu_record.write(record, self._path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"the record of this run: {self._path}")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
