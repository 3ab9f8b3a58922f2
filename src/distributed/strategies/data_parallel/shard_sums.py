"""Sums over the shards of parameters, for optimizers whose step needs a norm of the whole (`needs_shard_sums`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distributed.runtime.session import Session
from distributed.strategies.placement import Layout

_NEEDS = "needs_shard_sums"  # an attribute by which an optimizer's class declares this


def needs_shard_sums(optimizer: Any) -> bool:
    return bool(getattr(optimizer, _NEEDS, False))


class SumsOverShards:
    """Adds numbers of this rank's elements of each parameter up over the ranks that hold its other elements."""

    def __init__(
        self,
        names: Mapping[int, str],
        layout: Layout,
        group_of: Callable[[str], dist.ProcessGroup | None],
        session: Session,
    ) -> None:
        """`names` of the optimizer's parameters, by their ids; `group_of`: the ranks of an axis of the mesh."""
        self._names, self._layout, self._session = names, layout, session
        self._axes = [
            (group, is_cut)
            for axis, is_cut in (("dp_shard", layout.is_sharded), ("tp", self._is_cut))
            if (group := group_of(axis)) is not None
        ]
        self._shares: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def __call__(self, parameters: Sequence[torch.Tensor], sums: torch.Tensor) -> torch.Tensor:
        for (group, _), shares in zip(self._axes, self._shares_of(parameters, sums), strict=True):
            sums.mul_(shares)
            self._session.sum("norms over shards", sums, group)
        return sums

    def _shares_of(self, parameters: Sequence[torch.Tensor], sums: torch.Tensor) -> list[torch.Tensor]:
        """For each axis, 1 for a parameter that is cut over it, and for others a part, as each rank has it whole."""
        key = tuple(map(id, parameters))
        if key not in self._shares:
            names = [self._names[id(parameter)] for parameter in parameters]
            parts = [[1.0 if is_cut(name) else 1 / group.size() for name in names] for group, is_cut in self._axes]
            self._shares = {key: [sums.new_tensor(part) for part in parts]}
        return self._shares[key]

    def _is_cut(self, name: str) -> bool:
        return self._layout.cut_of(name) is not None
