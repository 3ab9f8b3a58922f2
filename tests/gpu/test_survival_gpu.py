"""A rank on a GPU is killed: it is forked again by a parent that has no GPU open, and its peers hold the state."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.checkpoint.restore.reading import load
from distributed.runtime.step_gate import StepGate
from tests.conftest import clean_environ

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

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


def test_killed_rank_restarts_on_its_gpu_with_same_bytes(tmp_path: Path) -> None:
    undisturbed, killed = run(tmp_path, "leave"), run(tmp_path, "kill")
    recovered = events_of(tmp_path / "kill", "Recovered")
    assert [event["step"] in (0, 5, 10) for event in recovered] == [True]  # saves end behind the loop
    assert all(torch.equal(undisturbed[name], tensor) for name, tensor in killed.items())


# Hosts run ahead of the GPU while nobody reads a loss: a rank may be killed many steps before its peers notice.
SHARED_SCRIPT = """
import json, os, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from distributed import Trainer
from distributed.train.capture.capture import StepCapture

PACE_S, KIND, STEPS, PLACES = float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
torch.manual_seed(0)
world = {"attempt": -1, "rank": -1, "calls": 0}


def reach(place):  # kills this rank a moment after it has come to the place that is chosen for this attempt
    if 0 <= world["attempt"] < len(PLACES):
        chosen, number, delay_s, rank = PLACES[world["attempt"]]
        if (chosen, rank) == (place, world["rank"]):
            world["calls"] += 1
            if world["calls"] == number:
                threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def announce(name):
    method = getattr(StepCapture, name)

    def announced(*given, **more):
        reach(name)
        return method(*given, **more)

    setattr(StepCapture, name, announced)


for name in {place for place, *_ in PLACES}:
    announce(name)
make_capture = StepCapture.__init__


def in_world(self, strategy, plan, session, *more):
    world.update(attempt=session.env.attempt, rank=session.rank, calls=0)
    make_capture(self, strategy, plan, session, *more)


StepCapture.__init__ = in_world
with open(f"pid-{os.environ['RANK']}-{os.environ['DISTRIBUTED_ATTEMPT']}", "w") as file:
    file.write(str(os.getpid()))


class Rows(Dataset):
    x = torch.randn(1024, 16)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.x[index, 0] > 0)

    def __getitems__(self, indices):
        time.sleep(PACE_S)
        return [self[index] for index in indices]


class Averaging(nn.Module):  # in each step a new tensor, in the place of the last
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x):
        if self.training and KIND == "epochs":
            self.average = 0.9 * self.average + 0.1
        return x + 0.01 * self.average


def make(parameters):
    if KIND == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=1e-3)
    if KIND == "momentum":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3)


