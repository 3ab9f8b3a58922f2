"""A checkpoint_dir may be any fsspec URL: a run saves there, goes on from there, and its model comes from there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer


def test_run_saves_to_and_resumes_from_a_url(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    url = f"file://{tmp_path}/store"
    options = {"num_gpus": 2, "batch_size": 4, "progress": False, "checkpoint_dir": url}
    first = nn.Linear(4, 2)
    Trainer(first, run_dir=tmp_path / "a", **options).fit(data)
    second = nn.Linear(4, 2)
    history = Trainer(second, run_dir=tmp_path / "b", epochs=2, resume_from_checkpoint=True, **options).fit(data)
    assert history.steps == 10
    assert len(history["loss"]) == 2
    assert not torch.equal(first.weight, second.weight)
    assert (tmp_path / "store" / "step-000010" / "manifest.json").exists()
