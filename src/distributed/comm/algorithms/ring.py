"""Ring all-reduce: each rank sends to its right neighbour and receives from its left one, 2·(W−1) times a chunk.

    reduce-scatter, W = 3: what arrives is added          all-gather: the sums go round
    rank 0   [a0]──►  b0    [c0]                          rank 0    A    [B]──►  C
    rank 1    a1    [b1]──►  c1                           rank 1    A     B    [C]──►
    rank 2    a2     b2    [c2]──► (to rank 0)            rank 2   [A]──► B     C
    step s: send chunk me−s, add chunk me−s−1             step s: send chunk me+1−s, take chunk me−s

Every rank sends 2·(W−1)/W of the bytes, the least there is. A chunk is added up in one place, so all ranks get the same
bytes of it.
"""

from __future__ import annotations

import torch

from distributed.comm.algorithms.wire import Combine, Exchange, Steps, Team, cut


def ring(flat: torch.Tensor, combine: Combine, team: Team) -> Steps:
    """One slice, in place."""
    chunks, size = cut(flat, team.size), team.size
    right, left = team.members[(team.me + 1) % size], team.members[(team.me - 1) % size]
    scratch = torch.empty_like(chunks[0])
    for step in range(size - 1):
        own = chunks[(team.me - step - 1) % size]
        arrived = scratch[: own.numel()]
        yield Exchange([(chunks[(team.me - step) % size], right)], [(arrived, left)])
        combine(arrived, own, own)
    for step in range(size - 1):
        yield Exchange([(chunks[(team.me + 1 - step) % size], right)], [(chunks[(team.me - step) % size], left)])
