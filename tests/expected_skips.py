"""A test that is skipped for a reason which nobody expected fails the session: it would pass for ever otherwise.

`expected_skips.txt` has a line for each file and reason, both as shell patterns.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

_LIST = Path(__file__).with_name("expected_skips.txt")


class ExpectedSkips:
    """A plugin of the process that hears of all tests' results."""

    def __init__(self, lines: str) -> None:
        words = (line.split(None, 1) for line in lines.splitlines() if line.strip() and not line.startswith("#"))
        self._expected = [(path, reason.strip()) for path, reason in words]
        self.unexpected: list[str] = []

    @staticmethod
    def of_this_suite() -> ExpectedSkips:
        return ExpectedSkips(_LIST.read_text())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        path = report.nodeid.partition("::")[0]
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not any(fnmatchcase(path, file) and fnmatchcase(reason, why) for file, why in self._expected):
            self.unexpected.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexpected:
            terminalreporter.section(f"skipped, and not in tests/{_LIST.name}", red=True)
            for line in self.unexpected:
                terminalreporter.line(line)
