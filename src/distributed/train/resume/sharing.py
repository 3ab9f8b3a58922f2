"""Sharing: a tree of tensors and JSON values that one rank has, on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from distributed.checkpoint.format.skeleton import unflatten
from distributed.checkpoint.format.tree import flatten
from distributed.data.drawn import Share
from distributed.runtime.session import Session

Tree = dict[str, Any]


def share_from_first(session: Session) -> Share:
    """What rank 0 makes, on every rank; the others make nothing."""

    def share(make: Callable[[], Tree]) -> Tree:
        if session.world_size == 1 or session.is_dry:
            return make()
        return send_tree(session, "the order of an epoch", 0, make() if session.is_main else None)

    return share


def send_tree(session: Session, name: str, source: int, tree: Tree | None) -> Tree:
    """The source's tree, tensor by tensor; the source itself keeps its own. What others pass is not looked at.

    A tensor that the source has on the host is on the host of every rank, whatever the ranks communicate with.
    """
    tensors: dict[str, torch.Tensor] = {}
    text, is_source = None, session.rank == source
    if is_source:
        tensors, skeleton = flatten(tree)
        specs = [
            [key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type == "cpu"]
            for key, tensor in tensors.items()
        ]
        text = json.dumps({"skeleton": skeleton, "tensors": specs})
    document = json.loads(session.share_text(f"{name}-{session.number()}", text))
    received: dict[str, torch.Tensor] = {}
    for key, dtype, shape, is_on_host in document["tensors"]:
        if is_source:
            data = tensors[key].detach().to(session.device).contiguous()
        else:
            data = torch.empty(shape, dtype=getattr(torch, dtype), device=session.device)
        if data.numel():
            session.send_from(name, source, data)
        received[key] = tensors[key] if is_source else data.cpu() if is_on_host else data
    found: Tree = unflatten(document["skeleton"], received)
    return found
