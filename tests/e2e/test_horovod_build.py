"""What the script that builds Horovod says and refuses; and what a run says where Horovod is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environ

SCRIPT = str(Path(__file__).parents[2] / "scripts/build_horovod.sh")
TOOLS = (
    "bash",
    "env",
    "mktemp",
    "rm",
    "mv",
    "mkdir",
    "tail",
    "flock",
    "nproc",
    "dirname",
    "cat",
    "ls",
    "chmod",
    "cmake",
)


def build(
    folder: Path, *words: str, tools: tuple[str, ...] = TOOLS, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The script with a cache of its own and only these tools on its path: nothing here may find a compiler."""
    for tool in tools:
        found = shutil.which(tool)
        if found is not None and not (folder / "bin" / tool).exists():
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / tool).symlink_to(found)
    variables = {"PATH": str(folder / "bin"), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")} | environ
    command = [str(folder / "bin" / "bash"), SCRIPT, *words]
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python with torch's name but without Horovod: the version is all that the script asks before it builds."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "torch-9.9.9.dist-info").mkdir()
    (site / "torch-9.9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    (site / "pip.pth").write_text(str(Path(__import__("pip").__file__).parents[1]) + "\n")
    return str(tmp_path / "venv/bin/python")


def test_horovod_build_help_shows_version_and_cache(tmp_path: Path) -> None:
    done = build(tmp_path, "--help")
    assert done.returncode == 0
    assert "0.28.1" in done.stdout
    assert "--mpi" in done.stdout
    assert "distributed-training/wheels" in done.stdout


def test_horovod_build_refuses_bad_arguments_or_missing_torch(tmp_path: Path) -> None:
    assert build(tmp_path, "--fast").returncode == 2
    assert build(tmp_path, "--python", sys.executable, "--mpi", "maybe").returncode == 2
    assert "no Python at" in build(tmp_path, "--python", "nowhere").stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    assert "has no torch" in build(tmp_path, "--python", str(tmp_path / "empty/bin/python")).stderr


def test_horovod_build_names_missing_mpi_and_compiler_packages(tmp_path: Path, bare_python: str) -> None:
    asked = build(tmp_path, "--python", bare_python, "--mpi", "1")
    assert asked.returncode == 3
    assert "apt-get install libopenmpi-dev openmpi-bin" in asked.stderr
    done = build(tmp_path, "--python", bare_python)
    assert done.returncode == 3, done.stderr
    assert "apt-get install g++" in done.stderr
    assert not list((tmp_path / "cache").rglob("building.*")), "something half-made is left"


def test_horovod_source_with_another_hash_is_refused(tmp_path: Path, bare_python: str) -> None:
    """Also where the index that pip asks offers nothing else."""
    (tmp_path / "index").mkdir()
    (tmp_path / "index/horovod-0.28.1.tar.gz").write_bytes(b"not what was released")
    tools = (*TOOLS, "g++", "make")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": os.devnull}
    done = build(tmp_path, "--python", bare_python, "--mpi", "0", tools=tools, **offline)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "the whole log" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.whl"))


WITHOUT = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
"""
TRAIN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import HorovodTrainer

print("began", flush=True)
data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
HorovodTrainer(nn.Linear(4, 2), num_gpus=2, batch_size=4, run_dir="run").fit(data)
"""


def test_missing_horovod_names_make_horovod_before_start(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "train.py").write_text(TRAIN)
    environ = clean_environ(PYTHONPATH=str(tmp_path))
    cli = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "2"]
    for command in ([sys.executable, "train.py"], [*cli, "--backend", "horovod"]):
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode != 0
        assert "make horovod" in done.stdout + done.stderr
        assert not (tmp_path / "run").exists()
