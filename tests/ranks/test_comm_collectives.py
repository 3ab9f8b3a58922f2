"""The public collectives: what each returns on every rank, and errors that name ranks which are missing or differ."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import comm
from distributed.core.env import worker_env
from distributed.core.errors import DistributedError, MismatchError
from distributed.core.protocol.heartbeat import read_beat
from distributed.core.run_dir import AttemptDir
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session
from distributed.runtime.world import CollectiveError
from distributed.testing import run_ranks

RANKS = 3


def permuted(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dense, and not in the order of its elements."""
    return (torch.arange(12).view(3, 4) + 100 * rank).to(dtype).t()


def results(ways: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[str]:
    """What is wrong; `ways` makes a call of each collective, at once or through its handle."""
    rank, wrong = dist.get_rank(), []
    ranks = range(RANKS)

    def equal(name: str, found: Any, wanted: Any) -> None:
        if (found is None) != (wanted is None) or (found is not None and not torch.equal(found, wanted)):
            wrong.append(f"{name}: {found} for {wanted}")

    call = ways
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        own, every = permuted(rank, dtype), torch.stack([permuted(other, dtype) for other in ranks])
        bits = [other.contiguous().view(torch.uint8) for other in every]

        def same(name: str, found: Any, wanted: Any) -> None:
            raw = None if found is None else found.contiguous().view(torch.uint8)
            equal(name, raw, None if wanted is None else wanted.contiguous().view(torch.uint8))

        same(f"all_gather {dtype}", call(comm.all_gather)(own), every)
        same(f"gather {dtype}", call(comm.gather)(own, dst=2), every if rank == 2 else None)
        sent = own.clone(memory_format=torch.preserve_format)
        equal(f"broadcast {dtype}", call(comm.broadcast)(sent, src=1).contiguous().view(torch.uint8), bits[1])
        equal(f"broadcast in place {dtype}", sent.contiguous().view(torch.uint8), bits[1])
        taken = torch.zeros_like(own)
        call(comm.scatter)(taken, every if rank == 0 else None)
        same(f"scatter {dtype}", taken, every[rank])
        same(f"all_to_all {dtype}", call(comm.all_to_all)(every), torch.stack([own] * RANKS))
    total = sum(permuted(other) for other in ranks)
    equal("all_reduce", call(comm.all_reduce)(permuted(rank)), total)
    equal("avg", call(comm.all_reduce)(permuted(rank), "avg"), total / RANKS)
    own = permuted(rank)
    call(comm.reduce)(own, dst=1)
    equal("reduce", own, total if rank == 1 else permuted(rank))
    rows = torch.stack([permuted(rank) * (other + 1) for other in ranks])
    equal("reduce_scatter", call(comm.reduce_scatter)(rows), total * (rank + 1))
    short = rows.to(torch.int16)  # which gloo cannot add
    equal("reduce_scatter int16", call(comm.reduce_scatter)(short), (total * (rank + 1)).to(torch.int16))
    parts = [torch.full((other + rank, 2), 10 * rank + other) for other in ranks]
    got = call(comm.all_to_all)(parts)
    for other in ranks:
        equal("all_to_all of lists", got[other], torch.full((other + rank, 2), 10 * other + rank))
    call(comm.barrier)()
    right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
    taken = torch.zeros(3, 4).t()
    arriving = comm.recv(taken, left, async_op=True, timeout_s=60)  # all ranks wait for a message before one is sent
    equal("ring beside a message", comm.all_reduce(permuted(rank), algorithm="ring"), total)
    message = comm.send(permuted(rank), right, async_op=True)
    equal("recv", arriving.wait(), permuted(left))
    message.wait()
    kept = torch.ones(2, requires_grad=True).exp()  # whose derivative is itself, as it was
    call(comm.all_reduce)(kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    if told(lambda: comm.reduce(torch.ones(2, dtype=torch.int16), dst=RANKS)) == "nothing":
        wrong.append("reduce to a rank that is not there")
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    equal("a parameter", call(comm.broadcast)(weight, src=2).data, torch.full((2,), 2.0))
    return wrong


def at_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    return collective


def later(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        handle = collective(*args, **options, async_op=True)
        result = handle.wait()
        assert handle.is_completed()
        assert handle.wait() is result
        return result

    return call


def told(call: Callable[[], Any]) -> str:
    """How a call failed, with its kind."""
    try:
        call()
    except (DistributedError, CollectiveError) as failed:
        return f"{type(failed).__name__}: {failed}"
    return "nothing"


def mismatches() -> dict[str, str]:
    """Each is found before anything is sent, so the group stays usable."""
    rank, found = dist.get_rank(), {}
    found["shape"] = told(lambda: comm.all_reduce(torch.ones(5 + (rank == 2)), name="loss"))
    found["dtype"] = told(lambda: comm.all_gather(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32)))
    found["operation"] = told(lambda: comm.all_reduce(torch.ones(8)) if rank else comm.broadcast(torch.ones(8)))
    comm.check_shapes("always")
    comm.all_reduce(torch.ones(6)), comm.all_reduce(torch.ones(7))
    if rank < 2:
        message = comm.send(torch.ones(3), 1, async_op=True) if rank == 0 else None
        found["message"] = told(lambda: comm.recv(torch.ones(2), 0)) if rank else ""
        if message is None:
            dist.recv(torch.ones(3), 0)
        else:
            message.wait()
        early = comm.recv(torch.ones(2), 0, async_op=True) if rank == 1 else None
        dist.barrier()
        if early is None:
            found["early message"] = told(lambda: comm.send(torch.ones(3), 1))
            dist.send(torch.ones(2), 1)
        else:
            found["early message"] = told(early.wait)
    else:
        dist.barrier()
    found["known"] = told(lambda: comm.all_reduce(torch.ones(6 if rank else 7)))
    comm.check_shapes("first")
    assert comm.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2], "the group is usable"
    return found


def names(folder: str) -> str:
    """What the heartbeat of rank 0 says while it waits for the others."""
    rank = dist.get_rank()
    heartbeat = Heartbeat(folder, rank)
    env = worker_env()
    assert env is not None
    session = Session(env, torch.device("cpu"), None)
    session.report_collectives_to(heartbeat.collective)
    if rank == 0:
        comm.barrier(name="the end of the epoch")
        seen = ""
    else:
        path, until, seen = AttemptDir(folder).heartbeat(0), time.monotonic() + 20, ""
        while not seen and time.monotonic() < until:
            beat = read_beat(path)
            seen = beat.collective if beat is not None else ""
        comm.barrier(name="the end of the epoch")
    heartbeat.close()
    comm.barrier()  # the run is over, and the script goes on
    session.report_collectives_to(None)
    return seen


def late() -> str:
    """Rank 1 waits in another collective, rank 2 in none."""
    rank = dist.get_rank()
    comm.all_reduce(torch.ones(2), name="warm-up")
    if rank == 0:
        return told(lambda: comm.all_reduce(torch.ones(2), name="gradients", timeout_s=2))
    if rank == 1:
        return told(lambda: comm.recv(torch.ones(2), 2, name="weights", timeout_s=3))
    time.sleep(6)
    return ""


def all_in_one(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"backend": comm.backend()}
    found["at once"], found["later"] = results(at_once), results(later)
    found["mismatches"], found["names"] = mismatches(), names(folder)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_in_one, RANKS, str(tmp_path_factory.mktemp("heartbeats")))


