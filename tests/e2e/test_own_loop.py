"""A script with a loop of its own: started by hand or by a launcher, killed, resumed and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environ
from tests.warm_python import SCRIPTS

SCRIPT = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import distributed

PLACE, OPTIONS = Path(os.environ["PLACE"]), json.loads(os.environ["OPTIONS"])
print("script body", flush=True)
run = distributed.start(epochs=3, run_dir="run", progress=False, checkpoint_frequency="4 steps", log_every_n_steps=2,
                        sample_ledger=True, **OPTIONS.get("settings", {}))
torch.manual_seed(0)
x = torch.randn(70, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


class Counter:
    steps = 0
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]


counter = Counter()
run.track(schedule=schedule, counter=counter)
size = 12 // run.world_size
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=size, shuffle=True))
for epoch in run.epochs():
    for x, y in loader:
        run.backward(nn.functional.cross_entropy(model(x), y))
        run.step(optimizer)
        schedule.step()
        counter.steps += 1
        time.sleep(OPTIONS.get("pace", 0))
        for rank, step in OPTIONS.get("kills", []):
            mark = PLACE / f"killed-{step}"
            if (rank, step) == (run.rank, counter.steps) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    run.log(rate=optimizer.param_groups[0]["lr"])
if run.is_main:
    flat = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    result = {"bytes": hashlib.sha256(flat).hexdigest(), "steps": run.history.steps, "counter": counter.steps,
              "rate": optimizer.param_groups[0]["lr"], "world": run.world_size}
    (PLACE / "result.json").write_text(json.dumps(result))
"""


def begin(place: Path, *command: str, script: str = "loop.py", **options: Any) -> subprocess.Popen[str]:
    (place / script).parent.mkdir(exist_ok=True)
    (place / script).write_text(SCRIPT)
    environ = clean_environ() | {"PLACE": str(place), "OPTIONS": json.dumps(options)}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    program = script.removesuffix("/__main__.py")  # as Python is given a folder
    return subprocess.Popen([*(command or SCRIPTS.command), program], cwd=place, env=environ, **streams)


def end(process: subprocess.Popen[str], place: Path, code: int = 0) -> tuple[dict[str, Any], str]:
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == code, shown
    result = place / "result.json"
    return (json.loads(result.read_text()) if result.exists() else {}), shown


def events(place: Path, kind: str) -> list[dict[str, Any]]:
    lines = (place / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("undisturbed")
    result, shown = end(begin(place, settings={"num_gpus": 2}), place)
    assert shown.count("script body") == 3, "once by hand, and once in each rank"
    assert (result["steps"], result["counter"], result["world"]) == (18, 18, 2)
    return result


def test_killed_rank_of_a_loop_resumes_with_same_bytes(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """In the middle of an epoch, and again in the next one; tracked objects go back with the model."""
    process = begin(tmp_path, settings={"num_gpus": 2}, kills=[(1, 6), (0, 11)])
    result, shown = end(process, tmp_path)
    assert result == undisturbed, shown
    assert len(events(tmp_path, "AttemptEnded")) == 2
    assert all(event["passed"] for event in events(tmp_path, "ResumeCompared"))


def test_interrupted_loop_saves_and_resumes_with_same_bytes(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    process = begin(tmp_path, settings={"num_gpus": 2}, pace=0.1)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("run/checkpoints/step-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    result, shown = end(process, tmp_path, 130)
    assert result == {}
    assert "Traceback" not in shown
    assert "done" not in [event["status"] for event in events(tmp_path, "RunEnded")]
    resumes = {"num_gpus": 2, "resume_from_checkpoint": True}
    process = begin(tmp_path, script="program/__main__.py", settings=resumes)
    assert end(process, tmp_path)[0] == undisturbed


def test_launched_loop_is_the_rank_that_a_launcher_made(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Under torchrun as under our own command line; the same bytes, and each script body once a rank."""
    torchrun = [
        *SCRIPTS.command,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "--standalone",
    ]
    result, shown = end(begin(tmp_path, *torchrun), tmp_path)
    assert result == undisturbed, shown
    assert shown.count("script body") == 2
