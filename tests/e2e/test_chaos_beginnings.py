"""Two runs of a chaos run that differ are told apart: those that began otherwise, and those that a fault changed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.chaos.report import ChaosReport, Injury, WeightsComparison
from distributed.chaos.verdict import began_alike


def train(folder: Path, *, data: int = 0, weights: int = 0, rate: float = 0.1) -> Path:
    torch.manual_seed(data)
    samples = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
    torch.manual_seed(weights)
    options = {"num_gpus": 1, "device": "cpu", "progress": False, "log_every_n_steps": 1}
    options |= {"batch_size": 4, "learning_rate": rate, "checkpoint_frequency": "2 steps", "run_dir": str(folder)}
    Trainer(nn.Linear(2, 1), loss_fn=nn.MSELoss(), optimizer="sgd", **options).fit(samples)
    return folder


def test_runs_that_differ_before_first_fault_began_unlike(tmp_path: Path) -> None:
    first = train(tmp_path / "a")
    assert began_alike(first, train(tmp_path / "same"), 3)
    assert not began_alike(first, train(tmp_path / "data", data=1), 0), "told by the data, before any step"
    assert not began_alike(first, train(tmp_path / "weights", weights=1), 1), "told by the first loss"
    changed = train(tmp_path / "changed", rate=0.2)
    assert began_alike(first, changed, 1), "alike until the fault at step 1"
    assert not began_alike(first, changed, 2)


def test_report_of_unlike_starts_suggests_manual_seed() -> None:
    injuries, weights = (
        [Injury("kill", 1.0, 10, 0, recovered_s=2.0, broke=True)],
        WeightsComparison(False, 4, 1, 0.1, "model/w"),
    )
    report = ChaosReport("train.py", 0, 100, 10.0, disturbed_s=20.0, injuries=injuries, weights=weights)
    assert not any("manual_seed" in text for text in report.failures)
    report.began_alike = False
    assert any("manual_seed" in text for text in report.failures)
