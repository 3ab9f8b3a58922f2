"""More ranks than GPUs: what it is called, what each rank finds in its environment, and who says so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from distributed.cli.doctor import _machine
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import PlanError
from distributed.core.plan import Plan
from distributed.engines.ray.plan import problems_of
from distributed.launch.local import LocalLauncher
from distributed.launch.request import LaunchRequest, NodePlace, ProcessSpec
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.session import Session
from tests.conftest import cli

PLAIN = """
import json, os
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME")
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump({name: os.environ.get(name) for name in names}, file)
"""


def ranks_on(
    gpus: int, *, shares_gpus: bool = True, attempt: int = 0, place: NodePlace | None = None
) -> list[ProcessSpec]:
    request = LaunchRequest(
        ("train.py",), "runs/1", 4, device="cuda", shares_gpus=shares_gpus, gpus=gpus, attempt=attempt
    )
    return LocalLauncher(environ={}).node_processes(request, NodePlace.alone(request, 29500)).processes


def gpus(count: int) -> Hardware:
    return Hardware(gpus=(Gpu("A", 2**36, 9.0),) * count, cpu_cores=8)


def planned(hardware: Hardware, world: WorkerEnv | None = None, **settings: object) -> Plan:
    config = DistributedConfig(share_gpus=True, batch_size=4, **settings)
    return make_plan(config, JobProfile(), hardware, run_dir="x", world=world)


@pytest.mark.parametrize(("there", "local_ranks"), [(1, ["0", "0", "0", "0"]), (2, ["0", "1", "0", "1"])])
def test_each_sharing_rank_has_its_own_nccl_host_id(there: int, local_ranks: list[str]) -> None:
    found = [process.env for process in ranks_on(there)]
    assert len({env["NCCL_HOSTID"] for env in found}) == 4
    assert {env["NCCL_SOCKET_IFNAME"] for env in found} == {"lo"}
    assert [env["LOCAL_RANK"] for env in found] == local_ranks
    assert {env["LOCAL_WORLD_SIZE"] for env in found} == {str(there)}


def test_sharing_ranks_keep_their_local_rank_in_worker_env() -> None:
    places = [worker_env(process.env) for process in ranks_on(1)]
    assert [(place.local_rank, place.local_world_size) for place in places if place] == [(n, 4) for n in range(4)]


def test_nccl_host_ids_are_new_in_the_next_attempt() -> None:
    before = {process.env["NCCL_HOSTID"] for process in ranks_on(1)}
    assert before.isdisjoint(process.env["NCCL_HOSTID"] for process in ranks_on(1, attempt=1))


def test_ranks_with_a_gpu_each_get_no_sharing_variables() -> None:
    found = [process.env for process in ranks_on(4, shares_gpus=False)]
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1", "2", "3"]
    assert not any("NCCL_HOSTID" in env or "DISTRIBUTED_LOCAL_PLACE" in env for env in found)


def test_gpu_sharing_is_a_decision_with_its_purpose() -> None:
    plan = planned(gpus(1), num_gpus=4)
    assert plan.shares_gpus
    (said,) = [str(decision) for decision in plan.decisions if "share" in str(decision)]
    assert "4 ranks share 1 GPU" in said
    assert "not for speed" in said


@pytest.mark.parametrize(("there", "asked"), [(0, {"num_gpus": 2}), (2, {"num_gpus": 2}), (2, {"device": "cpu"})])
def test_share_gpus_without_effect_is_reported(there: int, asked: dict[str, object]) -> None:
    plan = planned(gpus(there), **asked)
    assert not plan.shares_gpus
    assert [d.choice for d in plan.decisions if "share_gpus" in d.choice] == ["share_gpus has no effect"]


def test_ranks_of_torchrun_share_gpus_too() -> None:
    world = WorkerEnv(world_size=4, local_world_size=4, master_port=1, launcher="torchrun")
    plan = planned(gpus(1), world)
    assert plan.shares_gpus
    assert [d.choice for d in plan.decisions if "share" in d.choice] == ["4 ranks share 1 GPU"]


def test_share_gpus_without_any_gpu_is_refused() -> None:
    with pytest.raises(PlanError, match="2 GPUs asked for on this node, but it has 0"):
        planned(gpus(0), num_gpus=2, device="cuda")


def test_too_many_ranks_error_suggests_share_gpus_if_supported() -> None:
    with pytest.raises(PlanError, match="--share-gpus"):
        make_plan(DistributedConfig(num_gpus=4, batch_size=4), JobProfile(), gpus(1), run_dir="x")
    with pytest.raises(PlanError) as refused:
        make_plan(DistributedConfig(num_gpus=4, batch_size=4, backend="tensorflow"), JobProfile(), gpus(1), run_dir="x")
    assert "share" not in str(refused.value)


def test_engines_without_gpu_sharing_refuse_it() -> None:
    with pytest.raises(PlanError, match="share_gpus is set, but would have no effect"):
        planned(gpus(1), num_gpus=1, backend="tensorflow")
    (problem,) = problems_of(DistributedConfig(share_gpus=True, backend="ray").merged({}, ""))
    assert "share_gpus" in problem.what


def test_error_without_any_gpu_does_not_suggest_sharing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(PlanError, match="this process sees 0") as refused:
        Session.open(WorkerEnv(), device="cuda", collectives="nccl", timeout_s=1, shares_gpus=True)
    assert "share_gpus" not in str(refused.value)


@pytest.fixture
def one_gpu(tmp_path: Path) -> dict[str, str]:
    """An environment whose nvidia-smi shows a GPU."""
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho GPU-1, NVIDIA A, 81920, 9.0\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


def test_plain_script_gets_the_gpu_sharing_environment(tmp_path: Path, one_gpu: dict[str, str]) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    done = cli(tmp_path, "train", "--script", "plain.py", "--num-gpus", "2", "--share-gpus", **one_gpu)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not for speed") == 1
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"], one["NCCL_SOCKET_IFNAME"]) for one in found] == [
        ("0", "1", "lo")
    ] * 2
    assert found[0]["NCCL_HOSTID"] != found[1]["NCCL_HOSTID"]


def test_cli_error_suggests_share_gpus(tmp_path: Path, one_gpu: dict[str, str]) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    refused = cli(tmp_path, "train", "--script", "plain.py", "--num-gpus", "2", **one_gpu)
    assert refused.returncode != 0
    assert "--share-gpus" in refused.stderr


def test_doctor_suggests_share_gpus_only_with_a_gpu() -> None:
    assert any("--share-gpus" in finding.value for finding in _machine(gpus(1)))
    assert not any("--share-gpus" in finding.value for finding in _machine(gpus(0)))
