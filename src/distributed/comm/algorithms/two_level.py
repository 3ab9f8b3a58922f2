"""Two-level all-reduce: within each node, between the nodes, and within each node again.

    node A   rank 0: part 0 ─┐         rank 0 ◄── ring ──► rank 2: part 0        rank 0: both parts
             rank 1: part 1 ─┴ swapped rank 1 ◄── ring ──► rank 3: part 1        rank 1: both parts
    node B   rank 2: part 0 ─┐
             rank 3: part 1 ─┴ swapped
             1. each rank adds up one  2. a ring of its own for each part        3. all take the other parts
                part of its node          over the slow links

Only 2·(N−1)/N of the bytes cross the links of a node, where a ring over all ranks sends nearly twice as many for two
nodes; all ranks of a node use the link at once. The node with the fewest ranks says how many parts there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distributed.comm.algorithms.ring import ring
from distributed.comm.algorithms.wire import Combine, Exchange, Steps, Team, cut


def two_level(flat: torch.Tensor, combine: Combine, nodes: Sequence[Sequence[int]], rank: int) -> Steps:
    """One slice, in place; `nodes` has the ranks of each node."""
    node = next(members for members in nodes if rank in members)
    owners = min(map(len, nodes))
    place, parts = node.index(rank), cut(flat, owners)
    owned = parts[place] if place < owners else None
    others = [member for member in node if member != rank]
    sends = [(parts[owner], node[owner]) for owner in range(owners) if node[owner] != rank]
    arrived = [] if owned is None else [torch.empty_like(owned) for _ in others]
    yield Exchange(sends, list(zip(arrived, others, strict=False)))
    if owned is not None:
        for part in arrived:
            combine(owned, part, owned)
        if len(nodes) > 1:
            yield from ring(owned, combine, Team([members[place] for members in nodes], list(nodes).index(node)))
    sends = [] if owned is None else [(owned, member) for member in others]
    receives = [(parts[owner], node[owner]) for owner in range(owners) if node[owner] != rank]
    yield Exchange(sends, receives)
