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

SCRIPT = Path(__file__).parents[2] / "benchmarks/suite/stuck_script.py"


@dataclass(frozen=True)
class Result:
    """Of one run with a fault in each of its attempts, save the last."""

    code: int
    shown: str
    folder: Path
    events: list[dict[str, Any]]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def run(folder: Path, kind: str, *faults: str) -> Result:
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", str(SCRIPT), "--run-dir", "run"]
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
    assert [event["cause"] for event in result.events_of("AttemptEnded")] == ["hang"] * 4
    stalls = result.events_of("RankStalled")
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
    said = [event["message"] for event in result.events_of("Warned")]
    assert any("one CUDA graph from here on" in line for line in said) == (kind == "captured"), said
    (stall,) = result.events_of("RankStalled")
    assert (stall["rank"], stall["waiting"]) == (1, [0]), (stall, recorded(result.folder))
    assert "in wait_for_nobody" in stall["where"]
    if kind == "sharded":
        assert " number " in stall["collective"], (stall, recorded(result.folder))


def test_gpu_errors_are_blamed_on_the_failing_rank(tmp_path: Path) -> None:
    result = run(tmp_path, "replicated", "memory", "cuda")
    assert result.code == 0, result.shown
    memory, cuda = result.events_of("AttemptEnded")
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
