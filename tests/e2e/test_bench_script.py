"""`distributed bench throughput --script`: a user's training with two ranks against its run with one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from tests.conftest import clean_environ

SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer

assert sys.argv[1:] == ["--width", "4"], sys.argv
data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
trainer = Trainer(nn.Linear(4, 1), loss_fn=nn.MSELoss(), checkpoint_dir="mine", checkpoint_frequency=1, epochs=1)
trainer.fit(DataLoader(data, batch_size=5), DataLoader(data, batch_size=30))
"""


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributed.cli", "bench", "throughput", "--script", "train.py"]
    command += ["--processes", "2", "--steps", "4", "--rounds", "1", *words]
    return subprocess.run(command, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=200)


def test_own_training_is_measured_with_one_rank_and_two(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    files = ["--json", "found.json", "--picture", "found.svg"]
    ended = bench(tmp_path, *files, "optimizer=sgd", "device=cpu", "--", "--width", "4")
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "found.json").read_text())
    one, two = record["rows"]
    assert [(row["processes"], row["global_batch"]) for row in (one, two)] == [(1, 5), (2, 10)]
    for row in (one, two):
        assert row["samples_per_second"] > 0
        assert math.isfinite(row["loss"])
    assert two["speed_up"] == two["samples_per_second"] / one["samples_per_second"]
    assert record["settings"]["given"] == ["optimizer=sgd", "device=cpu"]
    assert "speed-up" in ended.stdout
    assert (tmp_path / "found.svg").read_text().rstrip().endswith("</svg>")
    # The user's own checkpoints are not touched, and no run is left.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.svg", "train.py"]


def test_script_that_fails_or_trains_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = bench(tmp_path, "device=cpu")
    assert ended.returncode != 0
    assert "the script failed with 1 rank" in ended.stderr
    assert "AssertionError: ['train.py']" in ended.stderr
    (tmp_path / "train.py").write_text("print('nothing')")
    assert "see that it calls fit of a Trainer" in bench(tmp_path).stderr
