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
from torch.utils.data import Dataset
from distributed import Trainer

torch.manual_seed(0)
x = torch.randn(1600, 8)
kind, faults, attempt = sys.argv[1], sys.argv[2:], int(os.environ["DISTRIBUTED_ATTEMPT"])
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
    if word in ("never meets", "never ends its forward"):
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
        if kind == "captured":
            return self.layers(x)
        global calls
        calls += self.training
        is_time = calls == 8 and dist.get_rank() == 1
        if is_time:
            suffer(x)
        if kind == "replicated":
            meet(x)
        if is_time and word == "never ends":
            wait_for_nobody()
        return self.layers(x)


class Rows(Dataset):
    def __init__(self):
        self.read = 0

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        self.read += 1
        if word == "never reads" and self.read == 400 and dist.get_rank() == 1:  # of 800
            wait_for_nobody()
        return x[index], (x[index, 0] > 0).long()


how = {"backend": "fsdp"} if kind == "sharded" else {"capture": "auto" if kind == "captured" else False}
trainer = Trainer(Net(), batch_size=8, epochs=1, log_every_n_steps=50, checkpoint_frequency="5 steps", **how)
trainer.fit(Rows())
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


def run(folder: Path, kind: str, *faults: str) -> Result:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--run-dir", "run"]
    done = subprocess.run(
        [*command, "--num-gpus", "2", "--share-gpus", "hang_timeout_s=3", "--", kind, *faults],
        cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return Result(done.returncode, done.stdout + done.stderr, folder / "run", events)


def recorded(folder: Path) -> dict[str, str]:
    """The ends of all flight records, for a failure that cannot be seen without them."""
    return {str(path.relative_to(folder)): path.read_text()[-800:] for path in folder.rglob("collectives-*.json")}


def test_hung_ranks_are_named_with_their_collective(tmp_path: Path) -> None:
    result = run(tmp_path, "replicated", "never meets", "never ends", "is stopped", "differs")
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


@pytest.mark.parametrize(
    ("kind", "fault"), [("captured", "never reads"), ("sharded", "never ends its forward")], ids=["captured", "sharded"]
)
def test_hung_rank_of_other_steps_is_named(kind: str, fault: str, tmp_path: Path) -> None:
    """A collective within a graph has no record of its own; where the rank stands is known all the same."""
    result = run(tmp_path, kind, fault)
    assert result.code == 0, result.shown
    assert ("one CUDA graph from here on" in result.shown) == (kind == "captured"), result.shown
    (stall,) = result.told("RankStalled")
    assert (stall["rank"], stall["waiting"]) == (1, [0]), (stall, recorded(result.folder))
    assert "in wait_for_nobody" in stall["where"]
    if kind == "sharded":
        assert " number " in stall["collective"], (stall, recorded(result.folder))


def test_gpu_errors_are_blamed_on_the_failing_rank(tmp_path: Path) -> None:
    result = run(tmp_path, "replicated", "memory", "cuda")
    assert result.code == 0, result.shown
    memory, cuda = result.told("AttemptEnded")
    assert (memory["rank"], cuda["rank"]) == (1, 1)
    assert "OutOfMemoryError" in memory["message"].splitlines()[0]
    assert "which ranks 0, 1 share" in memory["message"]
    assert "CUDA error" in cuda["message"].splitlines()[0]
    for attempt, suffix in ((0, "pickle"), (0, "txt"), (1, "pickle"), (1, "txt")):
        assert (result.folder / "attempts" / str(attempt) / f"memory-1.{suffix}").stat().st_size > 0


def train_all(names: list[str], folder: str) -> None:
    print("this rank's output is seen", flush=True)
    for name in names:
        train(name, Path(folder) / name, make_model(blocks=4), accumulation=2, device="cuda", share_gpus=True)


PIPELINES = ["pp", "pp_gpipe", "pp_interleaved", "pp_zero_bubble"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, PIPELINES), (4, ["pp_tp", "pp_dp", "dp_tp", "hybrid", "fsdp_cp", "zero1_tp"])],
    ids=["pipelines", "meshes"],
)
def test_meshes_on_nccl_print_no_warnings(
    ranks: int, names: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(train_all, ranks, names, str(tmp_path), device="cuda")
    shown = "".join(capfd.readouterr())
    assert shown.count("this rank's output is seen") == ranks
    assert [line for line in shown.splitlines() if "warn" in line.lower()] == []
