"""Horovod's ranks do not wait for ever: for one that is late, or for one that has failed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import DistributedError, Trainer
from distributed.core.env import worker_env
from distributed.core.registry import is_installed
from distributed.testing import run_ranks

pytestmark = pytest.mark.skipif(not is_installed("horovod.torch"), reason="Horovod is not built: make horovod")

TIMEOUT_S, PATIENCE_S = 3.0, 60.0


def fit(run_dir: str, in_second_step: Callable[[int], object] = lambda rank: None, **settings: Any) -> str:
    """Trains four steps; what a rank fails with, or ""."""
    model, passes = nn.Linear(4, 2), []

    def forward(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 3:  # the first two steps meet the others in forward too
            in_second_step(worker_env().rank)

    model.register_forward_pre_hook(forward)
    torch.manual_seed(0)  # the same data on every rank
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    trainer = Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        backend="horovod",
        batch_size=4,
        progress=False,
        run_dir=run_dir,
        **settings,
    )
    try:
        trainer.fit(DataLoader(data), max_steps=4)
    except (RuntimeError, DistributedError) as failed:
        return f"{type(failed).__name__}: {failed}"
    return ""


def wait_for(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.exists()


def late(folder: str) -> str:
    """Rank 1 comes when rank 0 has given up."""
    sign = Path(folder, "gave-up")
    told = fit(
        f"{folder}/late", lambda rank: rank == 0 or wait_for(sign) or os._exit(1), collective_timeout_s=TIMEOUT_S
    )
    sign.touch()
    return told


def fail(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("of the model's own")


def gone(folder: str) -> str:
    """Rank 1 has failed when rank 0 comes to send."""
    sign = Path(folder, "gone")
    told = fit(f"{folder}/gone", lambda rank: fail(rank) if rank == 1 else wait_for(sign))
    sign.touch()
    return told


def failing(folder: str) -> tuple[str, bool]:
    """Rank 1 fails, and its script goes on; whether rank 0 noticed by then."""
    sign = Path(folder, "noticed")
    told = fit(f"{folder}/failing", fail)
    if worker_env().rank == 0:
        sign.touch()
    return told, wait_for(sign)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("horovod"))

    def all_of_it() -> dict[str, Any]:
        found: dict[str, Any] = {"late": late(folder), "after": fit(f"{folder}/after"), "gone": gone(folder)}
        os.environ["HOROVOD_CYCLE_TIME"] = "2"  # as horovodrun --cycle-time-ms 2 sets it
        found["tuned"] = [fit(f"{folder}/tuned-{number}") for number in range(3)]
        found["failing"] = failing(folder)
        found["again"] = fit(f"{folder}/again")
        return found

    return run_ranks(all_of_it, 2)


def test_late_rank_ends_the_wait_at_collective_timeout(found: list[dict[str, Any]]) -> None:
    told = found[0]["late"]
    assert told.startswith("CollectiveError"), told
    assert "'gradients'" in told
    assert "for 3 s (collective_timeout_s)" in told
    assert "Error" in found[1]["late"]  # it cannot go on alone


def test_next_fit_after_failure_initialises_horovod_again(found: list[dict[str, Any]]) -> None:
    assert [rank["after"] for rank in found] == ["", ""]


def test_horovod_environment_variables_apply_to_every_fit(found: list[dict[str, Any]]) -> None:
    assert [rank["tuned"] for rank in found] == [["", "", ""]] * 2


def test_failed_rank_ends_peers_wait_while_its_process_lives(found: list[dict[str, Any]]) -> None:
    assert "of the model's own" in found[1]["failing"][0]
    assert found[1]["failing"][1], "rank 0 waited until the process of rank 1 had ended"
    assert found[0]["failing"][0].startswith("CollectiveError")


def test_collective_after_peer_failure_error_names_the_gradient(
    found: list[dict[str, Any]],
) -> None:
    assert "of the model's own" in found[1]["gone"]
    assert found[0]["gone"].startswith("CollectiveError: [r0] in the collective 'gradient.")


def test_horovod_with_cycle_time_refuses_to_initialise_again(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "cannot begin again" in rank["again"]
        assert "HOROVOD_CYCLE_TIME" in rank["again"]
