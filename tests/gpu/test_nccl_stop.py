"""Ctrl-C and NaN on NCCL: what was trained is kept and goes on to the same bytes, and the samples are named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.reading import load
from distributed.data.order import shuffled_order
from tests.conftest import clean_environ

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from distributed import Trainer


class Numbers(Dataset):
    def __init__(self):
        self.x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        if "nan" in sys.argv:
            self.x[137] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(0.02 * ("slow" in sys.argv))
        return self.x[index], (self.x[index, 0] > 0).long()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
Trainer(model, batch_size=5).fit(DataLoader(Numbers(), shuffle=True))
"""


def start(folder: Path, name: str, *options: str, word: str = "") -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "2"]
    return subprocess.Popen(
        [*command, "--share-gpus", "--run-dir", name, "log_every_n_steps=5", *options, "--", word],
        cwd=folder, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    path = run / "events.jsonl"
    for _ in range(2000):
        lines = path.read_text().splitlines() if path.exists() else []
        if any(f'"step":{step}' in line and '"event":"StepEnded"' in line for line in lines):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"no step {step} came")


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return flatten(load(str(run / "checkpoints" / "step-000100"), ranks=()).shared)[0]


@pytest.fixture(scope="module", params=["pytorch-ddp", "fsdp"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Where a whole run lies, one that was stopped and resumed, and one with a NaN; and what the processes said."""
    folder = tmp_path_factory.mktemp("stops")
    backend = f"backend={request.param}"
    started = {"whole": start(folder, "whole", backend), "nan": start(folder, "nan", backend, word="nan")}
    started["cut"] = cut = start(folder, "cut", backend, word="slow")
    wait_for_step(folder / "cut", 20, cut)
    children = psutil.Process(cut.pid).children(recursive=True)
    cut.send_signal(signal.SIGINT)
    said = {name: process.communicate(timeout=120)[0] for name, process in started.items()}
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert [name for name, process in started.items() if process.returncode == 0] == ["whole"], said
    again = start(folder, "again", backend, "resume_from_checkpoint=true", "checkpoint_dir=cut/checkpoints")
    return folder, said | {"again": again.communicate(timeout=120)[0]}


def test_ctrl_c_saves_and_the_run_resumes_with_same_bytes(runs: Any) -> None:
    folder, said = runs
    events = [json.loads(line) for line in (folder / "cut" / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["status"]) == ("RunEnded", "interrupted"), said["cut"]
    whole, again = tensors(folder / "whole"), tensors(folder / "cut")
    assert [name for name, value in whole.items() if not torch.equal(value, again[name])] == [], said["again"]
    assert "resume certificate: NOTHING COMPARED" in said["again"] or "PASS" in said["again"], said["again"]


def test_nan_loss_is_reported_with_its_step_and_samples(runs: Any) -> None:
    folder, said = runs
    text, seed = said["nan"], json.loads((folder / "nan" / "plan.json").read_text())["seed"]
    step = shuffled_order(1000, seed, 0).index(137) // 10 + 1
    assert f"the loss is nan at step {step}" in text, text
    samples = text[text.index("samples [") + 9 :].partition("]")[0]
    assert 137 in [int(index) for index in samples.split(", ")]