def test_every_collective_returns_what_it_says(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["at once"] == []
        assert rank["later"] == []


def test_backend_is_said_with_its_reason(found: list[dict[str, Any]]) -> None:
    assert found[0]["backend"].name == "gloo"
    assert "CPU" in found[0]["backend"].reason


@pytest.mark.parametrize(("kind", "culprits"), [("shape", {2}), ("dtype", {1}), ("operation", {0}), ("known", {0})])
def test_ranks_that_differ_are_named_before_anything_is_sent(
    kind: str, culprits: set[int], found: list[dict[str, Any]]
) -> None:
    for rank in found:
        assert rank["mismatches"][kind].startswith(MismatchError.__name__)
        assert {int(number) for number in re.findall(r"rank (\d) (?:calls|has)", rank["mismatches"][kind])} & culprits
    if kind == "shape":
        assert "[5]" in found[0]["mismatches"][kind]
        assert "'loss' (call" in found[0]["mismatches"][kind]
        assert Path(__file__).name in found[0]["mismatches"][kind]


def test_receiver_names_sender_of_another_shape(found: list[dict[str, Any]]) -> None:
    receiver = found[1]["mismatches"]["message"]
    assert receiver.startswith(MismatchError.__name__)
    assert "rank 0 sends float32 [3]" in receiver
    early = [rank["mismatches"]["early message"] for rank in found[:2]]  # the receiver goes on until the sender comes
    assert "rank 1 waits for float32 [2]" in early[0]
    assert "rank 0 sends float32 [3]" in early[1]


def test_heartbeat_has_names_of_collectives(found: list[dict[str, Any]]) -> None:
    assert {rank["names"] for rank in found[1:]} == {"the end of the epoch"}


def killed() -> str:
    """Rank 2 is killed while the others wait for it."""
    comm.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: comm.all_reduce(torch.ones(100_000), name="gradients"))


