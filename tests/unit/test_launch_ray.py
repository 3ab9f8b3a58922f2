"""What is asked of a Ray cluster, and who is blamed when ranks of its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from ray.experimental import internal_kv

from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import LaunchError
from distributed.core.protocol.failure import FailureRecord
from distributed.core.run_dir import AttemptDir, RunDir
from distributed.engines.ray import launcher as launch_ray
from distributed.engines.ray import process_owner as ray_host
from distributed.engines.ray.cluster import PlacementRequest, RayCluster, RayNode, shortage
from distributed.engines.ray.follow import Following
from distributed.engines.ray.launcher import RayLauncher, RayRun, placement_of
from distributed.engines.ray.process_owner import RayProcessOwner
from distributed.engines.ray.verdict import AttemptEnd, RayVerdict, RunGivenUpError
from distributed.engines.ray.worker import END_AT_ONCE, RankEndedError, RankOrder, become_rank
from distributed.launch.node.log_mirror import LogMirror
from distributed.launch.node.stop_signals import Stopped
from distributed.launch.request import LaunchRequest
from distributed.launch.supervise.policy import Fault
from distributed.launch.supervise.restart_limits import RestartLimits

TWO = RayCluster((RayNode("n1", 8, 2), RayNode("n2", 4, 4)))


def asked(**more: object) -> LaunchRequest:
    return LaunchRequest(("train.py",), "run", **({"ranks_per_node": 2} | more))  # type: ignore[arg-type]


def test_ranks_without_nodes_are_placed_anywhere() -> None:
    assert placement_of(asked(ranks_per_node=6), RestartLimits()) == PlacementRequest("cpu", 6, 6, 1, None)
    assert shortage(placement_of(asked(ranks_per_node=12), RestartLimits()), TWO) == []


def test_ray_nodes_are_requested_with_their_ranks() -> None:
    placement = placement_of(asked(num_nodes=2, ranks_per_node=4, device="cuda"), RestartLimits())
    assert (placement.fewest, placement.most, placement.per_node) == (8, 8, 4)
    [problem] = shortage(placement, TWO)
    assert problem.what == "2 nodes with 4 GPUs each are needed, and the Ray cluster has 1 such node"
    assert "n1 (8 CPUs, 2 GPUs)" in problem.why
    assert "num_gpus=6" in problem.do


def test_one_rank_per_node_uses_strict_spread() -> None:
    assert placement_of(asked(num_nodes=2, ranks_per_node=1), RestartLimits()).strategy == "STRICT_SPREAD"
    assert placement_of(asked(num_nodes=2, ranks_per_node=2), RestartLimits()).strategy == "PACK"


def test_cluster_must_fit_only_the_minimum_ranks() -> None:
    placement = placement_of(asked(num_nodes=2, min_nodes=1, max_nodes=4, ranks_per_node=4), RestartLimits())
    assert (placement.fewest, placement.most) == (4, 16)
    assert shortage(placement, TWO) == []
    few = placement_of(asked(ranks_per_node=20), RestartLimits(min_gpus=3))
    assert (few.fewest, few.most) == (3, 20)
    assert shortage(few, TWO) == []


def test_autoscaler_maximum_counts_as_capacity() -> None:
    grows = RayCluster(TWO.nodes, grows_to={"CPU": 64.0})
    assert shortage(placement_of(asked(ranks_per_node=32), RestartLimits()), grows) == []
    assert shortage(placement_of(asked(ranks_per_node=65), RestartLimits()), grows) != []


def test_dry_run_describes_the_ray_placement() -> None:
    request = asked(num_nodes=4, ranks_per_node=8, device="cuda", address="auto")
    request = replace(request, threads_per_rank=4, env={"LEVEL": "a b", "HF_TOKEN": "hf_123"})
    rendered = RayLauncher().render(request, RestartLimits())
    assert rendered.notes == (
        "run directory run",
        "32 ranks on the Ray cluster at auto, with 1 CPU and 1 GPU each, placed by PACK",
    )
    assert rendered.commands == ("[each rank] OMP_NUM_THREADS=4 LEVEL='a b' HF_TOKEN='***' python train.py",)


def test_node_without_the_script_names_file_and_host(tmp_path: Path) -> None:
    order = RankOrder("x", ("train.py",), str(tmp_path), str(tmp_path), 0, 2)
    with pytest.raises(LaunchError) as refused:
        become_rank(asdict(order))
    assert str(tmp_path / "train.py") in str(refused.value)
    assert socket.gethostname() in str(refused.value)


def test_worker_env_knows_ray_as_the_launcher() -> None:
    env = WorkerEnv(rank=1, world_size=2, master_port=1, run_dir="run").to_environ()
    found = worker_env(env | {"DISTRIBUTED_LAUNCHER": "ray"})
    assert found is not None
    assert (found.launcher, found.is_followed) == ("ray", True)


def failed(folder: AttemptDir, rank: int, message: str, *, collateral: bool = False, exit_code: int = 1) -> None:
    record = FailureRecord(rank, "n1", 1, 10.0 + rank, "RuntimeError", message, "Traceback", exit_code, collateral)
    record.write(folder.failure(rank))


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return placed(tmp_path, 0)


def placed(run_dir: Path, attempt: int) -> AttemptDir:
    """The folder of an attempt of three ranks."""
    folder = RunDir(run_dir).attempt(attempt)
    folder.path.mkdir(parents=True)
    for rank in range(3):
        folder.place(rank).write_text(json.dumps({"host": f"n{rank}", "world_size": 3}))
    return folder


def blamed(attempt: AttemptDir, exceptions: dict[int, Exception]) -> AttemptEnd:
    return RayVerdict("x", str(attempt.path.parent.parent), None, 0)._blame(attempt, exceptions)


def test_rank_with_its_own_error_is_blamed_before_collateral(attempt: AttemptDir) -> None:
    failed(attempt, 0, "Connection closed by peer", collateral=True)
    failed(attempt, 2, "shapes differ")
    end = blamed(attempt, {0: RankEndedError(0, 1), 2: RankEndedError(2, 1)})
    assert (end.fault.kind, end.fault.rank) == ("code", 2)
    assert end.record is not None


def test_worker_lost_by_ray_is_a_machine_fault(attempt: AttemptDir) -> None:
    failed(attempt, 0, "Connection closed by peer", collateral=True)
    end = blamed(attempt, {0: RankEndedError(0, 1), 1: RuntimeError("actor died")})
    assert (end.fault.kind, end.fault.rank, end.fault.host) == ("machine", 1, "n1")


def test_silent_rank_is_blamed_when_all_others_lost_connection(attempt: AttemptDir) -> None:
    failed(attempt, 0, "Connection closed by peer", collateral=True)
    failed(attempt, 1, "Connection closed by peer", collateral=True)
    end = blamed(attempt, {0: RankEndedError(0, 1)})
    assert (end.fault.kind, end.fault.rank, end.fault.host) == ("machine", 2, "n2")


def test_error_before_a_rank_has_a_log_is_reported(attempt: AttemptDir) -> None:
    end = blamed(attempt, {1: LaunchError("node n1 does not see the script", do="mount it")})
    assert (end.fault.kind, end.fault.exit_code) == ("code", 3)
    assert "does not see the script" in end.fault.message


def test_attempt_end_is_read_back_as_written(attempt: AttemptDir) -> None:
    failed(attempt, 2, "shapes differ")
    end = blamed(attempt, {2: RankEndedError(2, 1)})
    end.write(attempt)
    assert AttemptEnd.read(attempt) == end
    assert AttemptEnd.read(RunDir(attempt.path.parent.parent).attempt(1)) is None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What Ray keeps for whoever asks, here without a cluster."""
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: kept.get(key))
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda key, value, namespace: kept.update({key: value}))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda prefix, del_by_prefix, namespace: kept.clear())
    return kept