layers = nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.Linear(128, 2)
halves = {"batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "mixed_precision": "bf16"}
trainer = Trainer(
    nn.Sequential(Averaging(), *layers), loss_fn=nn.CrossEntropyLoss(), optimizer=make, epochs=1000,
    **(halves if KIND == "halves" else {"batch_size": 16}),
    max_steps=STEPS, log_every_n_steps=20, progress=False, capture=True if PLACES or KIND == "captured" else "auto",
    scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if KIND == "epochs" else 0.999),
    scheduler_interval="epoch" if KIND == "epochs" else "step",
    checkpoint_frequency="40 steps" if KIND in ("rmsprop", "epochs") else f"{STEPS} steps",
)
trainer.fit(DataLoader(Rows(), batch_size=16, num_workers=2) if KIND == "momentum" else Rows())
"""


def start(
    folder: Path, *, pace_s: float, kind: str, steps: int, ranks: int, places: Sequence[Any] = ()
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "train.py").write_text(SHARED_SCRIPT)
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", str(ranks)]
    command += ["--device", "cuda", "--share-gpus", "--run-dir", "run", "--", str(pace_s), kind, str(steps)]
    command.append(json.dumps(places))
    with (folder / "output.log").open("wb") as output:
        return subprocess.Popen(command, cwd=folder, env=clean_environ(), stdout=output, stderr=subprocess.STDOUT)


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = (line for line in lines if line.endswith("\n"))  # the last may be read while it is written
    return [event for event in map(json.loads, whole) if event["event"] == kind]


def await_event(launcher: subprocess.Popen[bytes], folder: Path, kind: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(events_of(folder / "run", kind)) < count:
        assert launcher.poll() is None, (folder / "output.log").read_text()
        assert time.monotonic() < deadline, (folder / "output.log").read_text()
        time.sleep(0.01)


def pid_of(folder: Path, rank: int) -> int:
    newest = max(folder.glob(f"pid-{rank}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return int(newest.read_text())


def train(folder: Path, kills: int, *, kind: str = "adamw", steps: int, ranks: int = 2, seed: int = 0) -> Any:
    """The state at the end of a run in which rank after rank is killed at a random moment."""
    launcher, rng = (
        start(folder, pace_s=0.004 if kills else 0.0, kind=kind, steps=steps, ranks=ranks),
        random.Random(seed),
    )
    try:
        for number in range(kills):
            await_event(launcher, folder, "Recovered", number)
            await_event(launcher, folder, "StepEnded", len(events_of(folder / "run", "StepEnded")) + 1)
            time.sleep(rng.uniform(0, 0.3))
            os.kill(pid_of(folder, number % ranks), signal.SIGKILL)
        assert launcher.wait(120) == 0, (folder / "output.log").read_text()
    finally:
        launcher.kill()
    return load(str(folder / "run" / "checkpoints" / f"step-{steps:06d}"), ranks=()).shared


def check_survived(folder: Path, kills: int, undisturbed: Any, killed: Any) -> None:
    """Every kill from memory, with no step lost, and the bytes of the undisturbed run."""
    recovered = events_of(folder / "run", "Recovered")
    assert [event["lost_steps"] for event in recovered] == [0] * kills
    assert all(event["source"].startswith("memory of rank") for event in recovered)
    assert all(torch.equal(undisturbed["model"][name], tensor) for name, tensor in killed["model"].items())
    assert str(undisturbed["optimizer"]) == str(killed["optimizer"])
    assert "ProcessGroupNCCL" not in (folder / "output.log").read_text()  # torch's traces of what was aborted


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "kills", "steps"), [(2, 4, 200), (4, 2, 100)])
def test_killed_gpu_ranks_resume_from_memory_with_same_bytes(
    tmp_path: Path, ranks: int, kills: int, steps: int
) -> None:
    undisturbed = train(tmp_path / "calm", 0, steps=steps, ranks=ranks)
    killed = train(tmp_path / "killed", kills, steps=steps, ranks=ranks)
    check_survived(tmp_path / "killed", kills, undisturbed, killed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["halves", "momentum"])  # in bf16, accumulated and clipped; with loader workers
def test_other_kinds_of_steps_survive_kills_on_gpus(kind: str, tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "calm", 0, kind=kind, steps=120)
    killed = train(tmp_path / "killed", 2, kind=kind, steps=120)
    check_survived(tmp_path / "killed", 2, undisturbed, killed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_killed_on_the_way_to_a_graph_are_survived(tmp_path: Path, ranks: int) -> None:
    """Survivors hold graphs with collectives in them, or make one, when their communicators are aborted."""
    places = [
        ("_first_steps", 3, 0.05, 1),
        ("_capture", 1, 0.03, 0),
        ("_replayed", 1, 0.01, ranks - 1),
        ("_verified", 1, 0.03, 1),
        ("train_step", 15, 0.02, 0),
    ]
    undisturbed = train(tmp_path / "calm", 0, kind="captured", steps=80, ranks=ranks)
    folder = tmp_path / "killed"
    launcher = start(folder, pace_s=0.0, kind="captured", steps=80, ranks=ranks, places=places)
    try:
        assert launcher.wait(240) == 0, (folder / "output.log").read_text()
    finally:
        launcher.kill()
    killed = load(str(folder / "run" / "checkpoints" / "step-000080"), ranks=()).shared
    check_survived(folder, len(places), undisturbed, killed)


@pytest.mark.timeout(300)
def test_rates_of_epochs_survive_kills_on_gpus(tmp_path: Path) -> None:
    """Of a model that also replaces its buffers, whose state may have to come from a checkpoint."""
    undisturbed = train(tmp_path / "calm", 0, kind="epochs", steps=120)
    killed = train(tmp_path / "killed", 2, kind="epochs", steps=120)
    assert all(torch.equal(undisturbed["model"][name], tensor) for name, tensor in killed["model"].items())
    assert str(undisturbed["optimizer"]) == str(killed["optimizer"])


@pytest.mark.timeout(300)
def test_optimizer_without_step_gate_resumes_from_checkpoint(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "calm", 0, kind="rmsprop", steps=160)
    killed = train(tmp_path / "killed", 2, kind="rmsprop", steps=160)
    recovered = events_of(tmp_path / "killed" / "run", "Recovered")
    assert not any("memory" in event["source"] for event in recovered)
    assert all(torch.equal(undisturbed["model"][name], tensor) for name, tensor in killed["model"].items())


@pytest.mark.parametrize("closes", [True, False])
def test_step_gate_is_read_when_the_device_reaches_it(closes: bool) -> None:
    device = torch.device("cuda", 0)
    model = nn.Linear(64, 64, device=device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    gate = StepGate(device)
    optimizer.found_inf = gate.latch_tensor

    def step() -> None:
        model(torch.ones(8, 64, device=device)).sum().backward()
        gate.latch()
        optimizer.step()

    step()
    step()  # whatever is loaded, made or tuned at first is there now
    torch.cuda.synchronize()
    before = [tensor.clone() for tensor in model.parameters()]
    torch.cuda._sleep(2_000_000_000)  # cycles: some second, in which the host has long gone on
    is_awake = torch.cuda.Event()
    is_awake.record()
    step()
    step()
    if closes:
        gate.close()
    assert not is_awake.query(), "the host was too slow to close the gate before the device reached it"
    torch.cuda.synchronize()
    assert gate.steps() == (2 if closes else 4)
    assert all(map(torch.equal, before, model.parameters())) is closes