def in_script_of_ones_own(scenario: Callable[[], str], rank: int, port: int, report: Any) -> None:
    """A rank without a launcher of ours, whose group is no good afterwards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    report.put((rank, scenario()))
    report.close()
    report.join_thread()
    time.sleep(2)  # the others may still ask
    os._exit(0)


def broken_worlds() -> list[dict[int, str]]:
    """What the ranks of each have told, side by side."""
    context, worlds = get_context("fork"), []
    for scenario, tellers in ((killed, 2), (late, 3)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        report = context.Queue()
        args = [(scenario, rank, port, report) for rank in range(RANKS)]
        processes = [context.Process(target=in_script_of_ones_own, args=each) for each in args]
        for process in processes:
            process.start()
        worlds.append((report, tellers, processes))
    found = []
    for report, tellers, processes in worlds:
        found.append(dict(report.get(timeout=100) for _ in range(tellers)))
        for process in processes:
            process.join()
    return found


@pytest.fixture(scope="module")
def broken() -> list[dict[int, str]]:
    (found,) = run_ranks(broken_worlds, 1)
    return found


def test_dead_rank_is_named_by_those_who_wait_for_it(broken: list[dict[int, str]]) -> None:
    for rank in (0, 1):
        assert broken[0][rank].startswith(CollectiveError.__name__)
        assert "rank 2 does not answer" in broken[0][rank]
        assert f"rank {1 - rank} does not answer" not in broken[0][rank]


def test_deadline_names_missing_ranks_and_where_they_wait(broken: list[dict[int, str]]) -> None:
    waiting, receiving = broken[1][0], broken[1][1]
    assert waiting.startswith(CollectiveError.__name__)
    assert "all_reduce 'gradients'" in waiting
    assert "within 2 s" in waiting
    assert re.search(r"rank 1 waits in recv 'weights' \(call \d+, test_comm_collectives.py:\d+\)", waiting)
    assert re.search(r"rank 2 is in no collective; its last was all_reduce 'warm-up'", waiting)
    assert "recv 'weights'" in receiving
    assert "rank 2 is in no collective" in receiving


def test_one_process_without_a_group_keeps_its_tensors() -> None:
    tensor = torch.ones(2, 3)
    assert comm.all_reduce(tensor, async_op=True).wait() is tensor
    for rows in (comm.all_gather(tensor), comm.gather(tensor), comm.all_to_all(tensor[None])):
        assert torch.equal(rows, tensor[None])
    assert torch.equal(comm.reduce_scatter(tensor[None], "avg"), tensor)
    assert torch.equal(comm.scatter(torch.zeros(2, 3), tensor[None]), tensor)
    assert comm.broadcast(tensor) is tensor
    assert comm.barrier() is None
    with pytest.raises(DistributedError, match="rank 1"):
        comm.send(tensor, 1)


def test_rank_of_a_launcher_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="no process group"):
        comm.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("op", "dtype"), [("avg", torch.int64), ("max", torch.complex64), ("xor", torch.int32)])
def test_reduction_that_cannot_be_is_refused(op: Any, dtype: torch.dtype) -> None:
    with pytest.raises(DistributedError):
        comm.all_reduce(torch.ones(2, dtype=dtype), op)
