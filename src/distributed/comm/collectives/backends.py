"""Which library sends tensors of a device in a group, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distributed.comm.groups.places import place_in
from distributed.core.choices import Device
from distributed.core.collectives import choose_collectives


class CollectiveBackend(NamedTuple):
    """What sends, and the reason."""

    name: str
    reason: str


def backend(device: Device | None = None, group: Any = None) -> CollectiveBackend:
    """What sends tensors of this device; by default of the GPU where the group has a backend for it.

    >>> backend("cpu").name  # in one process: what a group would have
    'gloo'
    """
    place = place_in(group)
    if place is None:
        usual, why = choose_collectives(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return CollectiveBackend(usual, f"one process sends nothing; several would use it: {why}")
    config = str(dist.get_backend_config(place.group))
    asked = device or ("cuda" if "nccl" in config else "cpu")
    name = place.backend(asked)[0]
    chosen, why = choose_collectives(asked)
    if name != chosen:
        why = f"the group was made with {config!r}; for {asked} tensors it would be {chosen} by default: {why}"
    return CollectiveBackend(name, why)
