"""What a rank learns from horovodrun's variables."""

from __future__ import annotations

import os

import pytest

from distributed.core.env import WorkerEnv, worker_env
from distributed.engines.horovod.env import horovod_driver, remember_world, take_out_elastic, take_place

TOLD = {
    "HOROVOD_HOSTNAME": "b",
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242",
}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.fixture(autouse=True)
def own_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(TOLD))


def test_horovodrun_rank_has_its_place_but_no_master_port() -> None:
    expected = WorkerEnv(3, 1, 4, 2, 1, 2, launcher="horovodrun")
    assert worker_env(TOLD) == expected
    assert expected.master_port == 0
    assert str(horovod_driver(TOLD)) == "10.0.0.1:4242"
    assert horovod_driver(TOLD).slot == "b:1"


def test_horovodrun_takes_precedence_over_slurm_and_mpi() -> None:
    for outer in (SLURM, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}):
        found = worker_env(TOLD | outer)
        assert found is not None
        assert found.launcher == "horovodrun"


def test_horovod_tuning_variables_make_no_world() -> None:
    assert worker_env({"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}) is None


def test_worker_env_follows_the_place_in_a_later_world() -> None:
    remember_world(WorkerEnv(nominal_ranks=4))
    assert take_place("0,3,0,1,0,3", attempt=2)
    found = worker_env()
    assert found == WorkerEnv(0, 0, 3, 1, 0, 3, launcher="horovodrun", attempt=2, restarts=2, nominal_ranks=4)


def test_process_without_a_new_place_keeps_its_old_rank() -> None:
    assert not take_place("-1,-1,-1,-1,-1,-1", attempt=1)
    found = worker_env()
    assert found is not None
    assert found.rank == 3


def test_malformed_driver_answer_is_refused() -> None:
    for answer in ("", "0,2", "0,2,0,1,0,x"):
        with pytest.raises(ValueError, match=r"invalid literal|shorter"):
            take_place(answer, attempt=1)


def test_horovod_elastic_variable_is_removed() -> None:
    assert not take_out_elastic()
    os.environ["HOROVOD_ELASTIC"] = "1"
    assert take_out_elastic()
    assert "HOROVOD_ELASTIC" not in os.environ
