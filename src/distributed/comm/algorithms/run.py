"""An all-reduce by one of the algorithms: the tensor in slices, each of which the algorithm takes in place."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch

from distributed.comm.algorithms.doubling import doubling
from distributed.comm.algorithms.ring import ring
from distributed.comm.algorithms.tree import tree
from distributed.comm.algorithms.two_level import two_level
from distributed.comm.algorithms.wire import Combine, Steps, Team, Wire, cut
from distributed.comm.groups.buffers import OPS
from distributed.comm.groups.calls import CollectiveCall
from distributed.comm.groups.places import Place
from distributed.core.env import worker_env

ALGORITHMS = ("ring", "doubling", "tree", "two_level")
_SLICE_BYTES, _MOST_SLICES = 1 << 20, 8


def reduce_by(algorithm: str, flat: torch.Tensor, op: str, place: Place, call: CollectiveCall) -> None:
    """Every rank's `flat` becomes the same; "avg" is left a sum."""
    wire = Wire(place, call, flat.device)
    whole = flat.numel() * flat.itemsize
    slices = 1 if wire.is_batched else max(1, min(_MOST_SLICES, whole // _SLICE_BYTES))
    make = _maker(algorithm, place)
    combine = _combine(OPS[op][1])
    wire.run([make(part, combine) for part in cut(flat, slices)])


def _maker(algorithm: str, place: Place) -> Callable[[torch.Tensor, Combine], Steps]:
    team = Team(range(place.size), place.rank)
    if algorithm == "two_level":
        nodes = nodes_of(place)
        return lambda flat, combine: two_level(flat, combine, nodes, place.rank)
    way: Any = {"ring": ring, "doubling": doubling, "tree": tree}[algorithm]
    return lambda flat, combine: way(flat, combine, team)


def _combine(function: Callable[..., torch.Tensor]) -> Combine:
    def combine(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> None:
        function(left, right, out=into)

    return combine


def nodes_of(place: Place) -> list[list[int]]:
    """The ranks of the group on each node, as the ranks tell each other once over the store."""
    if "nodes" not in place.kept:
        store, env = place.watch.store, worker_env()
        keys = [f"node/{place.name}/{rank}" for rank in range(place.size)]
        store.set(keys[place.rank], f"{socket.gethostname()}/{0 if env is None else env.node_rank}")
        nodes: dict[bytes, list[int]] = {}
        for rank, key in enumerate(keys):
            nodes.setdefault(bytes(store.get(key)), []).append(rank)
        place.kept["nodes"] = list(nodes.values())
    found: list[list[int]] = place.kept["nodes"]
    return found
