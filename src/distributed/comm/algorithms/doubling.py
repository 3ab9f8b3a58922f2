"""Recursive doubling: at each level pairs swap what they have, so log2(W) exchanges make every rank's sum whole.

    level 1     0 ◄─► 1     2 ◄─► 3        5 ranks: rank 4 gives its numbers to rank 0 before,
    level 2     0 ◄─────► 2                         and gets the sum from it after
                      1 ◄─────► 3

A small tensor is swapped whole: the fewest messages there can be. A large one is halved on the way up, each of a pair
adding one half, and the sums come back on the way down: twice the messages, and a ring's bytes.
Both of a pair add the lower rank's numbers to the higher one's, so both get the same bytes, signs of zero included.
"""

from __future__ import annotations

import torch

from distributed.comm.algorithms.wire import Combine, Exchange, Steps, Team

_HALVES_FROM_BYTES = 1 << 17


def doubling(flat: torch.Tensor, combine: Combine, team: Team) -> Steps:
    """One slice, in place."""
    paired = 1 << (team.size.bit_length() - 1)  # the largest power of two; the ranks above it join one below each
    scratch = torch.empty_like(flat)
    if team.me >= paired:
        partner = team.members[team.me - paired]
        yield Exchange(sends=[(flat, partner)])
        yield Exchange(receives=[(flat, partner)])
        return
    extra = team.members[team.me + paired] if team.me + paired < team.size else None
    if extra is not None:
        yield Exchange(receives=[(scratch, extra)])
        combine(flat, scratch, flat)
    way = _halves if flat.numel() * flat.itemsize >= _HALVES_FROM_BYTES else _whole
    yield from way(flat, scratch, combine, team, paired)
    if extra is not None:
        yield Exchange(sends=[(flat, extra)])


def _whole(flat: torch.Tensor, scratch: torch.Tensor, combine: Combine, team: Team, paired: int) -> Steps:
    distance = 1
    while distance < paired:
        peer = team.me ^ distance
        yield Exchange([(flat, team.members[peer])], [(scratch, team.members[peer])])
        combine(*((flat, scratch) if team.me < peer else (scratch, flat)), flat)
        distance *= 2


def _halves(flat: torch.Tensor, scratch: torch.Tensor, combine: Combine, team: Team, paired: int) -> Steps:
    low, high, distance = 0, flat.numel(), 1
    swapped: list[tuple[int, slice, slice]] = []
    while distance < paired:
        middle = low + (high - low) // 2
        lower, upper = slice(low, middle), slice(middle, high)
        mine, theirs = (lower, upper) if team.me & distance == 0 else (upper, lower)
        peer = team.members[team.me ^ distance]
        yield Exchange([(flat[theirs], peer)], [(scratch[mine], peer)])
        both = (flat[mine], scratch[mine])
        combine(*(both if team.me & distance == 0 else both[::-1]), flat[mine])
        swapped.append((peer, mine, theirs))
        low, high, distance = mine.start, mine.stop, distance * 2
    for peer, mine, theirs in reversed(swapped):
        yield Exchange([(flat[mine], peer)], [(flat[theirs], peer)])
