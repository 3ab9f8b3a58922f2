"""A sum over virtual ranks in the order of a binary tree, independent of which process holds which.

Process p of W holds the leaves [p·V/W, (p+1)·V/W): a subtree, which it adds up by itself. The levels above are added
between processes, each pair swapping its sums; a + b and b + a have the same bytes, so both come to the tree's sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from distributed.comm.algorithms.wire import TAG
from distributed.comm.layout import FlatBlock, FlatLayout, align
from distributed.runtime.session import Session
from distributed.runtime.world import CollectiveError

_HALVES_FROM_BYTES = 1 << 18  # below, fewer messages are faster than fewer bytes


class TreeSum:
    """Adds leaves as they come and keeps one buffer a level. The buffers are made once and used by every sum.

    >>> from distributed.core.env import WorkerEnv
    >>> alone = Session(WorkerEnv(), torch.device("cpu"), None)
    >>> tree = TreeSum("example", FlatLayout([torch.zeros(2)]), alone)
    >>> for leaf in range(4):
    ...     tree.add([torch.full((2,), float(leaf))])
    >>> tree.total()
    [tensor([6., 6.])]
    """

    def __init__(self, name: str, layout: FlatLayout, session: Session) -> None:
        self._name, self._layout, self._session = name, layout, session
        self._stages = session.device.type == "cuda" and session.world_size > 1 and dist.get_backend() == "gloo"
        self._free: list[FlatBlock] = []
        self._levels: list[FlatBlock] = []  # sums of ever fewer leaves, all powers of two
        self._count = 0

    def add(self, values: Sequence[torch.Tensor | None] | None) -> None:
        """The next leaf of this process, in the layout's order; None is zeros, for one tensor or for the whole leaf."""
        if self._count == 0:
            self._free += self._levels  # the last sum, which its owner had until now
            self._levels = []
        if self._count % 2 == 0:
            flat = self._take()
            flat.write(values)
            self._levels.append(flat)
        else:
            self._levels[-1].accumulate(values)
        self._count += 1
        pairs = self._count // 2
        while self._count % 2 == 0 and pairs % 2 == 0:  # two subtrees of one size are there
            right = self._levels.pop()
            self._levels[-1].add(right)
            self._free.append(right)
            pairs //= 2

    def discard(self) -> None:
        """Forget the leaves of a sum that was not finished."""
        self._free += self._levels
        self._levels, self._count = [], 0

    def total(self) -> list[torch.Tensor]:
        """The sum over all processes' leaves. The tensors are the tree's own, until its next leaf comes."""
        assert len(self._levels) == 1, f"{self._count} leaves are no whole subtree"
        self._count = 0
        (flat,) = self._levels
        if self._session.world_size > 1:
            scratch = self._take()
            if self._layout.nbytes < _HALVES_FROM_BYTES:
                self._swap_all(flat, scratch)
            else:
                self._swap_halves(flat, scratch)
            self._free.append(scratch)
        return flat.views

    def _swap_all(self, flat: FlatBlock, scratch: FlatBlock) -> None:
        """Recursive doubling: at each level both of a pair send everything. log2(W) messages."""
        distance = 1
        while distance < self._session.world_size:
            self._swap(self._session.rank ^ distance, flat.bytes, scratch.bytes)
            flat.add(scratch)
            distance *= 2

    def _swap_halves(self, flat: FlatBlock, scratch: FlatBlock) -> None:
        """Recursive halving, then doubling: each of a pair adds one half, and the sums travel back.

        2·log2(W) messages, but of 2·(W-1)/W of the bytes altogether, as in a ring. Every element is still added in
        the tree's order.
        """
        rank, low, high, distance = self._session.rank, 0, self._layout.nbytes, 1
        swapped: list[tuple[int, slice, slice]] = []
        while distance < self._session.world_size:
            middle = low + align((high - low) // 2)
            lower, upper = slice(low, middle), slice(middle, high)
            mine, theirs = (lower, upper) if rank & distance == 0 else (upper, lower)
            self._swap(rank ^ distance, flat.bytes[theirs], scratch.bytes[mine])
            flat.add_range(scratch, mine.start, mine.stop)
            swapped.append((rank ^ distance, mine, theirs))
            low, high, distance = mine.start, mine.stop, distance * 2
        for peer, mine, theirs in reversed(swapped):
            self._swap(peer, flat.bytes[mine], flat.bytes[theirs])

    def _swap(self, peer: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Send to a peer and receive from it; bounded by the process group's deadline."""
        out, into = outgoing, incoming
        if self._stages:  # gloo sends no GPU tensors from one process to another
            out, into = outgoing.cpu(), torch.empty(incoming.shape, dtype=torch.uint8)
        try:
            with self._session.reported(self._name):
                posted = [dist.P2POp(dist.isend, out, peer, tag=TAG), dist.P2POp(dist.irecv, into, peer, tag=TAG)]
                works = dist.batch_isend_irecv(posted)
                for work in works:
                    work.wait()
        except (RuntimeError, dist.DistError) as failed:
            where = f"[r{self._session.rank}] in the collective {self._name!r}, with rank {peer}"
            raise CollectiveError(f"{where}: {failed}") from failed
        if self._stages:
            incoming.copy_(into)

    def _take(self) -> FlatBlock:
        return self._free.pop() if self._free else self._layout.new()


def send_from_first(name: str, tensors: Sequence[torch.Tensor], session: Session) -> None:
    """Every rank gets rank 0's bytes of these tensors, in place."""
    if session.world_size == 1:
        return
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)  # gloo sends permuted tensors wrongly, without an error
        session.send_from(name, 0, flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
