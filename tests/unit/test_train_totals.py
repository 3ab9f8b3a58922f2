"""Losses of steps and epochs: of a step without targets, and of an epoch that another mesh goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.core.errors import NonFiniteLossError


def fit(folder: Path, target: torch.Tensor, **settings: Any) -> Any:
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(3, 4),
        num_gpus=1,
        batch_size=4,
        loss_fn=nn.CrossEntropyLoss(),
        run_dir=str(folder),
        progress=False,
        **settings,
    )
    return trainer.fit(TensorDataset(torch.randn(12, 3), target)), trainer.model


@pytest.mark.parametrize("mode", [{}, {"reproducible": "bitwise", "virtual_ranks": 1}])
def test_step_without_any_target_ends_the_run(mode: dict[str, Any], tmp_path: Path) -> None:
    """Its mean is no number; without an error, it would make all weights NaN."""
    target = torch.tensor([0, 1, 2, 3, -100, -100, -100, -100, 0, 1, 2, 3])
    with pytest.raises(NonFiniteLossError, match="step 2"):
        fit(tmp_path, target, loss_weighting="targets", **mode)


def test_resume_on_another_mesh_keeps_the_epochs_loss(tmp_path: Path) -> None:
    target = torch.arange(12) % 4
    whole, _ = fit(tmp_path / "whole", target, checkpoint_frequency="1 steps")
    found = str(tmp_path / "whole" / "checkpoints" / "step-000001")
    resumed, _ = fit(tmp_path / "resumed", target, backend="fsdp", resume_from_checkpoint=found)
    assert resumed.steps == whole.steps == 3
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
