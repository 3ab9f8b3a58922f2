"""Tools shared by the tests: scripts run as a user runs them, in a folder of their own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import setuptools  # noqa: F401 - torch's compiler imports distutils, which setuptools must have replaced before

from tests.expected_skips import ExpectedSkips
from tests.leftovers import Leftovers
from tests.schedule import FileTimes, longest_first
from tests.template import SOCKET, Template
from tests.warm_commands import warm_commands
from tests.warm_python import SCRIPTS

# TensorBoard's own switch: without it, whoever reads its files here imports TensorFlow, seconds and 500 MB of it.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))

# Some virtual machines show AMX and not its tiles: a product in bf16 ends a process there with SIGILL. No AMX anywhere.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Threads that have done their part of a product sleep. By default they spin, which takes the cores from other tests:
# three workers of two threads each spent three times the processor time on two cores. Read when OpenMP is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_TEMPLATE = pytest.StashKey[Template]()


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores it in what runs in its background, and all that is started inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(ExpectedSkips.of_this_suite())
        config.pluginmanager.register(FileTimes())
    if is_worker or not config.getoption("numprocesses", None):
        gc.disable()  # what is read and imported for tests stays, and is looked through by none of their collections
        config.pluginmanager.register(Leftovers())
        config.stash[_TEMPLATE] = template = Template()
        config.add_cleanup(template.close)


@pytest.fixture(scope="session")
def template(request: pytest.FixtureRequest) -> None:
    """From here on, launches fork their warm parents from one process."""
    request.config.stash[_TEMPLATE].start()


@pytest.fixture
def own_warm_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that looks for ranks among a launcher's children: warm parents are started as users' are."""
    monkeypatch.delenv(SOCKET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parts[-2] in ("e2e", "ranks"):
            item.fixturenames.insert(0, "template")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


Run = Callable[..., subprocess.CompletedProcess[str]]

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
_x = torch.randn(210, 8)
_data = TensorDataset(_x, (_x[:, 0] > 0).long() + (_x[:, 1] > 0).long())
train_loader = DataLoader(_data, batch_size=16, shuffle=True)
val_loader = DataLoader(_data, batch_size=50)


class MyModel(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x):
        return self.layers(x)


"""


def clean_environ(**more: str) -> dict[str, str]:
    """The environment without what a launcher above pytest may have set."""
    ours = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DISTRIBUTED_",
        "SLURM_",
        "OMPI_",
        "PYTEST_",
        "OMP_NUM_THREADS",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | more


def cli(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`distributed …` in a folder; variables that Python reads when it starts have no effect, see `fresh_cli`."""
    return warm_commands().run(*arguments, folder=folder, environ=clean_environ(**environ))


def fresh_cli(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`distributed …` in a process of its own."""
    command = [sys.executable, "-m", "distributed.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env=clean_environ(**environ), capture_output=True, text=True, timeout=120
    )


def run_python(folder: Path, *command: str) -> str:
    """Run Python in a folder and return what it printed; it must succeed."""
    return _run(folder, [sys.executable, *command])


def run_warm(folder: Path, *command: str) -> str:
    """The same in a fork of a process that has imported torch."""
    return _run(folder, [*SCRIPTS.command, *command])


def _run(folder: Path, command: list[str]) -> str:
    done = subprocess.run(command, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def unstarted(tmp_path: Path) -> Path:
    """A folder with a script that must not be started."""
    (tmp_path / "train.py").write_text("raise AssertionError('was started')")
    return tmp_path


@pytest.fixture
def run_script(tmp_path: Path) -> Run:
    """Write a script into a fresh folder and run it there; `data=True` puts a small problem before it."""

    def run(
        text: str, *args: str, data: bool = True, stdin: str | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text((DATA if data else "") + textwrap.dedent(text))
        command = [sys.executable, str(script), *args]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=clean_environ(**environ),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=180,
        )

    return run
