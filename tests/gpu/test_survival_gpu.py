"""A rank on a GPU is killed: it is forked again by a parent that has no GPU open, and goes on from the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.checkpoint.reading import load
from tests.conftest import clean_environ

pytestmark = pytest.mark.gpu

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Trainer

torch.manual_seed(0)
x = torch.randn(640, 8)
calls = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, x):
        global calls
        calls += 1
        if calls == 14 and sys.argv[1] == "kill" and os.environ["DISTRIBUTED_ATTEMPT"] == "0":
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(x)


trainer = Trainer(Net(), batch_size=16, epochs=1, checkpoint_frequency="5 steps", sample_ledger=True)
trainer.fit(TensorDataset(x, (x[:, 0] > 0).long()))
"""


def run(folder: Path, word: str) -> dict[str, torch.Tensor]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "1"]
    done = subprocess.run(
        [*command, "--run-dir", word, "--", word],
        cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return load(str(folder / word / "checkpoints" / "step-000040"), ranks=()).shared["model"]


def test_a_killed_rank_comes_back_on_its_gpu(tmp_path: Path) -> None:
    undisturbed, killed = run(tmp_path, "leave"), run(tmp_path, "kill")
    events = [json.loads(line) for line in (tmp_path / "kill" / "events.jsonl").read_text().splitlines()]
    recovered = [event for event in events if event["event"] == "Recovered"]
    assert [event["step"] in (0, 5, 10) for event in recovered] == [True]  # saves end behind the loop
    assert all(torch.equal(undisturbed[name], tensor) for name, tensor in killed.items())
