"""On NCCL a rank that is stuck, stopped, out of memory or in an error of CUDA is named, and the others are let go."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.testing import run_ranks
from tests.conftest import clean_environ
from tests.meshes import make_model, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Trainer

torch.manual_seed(0)
x = torch.randn(1600, 8)
faults, attempt = sys.argv[1:], int(os.environ["DISTRIBUTED_ATTEMPT"])
word = faults[attempt] if attempt < len(faults) else ""
calls = 0


def wait_for_nobody():
    time.sleep(1000)


def meet(like):
    total = torch.ones(3, device=like.device)
    dist.all_reduce(total)
    return total.sum().item()  # where the host waits: not in the collective


def gather_instead(like):
    mine = torch.ones(1 << 20, device=like.device)
    dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine)
    return mine.sum().item()


def suffer(like):
    if word == "never meets":
        wait_for_nobody()
    elif word == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "differs":
        gather_instead(like)
    elif word == "memory":
        torch.cuda.set_per_process_memory_fraction(0.01)  # so that it is the only one to run out
        held = [torch.empty(1 << 30, dtype=torch.uint8, device=like.device) for _ in range(100)]
    elif word == "cuda":
        torch.ones(3, device=like.device)[torch.tensor([7], device=like.device)].sum().item()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        global calls
        calls += self.training
        is_time = calls == 8 and dist.get_rank() == 1
        if is_time:
            suffer(x)
        meet(x)
        if is_time and word == "never ends":
            wait_for_nobody()
        return self.layers(x)


trainer = Trainer(Net(), batch_size=8, epochs=1, capture=False, log_every_n_steps=50, checkpoint_frequency="5 steps")
trainer.fit(TensorDataset(x, (x[:, 0] > 0).long()))
"""


@dataclass(frozen=True)
class Result:
    """Of one run with a fault in each of its attempts, save the last."""

    code: int
    shown: str
    folder: Path
    events: list[dict[str, Any]]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def run(folder: Path, *faults: str) -> Result:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--run-dir", "run"]
    done = subprocess.run(
        [*command, "--num-gpus", "2", "--share-gpus", "hang_timeout_s=3", "--", *faults],
        cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return Result(done.returncode, done.stdout + done.stderr, folder / "run", events)


def recorded(folder: Path) -> dict[str, str]:
    """The ends of all flight records, for a failure that cannot be seen without them."""
    return {str(path.relative_to(folder)): path.read_text()[-800:] for path in folder.rglob("collectives-*.json")}


def test_hung_ranks_are_named_with_their_collective(tmp_path: Path) -> None:
    result = run(tmp_path, "never meets", "never ends", "is stopped", "differs")
    assert result.code == 0, result.shown
    assert [event["cause"] for event in result.told("AttemptEnded")] == ["hang"] * 4
    stalls = result.told("RankStalled")
    assert [stall["rank"] for stall in stalls] == [1] * 4
    first, backward, stopped, different = stalls
    for stall in (first, backward, stopped):
        assert stall["waiting"] == [0], (stalls, recorded(result.folder))
        assert stall["collective"].startswith("all_reduce number ")
    assert "in wait_for_nobody" in first["where"]
    assert "in meet" in first["collective"]
    assert "in wait_for_nobody" in backward["where"]
    assert "in meet" not in backward["collective"]
    assert "SIGSTOP" in stopped["where"]
    assert "in meet" in stopped["collective"]
    assert "rank 0 in all_reduce number " in different["where"]
    assert "rank 1 in all_gather number " in different["where"]
    assert "in gather_instead" in different["where"]


def test_gpu_errors_are_blamed_on_the_failing_rank(tmp_path: Path) -> None:
    result = run(tmp_path, "memory", "cuda")
    assert result.code == 0, result.shown
    memory, cuda = result.told("AttemptEnded")
    assert (memory["rank"], cuda["rank"]) == (1, 1)
    assert "OutOfMemoryError" in memory["message"].splitlines()[0]
    assert "which ranks 0, 1 share" in memory["message"]
    assert "CUDA error" in cuda["message"].splitlines()[0]
    for attempt, suffix in ((0, "pickle"), (0, "txt"), (1, "txt")):
        assert (result.folder / "attempts" / str(attempt) / f"memory-1.{suffix}").stat().st_size > 0


def train_all(names: list[str], folder: str) -> None:
    for name in names:
        train(name, Path(folder) / name, make_model(blocks=4), accumulation=2, device="cuda", share_gpus=True)


@pytest.mark.parametrize(("ranks", "names"), [(2, ["pp", "pp_interleaved"]), (4, ["pp_tp", "pp_dp"])])
def test_pipelines_on_nccl_print_no_warnings(
    ranks: int, names: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(train_all, ranks, names, str(tmp_path), device="cuda")
    shown = "".join(capfd.readouterr())
    assert [line for line in shown.splitlines() if "warn" in line.lower()] == []
