"""The operations of the collectives benchmark on one rank: buffers, the call, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distributed import comm
from distributed.runtime.torch_compat import all_gather_flat, reduce_scatter_flat


class CollectiveTrial(NamedTuple):
    """A call on buffers that hold numbers by which its result can be told."""

    call: Callable[[], object]
    result: torch.Tensor | None  # None where this rank gets none
    expected: torch.Tensor
    buffers: tuple[torch.Tensor, ...]

    def wrong(self) -> int:
        """Call once; how many numbers are not what they must be."""
        self.call()
        if self.result is None:
            return 0
        return int((self.result != self.expected).sum())

    def clear(self) -> None:
        """Zeros stay zeros, however often they are added."""
        for buffer in self.buffers:
            buffer.zero_()


def numbers_of(size: int, ranks: int) -> int:
    """Of a whole message: as many for each rank."""
    return size // 4 // ranks * ranks


def make_trial(operation: str, size: int, device: torch.device, algorithm: str) -> CollectiveTrial:
    """`size`: bytes of the whole message, as every rank has it before or after."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = numbers_of(size, ranks)
    own = numbers // ranks
    patterns = [(torch.arange(numbers, device=device) % 8 * (other + 1)).float() for other in range(ranks)]
    whole, total = patterns[rank].clone(), torch.stack(patterns).sum(0)
    part, mine = whole[:own].clone(), slice(rank * own, (rank + 1) * own)
    empty, little = torch.empty_like(whole), torch.empty_like(part)
    is_root, left = rank == 0, (rank - 1) % ranks

    def trial(
        call: Callable[[], object], result: torch.Tensor, expected: torch.Tensor, gets: bool = True
    ) -> CollectiveTrial:
        return CollectiveTrial(call, result if gets else None, expected, (whole, part, empty, little))

    heads = torch.cat([pattern[:own] for pattern in patterns])
    if operation == "all-reduce":
        return trial(_all_reduce(whole, algorithm), whole, total)
    if operation == "all-gather":
        return trial(lambda: all_gather_flat(empty, part, group=None).wait(), empty, heads)
    if operation == "reduce-scatter":
        start = lambda: reduce_scatter_flat(little, whole, op=dist.ReduceOp.SUM, group=None)  # noqa: E731
        return trial(lambda: start().wait(), little, total[mine])
    if operation == "broadcast":
        return trial(lambda: dist.broadcast(whole, 0), whole, patterns[0])
    if operation == "reduce":
        return trial(lambda: dist.reduce(whole, 0), whole, total, gets=is_root)
    if operation == "gather":
        rows = list(empty.split(own)) if is_root else None
        return trial(lambda: dist.gather(part, rows, 0), empty, heads, gets=is_root)
    if operation == "scatter":
        rows = list(whole.split(own)) if is_root else None
        return trial(lambda: dist.scatter(little, rows, 0), little, patterns[0][mine])
    if operation == "all-to-all":
        expected = torch.cat([pattern[mine] for pattern in patterns])
        return trial(lambda: dist.all_to_all_single(empty, whole), empty, expected)
    assert operation == "send-recv"
    return trial(lambda: _pass_on(whole, empty, (rank + 1) % ranks, left), empty, patterns[left])


def _all_reduce(whole: torch.Tensor, algorithm: str) -> Callable[[], object]:
    if algorithm == "backend":  # itself, without what `comm` adds
        return lambda: dist.all_reduce(whole)
    by: Any = algorithm
    return lambda: comm.all_reduce(whole, name="bench", algorithm=by)


def _pass_on(outgoing: torch.Tensor, incoming: torch.Tensor, right: int, left: int) -> None:
    """To the right neighbour, from the left one."""
    messages = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