def world_fails(verdict: RayVerdict, text: str = "actor died") -> None:
    """Workers that Ray starts end before there is a rank, and it asks about them twice."""
    verdict.before_worker_group_start(None)
    for _ in range(2):
        verdict.after_worker_group_poll_status(SimpleNamespace(errors={1: RuntimeError(text)}))


def test_worlds_that_fail_without_ranks_use_up_restarts(
    tmp_path: Path, store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.engines.ray.verdict._GRACE_S", 0.0)
    before = placed(tmp_path, 3)  # of an earlier launch
    verdict = RayVerdict("x", str(tmp_path), 2, first_attempt=4)
    world_fails(verdict)
    world_fails(verdict)
    with pytest.raises(RunGivenUpError, match="3 faults in a row"):
        world_fails(verdict)
    ends = [AttemptEnd.read(RunDir(tmp_path).attempt(number)) for number in (4, 5, 6)]
    assert [end is not None and bool(end.given_up) for end in ends] == [False, False, True]
    assert AttemptEnd.read(before) is None


def test_attempt_after_one_without_ranks_is_followed(tmp_path: Path) -> None:
    placed(tmp_path, 0)
    following = Following(str(tmp_path), 1, LogMirror(None), PlacementRequest("cpu", 3, 3))
    died = Fault("machine", 1, "", -1, "its process is gone")
    AttemptEnd(died).write(RunDir(tmp_path).attempt(1))
    following.look()
    assert not following.has_ranks
    (tmp_path / "attempts" / "2").mkdir()  # one that left no word at all
    placed(tmp_path, 3)
    following.look()
    assert following.has_ranks
    following.close("done")
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event.get("attempt")) for event in told][:1] == [("AttemptEnded", 1)]


