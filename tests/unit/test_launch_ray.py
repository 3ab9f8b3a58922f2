"""What is asked of a Ray cluster, and who is blamed when ranks of its end."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import LaunchError
from distributed.core.failure import FailureRecord, failure_path
from distributed.core.ray_run import place_name
from distributed.launch.ray import RayLauncher, wish_of
from distributed.launch.ray_cluster import RayCluster, RayNode, Wish, shortage
from distributed.launch.ray_rank import RankEndedError, RankOrder, become_rank
from distributed.launch.ray_verdict import AttemptEnd, Verdict
from distributed.launch.request import LaunchRequest
from distributed.launch.supervisor import Patience

TWO = RayCluster((RayNode("n1", 8, 2), RayNode("n2", 4, 4)))


def asked(**more: object) -> LaunchRequest:
    return LaunchRequest(("train.py",), "run", **({"ranks_per_node": 2} | more))  # type: ignore[arg-type]


def test_ranks_without_nodes_are_placed_anywhere() -> None:
    assert wish_of(asked(ranks_per_node=6), Patience()) == Wish("cpu", 6, 6, 1, None)
    assert shortage(wish_of(asked(ranks_per_node=12), Patience()), TWO) == []


def test_nodes_are_asked_for_with_their_ranks() -> None:
    wish = wish_of(asked(num_nodes=2, ranks_per_node=4, device="cuda"), Patience())
    assert (wish.fewest, wish.most, wish.per_node) == (8, 8, 4)
    [problem] = shortage(wish, TWO)
    assert problem.what == "2 nodes with 4 GPUs each asked for, and the Ray cluster has 1 such node"
    assert "n1 (8 CPUs, 2 GPUs)" in problem.why
    assert "num_gpus=6" in problem.do


def test_one_rank_a_node_is_on_different_nodes() -> None:
    assert wish_of(asked(num_nodes=2, ranks_per_node=1), Patience()).strategy == "STRICT_SPREAD"
    assert wish_of(asked(num_nodes=2, ranks_per_node=2), Patience()).strategy == "PACK"


def test_only_the_fewest_ranks_must_have_a_place() -> None:
    wish = wish_of(asked(num_nodes=2, min_nodes=1, max_nodes=4, ranks_per_node=4), Patience())
    assert (wish.fewest, wish.most) == (4, 16)
    assert shortage(wish, TWO) == []
    few = wish_of(asked(ranks_per_node=20), Patience(min_gpus=3))
    assert (few.fewest, few.most) == (3, 20)
    assert shortage(few, TWO) == []


def test_what_an_autoscaler_can_bring_counts() -> None:
    grows = RayCluster(TWO.nodes, grows_to={"CPU": 64.0})
    assert shortage(wish_of(asked(ranks_per_node=32), Patience()), grows) == []
    assert shortage(wish_of(asked(ranks_per_node=65), Patience()), grows) != []


def test_what_would_be_placed_is_described() -> None:
    request = asked(num_nodes=4, ranks_per_node=8, device="cuda", address="auto")
    text = RayLauncher().describe(request, Patience())
    assert "32 ranks on the Ray cluster at auto, with 1 CPU and 1 GPU each" in text
    assert "distributed.launch.rank train.py" in text


def test_a_node_that_does_not_see_the_files_says_which_and_who_it_is(tmp_path: Path) -> None:
    order = RankOrder("x", ("train.py",), str(tmp_path), str(tmp_path), 0, 2, "cpu", None)
    with pytest.raises(LaunchError) as refused:
        become_rank(asdict(order))
    assert str(tmp_path / "train.py") in str(refused.value)
    assert socket.gethostname() in str(refused.value)


def test_a_rank_knows_that_ray_started_it() -> None:
    env = WorkerEnv(rank=1, world_size=2, master_port=1, run_dir="run").to_environ()
    found = worker_env(env | {"DISTRIBUTED_LAUNCHER": "ray"})
    assert found is not None
    assert (found.launcher, found.is_followed) == ("ray", True)


def failed(folder: Path, rank: int, message: str, *, collateral: bool = False, exit_code: int = 1) -> None:
    record = FailureRecord(rank, "n1", 1, 10.0 + rank, "RuntimeError", message, "Traceback", exit_code, collateral)
    record.write(failure_path(folder, rank))


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    folder = tmp_path / "attempts" / "0"
    folder.mkdir(parents=True)
    for rank in range(3):
        (folder / place_name(rank)).write_text(json.dumps({"host": f"n{rank}", "world_size": 3}))
    return folder


def blamed(attempt: Path, exceptions: dict[int, Exception]) -> AttemptEnd:
    return Verdict("x", str(attempt.parent.parent), None)._blame(attempt, exceptions)


def test_a_rank_that_failed_of_itself_is_blamed_before_those_that_lost_it(attempt: Path) -> None:
    failed(attempt, 0, "Connection closed by peer", collateral=True)
    failed(attempt, 2, "shapes differ")
    end = blamed(attempt, {0: RankEndedError(0, 1), 2: RankEndedError(2, 1)})
    assert (end.fault.kind, end.fault.rank) == ("code", 2)
    assert end.record is not None


def test_a_worker_that_ray_lost_is_a_machine_s_fault(attempt: Path) -> None:
    failed(attempt, 0, "Connection closed by peer", collateral=True)
    end = blamed(attempt, {0: RankEndedError(0, 1), 1: RuntimeError("actor died")})
    assert (end.fault.kind, end.fault.rank, end.fault.host) == ("machine", 1, "n1")


def test_where_all_others_lost_their_connection_the_silent_one_is_gone(attempt: Path) -> None:
    failed(attempt, 0, "Connection closed by peer", collateral=True)
    failed(attempt, 1, "Connection closed by peer", collateral=True)
    end = blamed(attempt, {0: RankEndedError(0, 1)})
    assert (end.fault.kind, end.fault.rank, end.fault.host) == ("machine", 2, "n2")


def test_an_error_before_a_rank_has_a_log_is_told(attempt: Path) -> None:
    end = blamed(attempt, {1: LaunchError("node n1 does not see the script", do="mount it")})
    assert (end.fault.kind, end.fault.exit_code) == ("code", 3)
    assert "does not see the script" in end.fault.message


def test_the_end_of_an_attempt_is_read_as_it_was_written(attempt: Path) -> None:
    failed(attempt, 2, "shapes differ")
    end = blamed(attempt, {2: RankEndedError(2, 1)})
    end.write(attempt)
    assert AttemptEnd.read(attempt) == end
    assert AttemptEnd.read(attempt.with_name("1")) is None
