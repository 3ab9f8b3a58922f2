"""A rank that is killed takes its sampler with it: the epoch goes on in its order, and later ones are the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from distributed import Trainer
from distributed.data.checks.ledger import check_ledgers, read_ledger

SAMPLES, EPOCHS = 48, 3


class Kept(Sampler):
    """Draws from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        return iter(self.rng.permutation(SAMPLES).tolist())


class Killed(nn.Module):
    """Ends rank 0, which draws the orders, once: in the middle of the second epoch."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.layer, self.mark, self.calls = nn.Linear(2, 1), mark, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if os.environ["RANK"] == "0" and self.calls == 9 and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def test_sampler_order_survives_the_killed_rank(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(SAMPLES, 2), torch.randn(SAMPLES, 1))
    run: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "progress": False, "device": "cpu", "num_gpus": 2}
    model = Killed(str(tmp_path / "killed"))
    trainer = Trainer(model, batch_size=4, epochs=EPOCHS, loss_fn=nn.MSELoss(), sample_ledger=True, **run)
    trainer.fit(DataLoader(data, batch_size=4, sampler=Kept()))
    assert (tmp_path / "killed").exists()
    assert check_ledgers(tmp_path / "run" / "ledger", SAMPLES).is_exact
    used: dict[int, list[int]] = {}
    for path in sorted((tmp_path / "run" / "ledger").glob("rank-*.samples")):
        for entry in read_ledger(path):
            used.setdefault(entry.step, []).extend(entry.indices.tolist())
    rng = np.random.default_rng(0)
    expected = [i for _ in range(EPOCHS) for i in rng.permutation(SAMPLES).tolist()]
    assert [i for step in sorted(used) for i in used[step]] == expected
