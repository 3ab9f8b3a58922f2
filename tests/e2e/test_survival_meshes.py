"""Ranks of a mesh that are killed: all start anew from a checkpoint, and end with the bytes of a run never hurt.

And runs that are stopped on one mesh and go on, with other parts of the model on other ranks, on another.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.restore.reading import load
from distributed.data.checks.ledger import LedgerReport, check_ledgers
from tests.e2e.survival import Result, Running, fault, launching_python
from tests.meshes import ENGINES, MESHES

SAMPLES, EPOCHS = 37, 3
PER_EPOCH = 5  # the last one short: some data ranks have no sample in it
STEPS = PER_EPOCH * EPOCHS


# Beside the script of tests/e2e/survival.py, whose faults it uses.
SCRIPT = """
import os, sys, time

sys.path.insert(0, ROOT)

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from distributed import Trainer
from distributed.runtime import session
from distributed.train import state
from tests import meshes
from train import OPTIONS, PLACE, come_to, watch_ourselves

step = 0


class Block(meshes.Block):
    def forward(self, x):
        if not self.training:
            come_to("evaluation", step)
            return super().forward(x)
        time.sleep(OPTIONS.get("pace", 0.0))
        come_to("forward", step)
        x = functional.dropout(super().forward(x), OPTIONS.get("dropout", 0.0))
        if x.requires_grad:
            x.register_hook(lambda gradient: come_to("backward", step))
        return x


def watch_steps():
    seed_step, restore = session.Session.seed_step, state.restore

    def watched_seed_step(self, seed, finished):
        global step
        step = finished + 1
        return seed_step(self, seed, finished)

    def watched_restore(*args, **kwargs):
        come_to("restoring")
        found = restore(*args, **kwargs)
        come_to("restored")
        return found

    session.Session.seed_step, state.restore = watched_seed_step, watched_restore


def main():
    come_to("start")
    watch_ourselves()
    watch_steps()
    model = meshes.make_model()
    for block in model.blocks:
        block.__class__ = Block
    settings = dict(
        learning_rate=0.01, lr_schedule="cosine", warmup_steps=3, gradient_clipping=1.0, checkpoint_frequency="5 steps",
        keep_last=3, sample_ledger=True, log_every_n_steps=1, progress=False,
    )
    train = DataLoader(meshes.make_data(SAMPLES), shuffle=True)
    Trainer(model, loss_fn=nn.CrossEntropyLoss(), **settings).fit(train, meshes.make_data(5))


if __name__ == "__main__":
    main()