def test_run_given_up_before_new_ranks_reports_the_fault(tmp_path: Path) -> None:
    AttemptEnd(Fault("code", 0, "", 5, "an error of another launch"), given_up="over").write(placed(tmp_path, 0))
    following = Following(str(tmp_path), 1, LogMirror(None), PlacementRequest("cpu", 3, 3))
    assert following.failure() is None
    AttemptEnd(Fault("machine", 1, "n1", 5, "lost")).write(placed(tmp_path, 1))
    following.look()
    AttemptEnd(Fault("machine", 2, "", 5, "gone"), given_up="2 faults in a row").write(RunDir(tmp_path).attempt(2))
    failure = following.failure()
    assert failure is not None
    assert (failure.rank, "gone" in str(failure)) == (2, True)


class Deaf:
    """In place of Ray's trainer: ranks that are asked to stop by Ctrl-C and do not, until they are ended."""

    def __init__(self, store: dict[str, bytes]) -> None:
        self.store, self.heard, self.name = store, "", ""

    def __call__(self, *arguments: Any, run_config: Any, **more: Any) -> Deaf:
        self.name = run_config.name
        return self

    def fit(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 60
        while str(END_AT_ONCE).encode() not in self.store.values():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.heard = "the end"
        raise RuntimeError("the workers died")


def test_ranks_that_do_not_stop_within_grace_are_ended(
    attempt: AttemptDir, store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = attempt.path.parent.parent
    (run_dir / "launch.json").write_text('{"id": "an earlier launch"}')
    ranks = Deaf(store)
    monkeypatch.setattr(launch_ray, "DataParallelTrainer", ranks)
    request = LaunchRequest(("train.py",), str(run_dir), 3)
    limits = RestartLimits(interrupt_grace_s=0.2)
    with pytest.raises(Stopped):
        RayRun(request, limits, placement_of(request, limits), cluster=TWO, mirror=LogMirror(None), on_stop=None).wait()
    assert ranks.heard == "the end"
    assert store == {}
    launch = json.loads((run_dir / "launch.json").read_text())["id"]
    assert launch != "an earlier launch"
    assert ranks.name == f"launch-0-{launch[:8]}"


Told = list[tuple[dict[str, float], str]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What Ray is told, by ranks that are none of its workers."""
    reports: Told = []

    def report(metrics: dict[str, float], checkpoint: Any = None, **how: Any) -> None:
        reports.append((metrics, checkpoint.path if checkpoint is not None else ""))

    storage = SimpleNamespace(experiment_fs_path=str(tmp_path / "of_ray"))
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_storage=lambda: storage))
    monkeypatch.setattr(ray.train, "report", report)
    return reports


def saved(tmp_path: Path, name: str) -> str:
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    return str(tmp_path / "checkpoints" / name)


def warnings(run_dir: Path) -> list[str]:
    path = run_dir / "events.jsonl"
    return [json.loads(line)["message"] for line in path.read_text().splitlines()] if path.exists() else []


def test_checkpoint_is_reported_to_ray_once(tmp_path: Path, told: Told) -> None:
    host = RayProcessOwner(WorkerEnv(run_dir=str(tmp_path)))
    first = saved(tmp_path, "step-4")
    for path in (first, "", first):
        host.report({"step": 4}, path)
    host.close()
    assert [path for _, path in told] == [str(tmp_path / "of_ray" / "step-4"), "", ""]
    assert warnings(tmp_path) == []


def test_checkpoint_unreportable_to_ray_only_warns(tmp_path: Path, told: Told) -> None:
    (tmp_path / "of_ray").mkdir()
    (tmp_path / "of_ray" / "step-4").write_text("in the way")
    host = RayProcessOwner(WorkerEnv(run_dir=str(tmp_path)))
    host.report({"step": 4}, saved(tmp_path, "step-4"))
    host.report({"step": 8}, saved(tmp_path, "step-8"))
    host.close()
    assert told == [({"step": 4}, ""), ({"step": 8}, str(tmp_path / "of_ray" / "step-8"))]
    [message] = warnings(tmp_path)
    assert "step-4 could not be shown to Ray: FileExistsError" in message


def test_report_not_taken_by_ray_warns_after_a_timeout(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait: Callable[..., None] = lambda *arguments, **how: time.sleep(600)  # noqa: E731
    monkeypatch.setattr(ray.train, "report", wait)
    monkeypatch.setattr(ray_host, "_REPORT_S", 0.2)
    host = RayProcessOwner(WorkerEnv(run_dir=str(tmp_path)))
    host.report({"step": 4}, "")
    host.close()
    [message] = warnings(tmp_path)
    assert "the report of step 4 was not taken" in message
