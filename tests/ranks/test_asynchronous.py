"""A parameter server on real ranks: the same as dense training without staleness, and within the bound with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.comm.parameter_server.server import ServerSide
from distributed.comm.parameter_server.worker import WorkerSide
from distributed.core.errors import RankFailedError, TaskError
from distributed.data.checks.ledger import check_ledgers
from distributed.testing import run_ranks
from tests.ranks.test_compression import Straight, digits, straight_data, weighted_step
from tests.ranks.test_equivalence import CASES, dtype_of, make_model, train_by_hand, train_with_ranks

RANKS, BOUND, SAMPLES = 3, 2, 96
STILL_AT = 9  # the step, counted from 0: until the 16th, ranks do not meet to compare what they hold
LONG_S = 1.0  # for which a rank stands still: the others come to the bound in a small part of it
ASYNCHRONOUS: dict[str, Any] = {"synchronization": "asynchronous", "max_staleness": BOUND}
ASKED = "synchronization='asynchronous'"
OTHERWISE = ("batchnorm", "batchnorm_accumulation", "fp16", "fp16_clipping")  # which it refuses


def numbers(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(samples, 8, generator=generator), torch.randn(samples, 3, generator=generator))


class Unsteady(nn.Module):
    """Stands still in one step of one rank, leaves a layer out in some batches, and makes NaN where it is told to."""

    def __init__(self, *, rank: int = -1, step: int = -1, nan: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.seldom = nn.Linear(8, 3), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.place, self.nan, self.calls = (rank, step), nan, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        is_here = dist.is_initialized() and (dist.get_rank(), self.calls) == self.place and self.training
        if is_here and not self.nan:
            time.sleep(LONG_S)
        found: torch.Tensor = self.one(x) * self.frozen
        found = found + self.seldom(x) if x[:, 0].sum() > 0 else found
        return found * float("nan") if is_here and self.nan else found


def fit(model: nn.Module, folder: str, data: Any = None, *, batch: int = 12, ranks: int = RANKS, **more: Any) -> Any:
    options = {"loss_fn": nn.MSELoss(), "optimizer": "adamw", "learning_rate": 0.01, "lr_schedule": "cosine"}
    options |= {"epochs": 2, "progress": False, "sample_ledger": True, "run_dir": folder, "log_every_n_steps": 50}
    trainer = Trainer(model, batch_size=batch // ranks, **options | more)
    return trainer.fit(data or numbers())


def record_steps() -> list[tuple[int, int]]:
    """Of this rank: each step that it sends gradients of, and at which parameters it computed them."""
    found: list[tuple[int, int]] = []
    push = WorkerSide.push

    def recorded(self: WorkerSide, step: int, *rest: Any) -> None:
        found.append((step, self.version))
        push(self, step, *rest)

    WorkerSide.push = recorded  # type: ignore[method-assign]  # of this process, which ends with the test
    return found


def record_updates() -> list[tuple[int, int, int]]:
    """On the server: the step, the rank and the version of each gradient that it has stepped by."""
    found: list[tuple[int, int, int]] = []
    take = ServerSide.take

    def recorded(self: ServerSide, rank: int, step: int) -> Any:
        given = take(self, rank, step)
        found.append((step, rank, int(given[0][1])))
        return given

    ServerSide.take = recorded  # type: ignore[method-assign]
    return found


def stand_still(folder: str, rank: int) -> dict[str, Any]:
    steps, updates = record_steps(), record_updates()
    history = fit(Unsteady(rank=rank, step=STILL_AT + 1), f"{folder}/still-{rank}", **ASYNCHRONOUS)
    return {"steps": list(steps), "updates": list(updates), "taken": history.steps}


def fail(folder: str) -> None:
    fit(Unsteady(rank=1, step=4, nan=True), f"{folder}/nan", **ASYNCHRONOUS)


class Shortened(nn.Module):
    """Shortens the rows that a whole batch looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 3, max_norm=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(x.argmax(1))
        return found


def refused(folder: str) -> str:
    """Every rank raises in its first step, before it sends or takes what the others wait for."""
    with pytest.raises(TaskError) as told:
        fit(Shortened(), f"{folder}/shortened", **ASYNCHRONOUS)
    return str(told.value)


