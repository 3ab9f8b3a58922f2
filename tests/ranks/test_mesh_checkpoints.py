"""A checkpoint of any strategy loads under any other, on any number of ranks: bytes equal, and the next step's loss.

Every strategy trains a few steps and saves. Then each loads what its neighbour in the list saved, one process loads all
of them, and each saves what it holds without a step in between, and takes one step. Every pair is in `make soak`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distributed.checkpoint.exchange.catalog import open_one
from distributed.checkpoint.exchange.export import export_checkpoint
from distributed.checkpoint.exchange.importing import import_weights
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.reading import load
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.plan import Plan
from distributed.data.loading.loader import TrainLoader
from distributed.data.source import read_source
from distributed.planner.hardware import Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.session import Session
from distributed.strategies.torch_mesh import TorchMesh
from distributed.testing import run_ranks
from distributed.train.task import Task
from tests.meshes import MESHES, load_state, make_data, make_model, save_state

KINDS = ["one", "ddp", "fsdp", "zero1", "tp", "pp", "3d"]
TIED = ["one", "pp"]  # that save tied weights
IN = ["fsdp", "pp_tp"]  # that take in weights from another program
STEPS = 2


def sources_of(mesh: str) -> list[str]:
    """Whose checkpoints a strategy loads: one process loads all, the others that of their neighbour."""
    return KINDS if mesh == KINDS[0] else [KINDS[(KINDS.index(mesh) + 1) % len(KINDS)]]


def plan_for(mesh: str, env: WorkerEnv) -> Plan:
    config = DistributedConfig(**MESHES[mesh].all_settings(), learning_rate=0.01)
    profile = JobProfile(samples=80)
    return make_plan(config, profile, Hardware(cpu_cores=2), run_dir="unused", world=env)


class Rank:
    """One rank with a strategy over a fresh model, as the loop uses it."""

    def __init__(self, mesh: str, tied: bool = False) -> None:
        env = worker_env() or WorkerEnv()
        self.session = Session.open(env, device="cpu", collectives="gloo", timeout_s=60)
        self.plan = plan_for(mesh, env)
        self.session.take_place(self.plan.mesh)
        self.strategy = TorchMesh(self.plan)
        self.strategy.setup(Task(make_model(tied=tied), nn.CrossEntropyLoss()), self.session)
        source = read_source(make_data(), "data")
        self.loader = TrainLoader(source, self.plan.batch, self.session.data_rank, seed=0)

    def step(self, number: int) -> float:
        """One step on the same samples as every other strategy; the loss over all ranks."""
        microbatches, _ = next(itertools.islice(self.loader.epoch(0, number), 0, 1))
        loss = torch.tensor([float(self.strategy.train_step(microbatches).loss), 1.0]) * self.strategy.owns_metrics
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


def load_all(mesh: str, root: str, sources: list[str], tied: bool = False) -> dict[str, float]:
    losses = {}
    for source in sources:
        rank = Rank(mesh, tied)
        rank.load(f"{root}/{source}")
        rank.save(f"{root}/{source}-{mesh}", STEPS)
        losses[source] = rank.step(STEPS)
    return losses


def weights_of(mesh: str, folder: str, to: str) -> None:
    """Load weights that came from another program, and save them again."""
    rank = Rank(mesh)
    rank.load(folder)
    rank.save(to, 0)


Job = tuple[Callable[..., Any], str, tuple[Any, ...]]  # a function, its mesh, and what else it is given


def do_all(jobs: dict[str, Job]) -> dict[str, Any]:
    return {name: function(mesh, *args) for name, (function, mesh, args) in jobs.items()}


def do_by_size(jobs: dict[str, Job]) -> dict[str, Any]:
    """All jobs for one number of ranks are done in one world, which costs its start."""
    found: dict[str, Any] = {}
    for ranks in sorted({MESHES[mesh].ranks for _, mesh, _ in jobs.values()}):
        mates = {name: job for name, job in jobs.items() if MESHES[job[1]].ranks == ranks}
        found |= do_all(mates) if ranks == 1 else run_ranks(do_all, ranks, mates)[0]
    return found


@dataclass(frozen=True)
class Exchanged:
    """By source, the loss of the step after its save; by mesh, those of this step after each source was loaded."""

    root: Path
    wanted: dict[str, float]
    found: dict[str, dict[str, float]]


def saves_of_all(root: Path) -> dict[str, Job]:
    return {mesh: (train_and_save, mesh, (str(root / mesh),)) for mesh in KINDS}


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Exchanged:
    """A checkpoint of each strategy after the same steps, what others made of it, and weights that went out and in."""
    root = tmp_path_factory.mktemp("saved")
    saves = saves_of_all(root)
    saves |= {f"tied-{mesh}": (train_and_save, mesh, (str(root / f"tied-{mesh}"), True)) for mesh in TIED}
    wanted = do_by_size(saves)
    export_checkpoint(open_one(str(root / "3d" / f"step-{STEPS:06d}")), str(root / "model.safetensors"))
    import_weights(str(root / "model.safetensors"), str(root / "imported"))
    loads: dict[str, Job] = {mesh: (load_all, mesh, (str(root), sources_of(mesh))) for mesh in KINDS}
    tied = [f"tied-{mesh}" for mesh in TIED]
    loads |= {f"tied-{mesh}": (load_all, mesh, (str(root), tied, True)) for mesh in ("pp", "fsdp_grad_op")}
    loads |= {f"again-{mesh}": (weights_of, mesh, (str(root / "imported"), str(root / f"again-{mesh}"))) for mesh in IN}
    return Exchanged(root, wanted, do_by_size(loads))


@pytest.fixture(scope="module")
def exchanged_by_all(tmp_path_factory: pytest.TempPathFactory) -> Exchanged:
    """What each strategy made of each checkpoint."""
    root = tmp_path_factory.mktemp("all")
    wanted = do_by_size(saves_of_all(root))
    loads: dict[str, Job] = {mesh: (load_all, mesh, (str(root), KINDS)) for mesh in KINDS}
    return Exchanged(root, wanted, do_by_size(loads))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return flatten(load(str(folder / f"step-{STEPS:06d}"), ranks=()).shared)[0]


@pytest.mark.parametrize("mesh", KINDS)
def test_every_strategy_loads_checkpoints_of_others(mesh: str, exchanged: Exchanged) -> None:
    assert_loaded(exchanged, mesh, mesh, sources_of(mesh))


@pytest.mark.soak
@pytest.mark.parametrize("mesh", KINDS)
def test_every_strategy_loads_checkpoints_of_every_other(mesh: str, exchanged_by_all: Exchanged) -> None:
    assert_loaded(exchanged_by_all, mesh, mesh, KINDS)


def test_exchange_pairs_cover_every_strategy() -> None:
    pairs = {(source, mesh) for mesh in KINDS for source in sources_of(mesh)}
    assert {source for source, mesh in pairs if mesh == "one"} == set(KINDS)
    assert {mesh for source, mesh in pairs if source == "one"} == {"one", "3d"}
    assert {mesh for source, mesh in pairs if "one" not in (source, mesh)} == {*KINDS} - {"one", "3d"}
    assert all(source != mesh for source, mesh in pairs if mesh != "one")


def assert_loaded(exchanged: Exchanged, name: str, mesh: str, sources: list[str]) -> None:
    assert list(exchanged.found[name]) == sources
    for source, loss in exchanged.found[name].items():
        before, after = tensors_of(exchanged.root / source), tensors_of(exchanged.root / f"{source}-{mesh}")
        assert before.keys() == after.keys()
        assert all(before[name].dtype == after[name].dtype for name in before)
        differing = [name for name in before if not torch.equal(before[name], after[name])]
        assert not differing, f"{source} -> {mesh}"
        assert loss == pytest.approx(exchanged.wanted[source], rel=1e-5), f"{source} -> {mesh}"


@pytest.mark.parametrize("mesh", ["pp", "fsdp_grad_op"])
def test_tied_weights_load_from_and_into_a_pipeline(mesh: str, exchanged: Exchanged) -> None:
    """Both of its ends hold them, and the optimizer's state for them."""
    assert_loaded(exchanged, f"tied-{mesh}", mesh, [f"tied-{source}" for source in TIED])


@pytest.mark.parametrize("mesh", IN)
def test_safetensors_export_and_import_keep_the_bytes(mesh: str, exchanged: Exchanged) -> None:
    trained = tensors_of(exchanged.root / "3d")
    model = make_model()
    model.load_state_dict(load_file(exchanged.root / "model.safetensors"))
    assert all(torch.equal(value, trained[f"model/{name}"]) for name, value in model.state_dict().items())
    again = load(str(exchanged.root / f"again-{mesh}" / "step-000000"), ranks=()).shared["model"]
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(value, trained[f"model/{name}"]) for name, value in again.items())
