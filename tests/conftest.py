"""Tools shared by the tests: scripts run as a user runs them, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

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
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | more


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
