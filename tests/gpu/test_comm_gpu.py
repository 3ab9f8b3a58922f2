"""The collectives of `distributed.comm` and its algorithms on NCCL, with ranks that share the GPUs there are."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import comm
from distributed.comm.algorithms.run import ALGORITHMS
from distributed.core.errors import MismatchError
from distributed.runtime.world import CollectiveError
from distributed.testing import run_ranks
from tests.ranks.test_comm_algorithms import digest, exact, values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASES = [
    *(("sum", length, torch.float32) for length in (0, 1, 7, 97, 1_300_003)),
    *(("sum", 97, dtype) for dtype in (torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64)),
    *((op, 97, torch.float32) for op in ("avg", "max", "min", "product")),
]


def wrong_reductions() -> list[str]:
    rank, ranks, wrong = dist.get_rank(), list(range(dist.get_world_size())), []
    for way in ("backend", *ALGORITHMS, "auto"):
        for op, length, dtype in CASES:
            tensor = values(rank, length, dtype).cuda()
            comm.all_reduce(tensor, op, algorithm=way)
            if not torch.allclose(tensor.cpu(), exact(op, ranks, length, dtype), rtol=1e-2):
                wrong.append(f"{way} {op} {length} {dtype}")
        noise = torch.randn(50_021, device="cuda")
        comm.all_reduce(noise, algorithm=way)
        digests = comm.all_gather(digest(noise.cpu()))  # on gloo, which is there for CPU tensors
        if not bool((digests == digests[0]).all()):
            wrong.append(f"{way}: ranks end with different bytes")
    return wrong


def wrong_moves() -> list[str]:
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []

    def expect(name: str, found: Any, wanted: Any) -> None:
        if (found is None) != (wanted is None) or (found is not None and not torch.equal(found.cpu(), wanted)):
            wrong.append(name)

    every = torch.stack([torch.arange(12.0).view(3, 4).t() + 100 * other for other in range(size)])
    own, rows = every[rank].cuda(), every.cuda()
    for is_async in (False, True):

        def over(result: Any, is_async: bool = is_async) -> Any:
            return result.wait() if is_async else result

        expect("all_gather", over(comm.all_gather(own, async_op=is_async)), every)
        expect("gather", over(comm.gather(own, dst=1, async_op=is_async)), every if rank == 1 else None)
        expect("broadcast", over(comm.broadcast(own.clone(), src=1, async_op=is_async)), every[1])
        taken = torch.zeros_like(own)
        expect("scatter", over(comm.scatter(taken, rows if rank == 0 else None, async_op=is_async)), every[rank])
        expect("all_to_all", over(comm.all_to_all(rows, async_op=is_async)), torch.stack([every[rank]] * size))
        expect(
            "reduce",
            over(comm.reduce(own.clone(), dst=1, async_op=is_async)),
            every.sum(0) if rank == 1 else every[rank],
        )
        expect("reduce_scatter", over(comm.reduce_scatter(rows, async_op=is_async)), every[rank] * size)
        over(comm.barrier(async_op=is_async))
    message = torch.zeros(4, device="cuda")
    if rank == 0:
        comm.send(message + 7, 1)
    elif rank == 1:
        expect("recv", comm.recv(message, 0), torch.full((4,), 7.0))
    return wrong


def named_errors() -> tuple[str, str]:
    """A rank of another shape, before anything is sent; and one that comes after the deadline, and then joins."""
    rank, told = dist.get_rank(), ["", ""]
    try:
        comm.all_reduce(torch.ones(5 + (rank == 1), device="cuda"), name="loss")
    except MismatchError as failed:
        told[0] = str(failed)
    tensor = torch.ones(3, device="cuda")
    comm.all_reduce(tensor, name="warm-up")
    if rank == 1:
        time.sleep(6)
    try:
        comm.all_reduce(tensor, name="gradients", timeout_s=2)
    except CollectiveError as failed:
        told[1] = str(failed)
    torch.cuda.synchronize()
    return told[0], told[1]


def everything() -> tuple[list[str], list[str], tuple[str, str], str]:
    return wrong_reductions(), wrong_moves(), named_errors(), comm.backend().name


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_on_nccl_are_right_and_name_ranks(ranks: int) -> None:
    for rank, (reductions, moves, (mismatch, late), backend) in enumerate(run_ranks(everything, ranks, device="cuda")):
        assert reductions == []
        assert moves == []
        assert "rank 1" in mismatch
        assert backend == "nccl"
        if rank != 1:
            assert "'gradients'" in late
            assert "rank 1 is in no collective; its last was all_reduce 'warm-up'" in late