"""


def start(folder: Path, mesh: str, *faults: dict[str, Any], options: dict[str, Any], **settings: Any) -> Running:
    """`distributed train` on a mesh, always with the same global batch."""
    root = str(Path(__file__).parents[2])
    (folder / "mesh.py").write_text(SCRIPT.replace("ROOT", repr(root)).replace("SAMPLES", str(SAMPLES)))
    settings = (MESHES | ENGINES)[mesh].all_settings() | {"epochs": EPOCHS} | settings
    ranks = settings.pop("num_gpus")
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    command = [*launching_python(), "-m", "distributed.cli", "train", "--script", "mesh.py", "--run-dir", "run"]
    return Running(folder, [*command, "--num-gpus", str(ranks), *words], list(faults), options)


def run(folder: Path, mesh: str, *faults: dict[str, Any]) -> Result:
    """To its end; dropout shows whether random numbers are those of a run that was not hurt."""
    result = start(folder, mesh, *faults, options={"dropout": 0.1}).end()
    assert result.code == 0, result.shown
    return result


def state_at_end(result: Result) -> dict[str, Any]:
    last = sorted((result.run_dir / "checkpoints").glob("step-*"))[-1]
    assert last.name == f"step-{STEPS:06d}"
    shared = load(str(last), ranks=()).shared
    return {name: shared[name] for name in ("model", "optimizer", "schedule", "progress")}


def ledger(result: Result) -> LedgerReport:
    return check_ledgers(result.run_dir / "ledger", SAMPLES)


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), f"{where} has other bytes"
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted:
            assert_equal(found[name], wanted[name], f"{where}/{name}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_equal(one, other, f"{where}/{number}")
    else:
        assert found == wanted, where


FAULTS = {
    "fsdp": (
        fault("chunks written", rank=3),  # of the first checkpoint, which then does not exist
        fault("forward", rank=0, step=13),
        fault("restored", rank=1, attempt=2),
    ),
    "tp": (
        fault("evaluation", rank=1, step=2 * PER_EPOCH + 1),
        fault("before the manifest", rank=0, attempt=1),
    ),
    "pp": (
        fault("backward", rank=0, step=9),  # the other stage waits for it
        fault("meeting", rank=1, attempt=1),
        fault("part written", rank=1, attempt=2),
    ),
    "3d": (fault("backward", rank=6, step=8),),
    "deepspeed": (fault("backward", rank=1, step=9),),
    "zero1": (
        fault("forward", rank=0, step=9),
        fault("restoring", rank=1, attempt=1),
        fault("copied", rank=1, attempt=2),
    ),
}


# Of those whose ranks are many or slow to start, once more.
MORE_FAULTS = {
    "3d": (*FAULTS["3d"], fault("part written", rank=5, attempt=1)),
    "deepspeed": (*FAULTS["deepspeed"], fault("restored", rank=0, attempt=1)),
}


@pytest.mark.parametrize("mesh", FAULTS)
def test_killed_rank_of_a_mesh_resumes_with_same_bytes(mesh: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_survives(mesh, FAULTS[mesh], tmp_path_factory)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MORE_FAULTS)
def test_ranks_of_a_mesh_are_killed(mesh: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_survives(mesh, MORE_FAULTS[mesh], tmp_path_factory)


def assert_survives(mesh: str, faults: tuple[dict[str, Any], ...], tmp_path_factory: pytest.TempPathFactory) -> None:
    undisturbed = run(tmp_path_factory.mktemp("undisturbed"), mesh)
    hurt = run(tmp_path_factory.mktemp("hurt"), mesh, *faults)
    happened = [(event["cause"], event["rank"]) for event in hurt.events_of("AttemptEnded")]
    assert happened == [("machine", each["rank"]) for each in faults]
    assert {"step-000005", "step-000010"} & {source for source, _ in hurt.recoveries}, "none was from a checkpoint"
    assert {source.partition("-")[0] for source, _ in hurt.recoveries} <= {"the beginning", "step"}
    assert_equal(state_at_end(hurt), state_at_end(undisturbed))
    assert hurt.losses == undisturbed.losses
    assert ledger(undisturbed).is_exact
    assert str(ledger(hurt)) == str(ledger(undisturbed))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = start(tmp_path_factory.mktemp("one"), "one", options={}).end()
    assert result.code == 0, result.shown
    return result


@pytest.mark.parametrize("meshes", [("fsdp", "tp"), ("pp", "one")])
def test_stopped_run_resumes_on_another_mesh(meshes: tuple[str, ...], one_process: Result, tmp_path: Path) -> None:
    *stopped, last = meshes
    for turn, mesh in enumerate(stopped):
        running = start(tmp_path, mesh, options={"pace": 0.05}, resume_from_checkpoint=bool(turn))
        running.wait_for_step(7 * turn + 3)
        os.kill(running.process.pid, signal.SIGTERM)
        result = running.end()
        assert result.code == 143, result.shown
        ended = result.events_of("RunEnded")[-1]
        assert ended["status"] == "interrupted"
        assert ended["model_path"].endswith(f"step-{ended['step']:06d}")
        assert ended["step"] < STEPS
    result = start(tmp_path, last, options={}, resume_from_checkpoint=True).end()
    assert result.code == 0, result.shown
    assert result.events_of("RunStarted")[-1]["first_step"] == ended["step"] > 0
    assert result.losses == pytest.approx(one_process.losses, rel=1e-5)
    assert len(result.losses) == STEPS
    assert ledger(result).is_exact
