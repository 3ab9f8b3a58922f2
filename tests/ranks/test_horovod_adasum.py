"""Adasum over MPI: steps that two ranks took by themselves, combined by its formula."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from distributed.core.registry import is_installed
from tests.conftest import clean_environ
from tests.warm_python import SCRIPTS

ADASUM = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import HorovodTrainer

x, y, weights = torch.load("data.pt")
for compression in ("none", "fp16"):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model.load_state_dict(weights)
    trainer = HorovodTrainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), gradient_reduction="adasum",
        communication_backend="mpi", compression=compression, batch_size=4, verbose=False, run_dir=compression,
    )
    history = trainer.fit(DataLoader(TensorDataset(x, y)), max_steps=5)
    if trainer.is_main:
        torch.save({"state": model.state_dict(), "steps": history.steps}, compression + ".pt")
"""


def combine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Adasum of two, as its paper has it."""
    product = (one * other).sum()
    return (1 - product / (2 * (one * one).sum())) * one + (1 - product / (2 * (other * other).sum())) * other


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (openmpi-bin)")
@pytest.mark.skipif(not is_installed("horovod.torch"), reason="Horovod is not built: make horovod")
def test_adasum_under_mpirun_matches_its_formula(tmp_path: Path) -> None:
    """Twice in one process, since MPI can be initialised once."""
    import horovod.torch as hvd  # which may not be there

    if not hvd.mpi_built():
        pytest.skip("Horovod was built without MPI: make horovod MPI=1")
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    torch.save((x, y, model.state_dict()), tmp_path / "data.pt")
    (tmp_path / "train.py").write_text(ADASUM)
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *SCRIPTS.command, "train.py"],
        cwd=tmp_path,
        env=clean_environ(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step in range(5):
        changes = []
        for rank in range(2):
            mine = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
            gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x[mine]), y[mine]), [*model.parameters()])
            changes.append([-0.1 * gradient for gradient in gradients])
        with torch.no_grad():
            for parameter, one, other in zip(model.parameters(), *changes, strict=True):
                parameter += combine(one, other)
    for compression, tolerance in (("none", 1e-5), ("fp16", 2e-3)):
        found = torch.load(tmp_path / f"{compression}.pt")
        assert found["steps"] == 5
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found["state"][name], value, rtol=tolerance, atol=tolerance)
