"""`distributed tune` on one machine, with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ENV = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
PYTHON = sys.executable

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Trainer, tune

hidden = tune.params().get("hidden", 4)
x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 1))
print("hidden", hidden)
trainer = Trainer(model, loss_fn=nn.MSELoss(), optimizer="sgd", learning_rate=1.0, batch_size=32, device="cpu")
trainer.fit(data, data)
"""


def run_cli(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [PYTHON, "-m", "distributed.cli", *words]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=200)


def test_tune_searches_a_script_and_its_best_yaml_trains(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text("lr: {loguniform: [1e-3, 1e-1]}\nhidden: {choice: [2, 8]}\n")
    common = ("tune", "--script", "train.py", "--space", "space.yaml", "--metric", "val_loss")
    searched = run_cli(tmp_path, *common, "--num-samples", "2", "--num-gpus", "2", "--run-dir", "found", "epochs=2")
    assert searched.returncode == 0, searched.stderr
    assert "trial 0001 step 2: val_loss" in searched.stderr
    assert "best: trial 000" in searched.stdout
    best = yaml.safe_load((tmp_path / "found" / "best.yaml").read_text())
    assert best.keys() == {"epochs", "learning_rate"}
    params = yaml.safe_load((tmp_path / "found" / "params.yaml").read_text())
    assert params["lr"] == best["learning_rate"]
    log = next((tmp_path / "found" / "trials").glob("*/log.txt")).read_text()
    assert re.search("hidden [28]", log)

    shown = run_cli(tmp_path, "tune", "show", "found")
    assert shown.stdout.splitlines()[:4] == searched.stdout.splitlines()[:4]
    trained = run_cli(tmp_path, "train", "--script", "train.py", "--config", "found/best.yaml", "--run-dir", "final")
    assert trained.returncode == 0, trained.stderr
    started = json.loads((tmp_path / "final" / "events.jsonl").read_text().splitlines()[0])
    assert started["settings"]["learning_rate"] == best["learning_rate"]
    assert started["epochs"] == 2


def test_tune_reports_all_problems_before_start(tmp_path):
    (tmp_path / "space.yaml").write_text("batch_size: {choice: [0, 32]}\nlr: {uniform: [1, 0]}\n")
    told = run_cli(tmp_path, "tune", "--script", "trian.py", "--space", "space.yaml", "epochz=3", "num_gpus=2")
    assert told.returncode == 2
    for part in (
        "trian.py does not exist",
        "space.yaml:2: lr",
        "epochz",
        "inverted",
        "num_gpus cannot be set for a trial",
        "batch_size: 0 is not a legal value",
    ):
        assert part in told.stderr
    assert not (tmp_path / "runs").exists()


def test_tune_names_parameters_the_script_never_reads(tmp_path):
    (tmp_path / "train.py").write_text("from distributed import tune\ntune.report({'loss': 1.0})\n")
    (tmp_path / "space.yaml").write_text("lr: {choice: [0.1, 0.2]}\nhiden: {choice: [1, 2]}\n")
    told = run_cli(tmp_path, "tune", "--script", "train.py", "--space", "space.yaml", "--num-gpus", "1")
    assert told.returncode == 2
    assert "hiden, which train.py never reads" in told.stderr
