"""In which order tests run: the longest files begin first, and none is left over at the end. How long each took.

`--dist loadfile` keeps the tests of a file on one worker, since what its fixtures made serves all of them.
"""

from __future__ import annotations

from collections import Counter

import pytest

# By folder and name, the longest first. Those that mostly wait, for a deadline or a cluster, stand between those that
# compute, so that a worker computes while another one waits.
LONG = (
    "e2e/test_ray.py",
    "e2e/test_survival.py",
    "e2e/test_tensorflow.py",
    "e2e/test_cli_chaos.py",
    "e2e/test_survival_meshes.py",
    "e2e/test_horovodrun.py",
    "ranks/test_mesh.py",
    "e2e/test_tune_ray.py",
    "ranks/test_own_optimization.py",
    "ranks/test_callback_library.py",
    "e2e/test_examples_fsdp.py",
    "e2e/test_examples_ddp_basics.py",
    "e2e/test_ray_data.py",
    "e2e/test_cli_dry_run.py",
    "adversarial/test_drawn_cases.py",
    "e2e/test_tensorflow_survival.py",
    "ranks/test_pipeline.py",
    "e2e/test_deepspeed_launch.py",
    "e2e/test_survival_nodes.py",
    "e2e/test_examples_deepspeed.py",
    "e2e/test_api_srun.py",
    "ranks/test_engine_matrix.py",
    "ranks/test_own_step.py",
    "e2e/test_examples_documents.py",
    "ranks/test_compile_cache.py",
    "ranks/test_deepspeed.py",
    "e2e/test_cli_checks.py",
    "ranks/test_launch_hangs.py",
    "ranks/test_checkpoint_deepspeed.py",
    "unit/test_launch_membership.py",
)
_FOLDERS = ("e2e", "ranks", "adversarial", "unit")


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by file; the order within a file stays."""
    items.sort(key=lambda item: _place(_file(item)))


def _file(item: pytest.Item) -> str:
    return "/".join(item.path.parts[-2:])


def _place(name: str) -> tuple[int, int, str]:
    if name in LONG:
        return 0, LONG.index(name), name
    folder = name.partition("/")[0]
    return 1, _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS), name


class FileTimes:
    """Says after the tests which files took the longest, of all that the workers spent together."""

    SHOWN = 40

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        whole = sum(self._seconds.values())
        if whole > 60:
            terminalreporter.section(f"slowest files, of {whole:.0f} s of all workers")
            for name, seconds in self._seconds.most_common(self.SHOWN):
                terminalreporter.line(f"{seconds:7.1f}s {name}")
