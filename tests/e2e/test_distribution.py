"""What a user installs: the sdist builds the wheel, the wheel holds the package and nothing else, and it trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import clean_environ

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEM = f"distributed_training-{PROJECT['version']}"
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed import Trainer

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
trainer = Trainer(torch.nn.Linear(4, 2), batch_size=4, epochs=2)
trainer.fit(DataLoader(data, batch_size=4))
print("package:", distributed.__file__)
"""


def run(folder: Path, *command: str | Path) -> str:
    """What a command printed; it sees no source tree, whether by PYTHONPATH or an editable install."""
    environ = {name: value for name, value in clean_environ().items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, kind: str, target: Path) -> None:
    """What `python -m build --no-isolation` does: the hook of PEP 517 in the folder of a source tree."""
    run(source, sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, so that a build leaves nothing in it and finds nothing of an earlier one."""
    copy = tmp_path_factory.mktemp("source")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sdist")
    build(source, "sdist", target)
    return target / f"{STEM}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone."""
    target = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    build(target / STEM, "wheel", target)
    return target / f"{STEM}-py3-none-any.whl"


def test_sdist_holds_the_package_and_its_documents(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{STEM}/") for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/distributed/py.typed"} <= names
    assert not {name.split("/")[0] for name in names} & {"tests", "benchmarks", "examples", "docs"}


def test_wheel_holds_the_whole_package_and_nothing_else(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{STEM}.dist-info/METADATA").decode()
    package = {str(path.relative_to(source / "src")) for path in (source / "src").rglob("*") if path.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == {
        name for name in package if name.startswith("distributed/")
    }
    assert {"distributed/py.typed", f"{STEM}.dist-info/licenses/LICENSE"} <= names
    assert f"Version: {PROJECT['version']}\n" in metadata


def test_wheel_trains_on_two_ranks_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    """The environment has the dependencies of this one by path; nothing is downloaded."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run(tmp_path, *pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel))
    (site,) = home.glob("lib/python*/site-packages")
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # Paths in a .pth file are not searched for .pth files, so an editable install of this repository is not seen.
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(dependencies)))
    (tmp_path / "train.py").write_text(SCRIPT)

    command = home / "bin/distributed"
    assert run(tmp_path, command, "--version").startswith(f"distributed-training {PROJECT['version']}\n")
    arguments = ("train", "--script", "train.py", "--num-gpus", "2", "--device", "cpu", "--run-dir", "run")
    printed = run(tmp_path, command, *arguments)

    assert printed.count(f"package: {site / 'distributed'}{os.sep}") == 2
    history = json.loads((tmp_path / "run/history.json").read_text())
    assert (history["world_size"], len(history["epochs"])) == (2, 2)