def learn(folder: str, **more: Any) -> float:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    options = {"loss_fn": nn.CrossEntropyLoss(), "epochs": 6, "log_every_n_steps": 20, "lr_schedule": "constant"}
    fit(model, folder, digits(), batch=48, **options | more)
    x, y = digits().tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def run_all(folder: str) -> dict[str, Any]:
    in_step = ASYNCHRONOUS | {"max_staleness": 0}
    found: dict[str, Any] = {
        name: train_with_ranks(case, RANKS, f"{folder}/{name}", **in_step)
        for name, case in CASES.items()
        if name not in OTHERWISE
    }
    for key, how in (("dense", {"find_unused_parameters": True}), ("in step", in_step), ("apart", ASYNCHRONOUS)):
        model = Unsteady()
        history = fit(model, f"{folder}/{key}", **how)
        found[key] = model.state_dict(), history.epochs[-1].metrics, history.checkpoint
    weighted = {"loss_fn": None, "training_step": weighted_step}
    found["weighted"] = [
        fit(Straight(), f"{folder}/weighted-{n}", straight_data(), **weighted | how).epochs[-1].metrics["loss"]
        for n, how in enumerate(({}, in_step))
    ]
    found["refused"] = refused(folder)  # the runs after it are in the same process group
    found["learnt"] = [learn(f"{folder}/learnt-{n}", **how) for n, how in enumerate(({}, ASYNCHRONOUS))]
    found["still"] = [stand_still(folder, rank) for rank in (1, 0)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asynchronous")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS, str(folder))


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHERWISE])
def test_no_staleness_is_one_process(name: str, found: list[dict[str, Any]]) -> None:
    case = CASES[name]
    expected, start = train_by_hand(case), make_model(case.model, dtype_of(case)).state_dict()
    assert any(not torch.equal(start[key], expected[key]) for key in start), "the reference did not train at all"
    for of_rank in found:
        torch.testing.assert_close(of_rank[name], expected, rtol=case.tolerance, atol=case.tolerance)


def test_no_staleness_is_dense_training_with_layers_left_out(found: list[dict[str, Any]]) -> None:
    (dense, numbers_of_dense, _), (weights, measured, _) = found[0]["dense"], found[0]["in step"]
    torch.testing.assert_close(weights, dense, rtol=1e-6, atol=1e-6)
    assert measured["loss"] == pytest.approx(numbers_of_dense["loss"], rel=1e-6)
    assert measured["staleness"] == 0


def test_mean_over_what_a_step_counts_is_that_of_all_ranks(found: list[dict[str, Any]]) -> None:
    dense, in_step = found[0]["weighted"]
    assert in_step == pytest.approx(dense, rel=1e-6)


def test_all_ranks_end_with_the_servers_bytes(found: list[dict[str, Any]]) -> None:
    for of_rank in found[1:]:
        for key, value in found[0]["apart"][0].items():
            assert torch.equal(of_rank["apart"][0][key], value)


def test_no_gradient_lacks_more_updates_than_the_bound(found: list[dict[str, Any]]) -> None:
    for case in (0, 1):
        updates = found[0]["still"][case]["updates"]
        steps = found[0]["still"][case]["taken"]
        assert [(step, rank) for step, rank, _ in updates] == [(s, r) for s in range(steps) for r in (1, 2)]
        lacked = [step - version for step, _, version in updates]
        assert min(lacked) >= 0
        assert max(lacked) == BOUND, "nobody ran ahead while one rank stood still"


def test_others_go_on_to_the_bound_while_one_stands_still(found: list[dict[str, Any]]) -> None:
    """Where rank 1, a worker, stands still, and where rank 0 does, the server."""
    for case in (0, 1):
        steps = found[2]["still"][case]["steps"]
        assert (STILL_AT + BOUND, STILL_AT) in steps, "it waited before the bound"
        assert all(step - version <= BOUND for step, version in steps)


def test_stale_gradients_learn_as_dense_ones(found: list[dict[str, Any]]) -> None:
    dense, apart = found[0]["learnt"]
    assert dense < 0.5, "the task was not learnt at all"
    assert apart < 1.5 * dense


def test_every_sample_counts_once(found: list[dict[str, Any]], folder: Path) -> None:
    for name in ("apart", "still-0", "still-1"):
        assert check_ledgers(folder / name / "ledger", SAMPLES).is_exact


def test_functions_of_the_whole_batch_are_refused(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "embedding_renorm_" in of_rank["refused"]
        assert ASKED in of_rank["refused"]


def test_nan_of_a_worker_names_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as failed:
        run_ranks(fail, RANKS, str(tmp_path))
    assert "rank 1" in str(failed.value)
    assert "NonFiniteLossError" in str(failed.value)
