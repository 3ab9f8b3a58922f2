"""Every all-reduce of ours against the exact sum: all dtypes, lengths, layouts and operations, one to five ranks."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import CustomCommunication, comm
from distributed.comm.algorithms.run import ALGORITHMS
from distributed.core.errors import DistributedError
from distributed.testing import run_ranks

LENGTHS = (0, 1, 2, 7, 97, 70_001)
LARGE = 1_300_003  # several slices, and halves
DTYPES = (torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
WAYS = ("backend", *ALGORITHMS)


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers of either sign, whose sums and products every dtype holds exactly."""
    numbers = (torch.arange(length) * (rank + 3) + rank) % 5
    return (numbers - 2 if dtype.is_signed else numbers).to(dtype)


def exact(op: str, ranks: list[int], length: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    rows = torch.stack([values(rank, length, dtype).to(wide) for rank in ranks])
    if op in ("max", "min"):
        return (rows.amax(0) if op == "max" else rows.amin(0)).to(dtype)
    found = rows.prod(0) if op == "product" else rows.sum(0)
    return (found / len(ranks) if op == "avg" else found).to(dtype)


def check(way: str, op: str, length: int, dtype: torch.dtype, group: Any = None) -> str:
    """What is wrong, if anything is."""
    ranks = [0] if not dist.is_initialized() else dist.get_process_group_ranks(group)
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensor = values(rank, length, dtype)
    returned = comm.all_reduce(tensor, op, algorithm=way, group=group)
    wanted = exact(op, ranks, length, dtype)
    close = torch.allclose(tensor, wanted, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)
    is_right = close if op == "avg" else torch.equal(tensor, wanted)
    return "" if is_right and returned is tensor else f"{way} {op} {length} {dtype}: {tensor[:5]} for {wanted[:5]}"


def digest(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(bytearray(hashlib.sha256(raw).digest()), dtype=torch.uint8)


def all_cases() -> list[str]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    os.environ["GROUP_RANK"] = str(rank % 2 if size < 5 else (rank > 2) + 0)  # pretended nodes; of 3 and 2 ranks for 5
    wrong = []
    for way in WAYS:
        wrong += [check(way, "sum", length, torch.float32) for length in LENGTHS]
        wrong += [check(way, "sum", 97, dtype) for dtype in DTYPES]
        wrong += [
            check(way, op, 97, dtype) for op in ("max", "min", "product") for dtype in (torch.int32, torch.float32)
        ]
        wrong += [check(way, "avg", 97, dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
        wrong.append(check(way, "sum", LARGE, torch.int64))

        flags = torch.arange(40) % (rank + 2) == 0
        wanted = torch.stack([torch.arange(40) % (other + 2) == 0 for other in range(size)])
        for op, found in (("sum", wanted.any(0)), ("product", wanted.all(0))):
            if not torch.equal(comm.all_reduce(flags.clone(), op, algorithm=way), found):
                wrong.append(f"{way} {op} of bools")

        grid = values(rank, 35, torch.float32).view(5, 7).t()[1:, ::2]
        total = sum(values(other, 35, torch.float32).view(5, 7).t()[1:, ::2] for other in range(size))
        around = grid._base.clone() if grid._base is not None else None
        comm.all_reduce(grid, algorithm=way)
        if not torch.equal(grid, total) or around is None:
            wrong.append(f"{way} of a view that is not contiguous")

        torch.manual_seed(rank)
        noise = torch.randn(50_021) * 10.0 ** torch.randint(-6, 6, (50_021,))
        noise[::9] = -0.0 if rank % 2 else 0.0
        every = comm.all_gather(noise).double()
        comm.all_reduce(noise, algorithm=way)
        if not torch.allclose(noise.double(), every.sum(0), rtol=1e-4, atol=1e-5 * float(every.abs().max())):
            wrong.append(f"{way} of numbers of all magnitudes")
        digests = comm.all_gather(digest(noise))
        if not bool((digests == digests[0]).all()):
            wrong.append(f"{way}: ranks end with different bytes")
    return [told for told in wrong if told]


def in_subgroups() -> list[str]:
    """The odd ranks backwards, and a pair, at the same time as the rest stands by."""
    wrong = []
    for members in (list(range(1, dist.get_world_size(), 2)), [0, dist.get_world_size() - 1]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            wrong += [check(way, "sum", 97, torch.float32, group) for way in WAYS]
        else:
            try:
                comm.all_reduce(torch.ones(1), group=group)
                wrong.append("a rank outside of the group took part")
            except DistributedError:
                pass
    return [told for told in wrong if told]


def custom() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    communication = CustomCommunication(world_size=size, rank=rank)
    with pytest.raises(DistributedError, match=f"rank {rank} of {size}"):
        CustomCommunication(world_size=size + 1, rank=rank)
    return [*communication.ring_allreduce(torch.full((3,), rank + 1.0)).tolist()]


def chosen() -> tuple[list[str], list[float]]:
    total = comm.all_reduce(torch.ones(1000), algorithm="auto")
    comm.all_reduce(torch.ones(900), algorithm="auto")  # of the same size class
    return [choice.algorithm for choice in comm.auto_choices()], total[:2].tolist()


def everything() -> tuple[list[str], list[str], list[float], tuple[list[str], list[float]]]:
    comm.check_shapes("never")  # what it finds is tested elsewhere
    return all_cases(), in_subgroups(), custom(), chosen()


def test_one_rank_keeps_its_numbers() -> None:
    assert [told for way in WAYS if (told := check(way, "sum", 97, torch.float32))] == []
    assert CustomCommunication(1, 0).ring_allreduce(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_algorithms_match_exact_results(ranks: int) -> None:
    found = run_ranks(everything, ranks)
    for wrong, wrong_in_groups, summed, (choices, total) in found:
        assert wrong == []
        assert wrong_in_groups == []
        assert summed == [ranks * (ranks + 1) / 2] * 3
        assert len(choices) == 1
        assert choices == found[0][3][0], "the ranks have chosen alike"
        assert total == [ranks, ranks]
