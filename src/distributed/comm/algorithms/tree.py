"""Tree all-reduce: the numbers are added up a binary tree to its root, and the sum goes down again.

    up      0 ◄── 1     2 ◄── 3     4          down    0 ──────► 4
            0 ◄────────── 2                            0 ──► 2
            0 ◄──────────────────── 4                  0 ──► 1    2 ──► 3

2·log2(W) messages one after the other. The root adds all it gets, so the links near it carry the most; where a link is
slow to begin (between sites), or only the root is near to all, that is less than the ring's 2·(W−1).
"""

from __future__ import annotations

import torch

from distributed.comm.algorithms.wire import Combine, Exchange, Steps, Team


def tree(flat: torch.Tensor, combine: Combine, team: Team) -> Steps:
    """One slice, in place."""
    distance = 1
    scratch = torch.empty_like(flat) if team.me % 2 == 0 else None  # the others only send
    while distance < team.size and not team.me & distance:
        if team.me + distance < team.size:
            assert scratch is not None
            yield Exchange(receives=[(scratch, team.members[team.me + distance])])
            combine(flat, scratch, flat)
        distance *= 2
    if team.me:
        parent = team.members[team.me - distance]
        yield Exchange(sends=[(flat, parent)])
        yield Exchange(receives=[(flat, parent)])
    children: list[int] = []
    while distance > 1:
        distance //= 2
        if team.me + distance < team.size:
            children.append(team.members[team.me + distance])
    if children:
        yield Exchange(sends=[(flat, child) for child in children])
