"""A checkpoint of any strategy loads under any other, on any number of ranks: bytes equal, and the next step's loss.

Every strategy trains a few steps and saves. Then every strategy loads each of these, saves what it holds without a
step in between, and takes one step.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distributed.checkpoint.exchange_catalog import open_one
from distributed.checkpoint.exchange_export import export_checkpoint
from distributed.checkpoint.exchange_import import import_weights
from distributed.checkpoint.reading import load
from distributed.checkpoint.tree import flatten
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.plan import Plan
from distributed.data.loader import TrainLoader
from distributed.data.source import read_source
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.session import Session
from distributed.strategies.torch_mesh import TorchMesh
from distributed.testing import run_ranks
from distributed.train.task import Task
from tests.meshes import MESHES, load_state, make_data, make_model, save_state

KINDS = ["one", "ddp", "fsdp", "zero1", "tp", "pp", "3d"]
STEPS = 3


def plan_for(mesh: str, env: WorkerEnv) -> Plan:
    config = DistributedConfig(**MESHES[mesh].all_settings(), learning_rate=0.01)
    profile = JobProfile(samples=40)
    return make_plan(config, profile, Hardware(cpu_cores=2), run_dir="unused", world=env)


class Rank:
    """One rank with a strategy over a fresh model, as the loop uses it."""

    def __init__(self, mesh: str, tied: bool = False) -> None:
        env = worker_env() or WorkerEnv()
        self.session = Session.open(env, device="cpu", collectives="gloo", timeout_s=60)
        self.plan = plan_for(mesh, env)
        self.session.data_rank = self.plan.mesh.data_rank(self.session.rank)
        self.strategy = TorchMesh()
        self.strategy.setup(Task(make_model(tied=tied), nn.CrossEntropyLoss()), self.plan, self.session)
        source = read_source(make_data(), "data")
        self.loader = TrainLoader(source, self.plan.batch, self.session.data_rank, seed=0)

    def step(self, number: int) -> float:
        """One step on the same samples as every other strategy; the loss over all ranks."""
        microbatches, _ = next(itertools.islice(self.loader.epoch(0, number), 0, 1))
        loss = torch.tensor([float(self.strategy.train_step(microbatches).loss), 1.0]) * self.strategy.counts
        total = self.session.sum("loss", loss)
        return (total[0] / total[1]).item()

    def save(self, folder: str, step: int) -> None:
        save_state(self.strategy, self.session, folder, step)

    def load(self, folder: str) -> None:
        load_state(self.strategy, self.session, folder)


def train_and_save(mesh: str, folder: str, tied: bool = False) -> float:
    rank = Rank(mesh, tied)
    for number in range(STEPS):
        rank.step(number)
    rank.save(folder, STEPS)
    return rank.step(STEPS)


def load_all(mesh: str, root: str, sources: list[str], tied: bool = False) -> list[float]:
    losses = []
    for source in sources:
        rank = Rank(mesh, tied)
        rank.load(f"{root}/{source}")
        rank.save(f"{root}/{source}-{mesh}", STEPS)
        losses.append(rank.step(STEPS))
    return losses


def on_mesh(function: Any, mesh: str, *args: Any) -> Any:
    if MESHES[mesh].ranks == 1:
        return function(mesh, *args)
    return run_ranks(function, MESHES[mesh].ranks, mesh, *args)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A checkpoint of each strategy after the same steps, and the loss of its next step."""
    root = tmp_path_factory.mktemp("saved")
    return root, {mesh: on_mesh(train_and_save, mesh, str(root / mesh)) for mesh in KINDS}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return flatten(load(str(folder / f"step-{STEPS:06d}"), ranks=()).shared)[0]


@pytest.mark.parametrize("mesh", KINDS)
def test_every_strategy_loads_what_every_other_saved(mesh: str, saved: tuple[Path, dict[str, float]]) -> None:
    root, next_losses = saved
    assert_loads(mesh, root, KINDS, next_losses)


def assert_loads(mesh: str, root: Path, sources: list[str], next_losses: dict[str, float], tied: bool = False) -> None:
    found = on_mesh(load_all, mesh, str(root), sources, tied)
    for source, loss in zip(sources, found, strict=True):
        before, after = tensors_of(root / source), tensors_of(root / f"{source}-{mesh}")
        assert before.keys() == after.keys()
        assert all(before[name].dtype == after[name].dtype for name in before)
        differing = [name for name in before if not torch.equal(before[name], after[name])]
        assert not differing, f"{source} -> {mesh}"
        assert loss == pytest.approx(next_losses[source], rel=1e-5), f"{source} -> {mesh}"


def test_tied_weights_of_a_pipeline(tmp_path: Path) -> None:
    """Both of its ends hold them, and the optimizer's state for them."""
    kinds = ["one", "pp"]
    losses = {mesh: on_mesh(train_and_save, mesh, str(tmp_path / mesh), True) for mesh in kinds}
    for mesh in ("pp", "fsdp_grad_op"):
        assert_loads(mesh, tmp_path, kinds, losses, tied=True)


def weights_of(mesh: str, folder: str, to: str) -> None:
    """Load weights that came from another program, and save them again."""
    rank = Rank(mesh)
    rank.load(folder)
    rank.save(to, 0)


@pytest.mark.parametrize("mesh", ["fsdp", "pp_tp"])
def test_safetensors_out_and_in(mesh: str, saved: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    root, _ = saved
    trained = tensors_of(root / "3d")
    file = tmp_path / "model.safetensors"
    export_checkpoint(open_one(str(root / "3d" / f"step-{STEPS:06d}")), str(file))
    model = make_model()
    model.load_state_dict(load_file(file))
    assert all(torch.equal(value, trained[f"model/{name}"]) for name, value in model.state_dict().items())
    import_weights(str(file), str(tmp_path / "imported"))
    on_mesh(weights_of, mesh, str(tmp_path / "imported"), str(tmp_path / "again"))
    again = load(str(tmp_path / "again" / "step-000000"), ranks=()).shared["model"]
    assert all(torch.equal(value, trained[f"model/{name}"]) for name, value in again.items())
