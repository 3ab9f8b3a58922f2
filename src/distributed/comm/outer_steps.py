"""Replicas that have stepped alone meet: the mean of their tensors, and DiLoCo's outer step by what it has changed.

    round k    every replica     anchor ──H inner steps──▶ its own weights
    meeting    all ranks         mean of their weights, in one sum over the ranks
               local SGD         weights = mean
               DiLoCo            pseudo-gradient = anchor - mean; outer momentum, Nesterov: weights = next anchor

Anchor and outer momentum are computed of the same bytes on all ranks, and so are the same there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from distributed.core.errors import MismatchError
from distributed.runtime.session import Session

StateTree = dict[str, Any]
SYNCHRONIZATION = "synchronization"  # a component of a checkpoint
_NUMBERS_AT_ONCE = 1 << 24
_NARROW = (torch.bfloat16, torch.float16)


@torch.no_grad()
def mean_over_ranks(name: str, tensors: Mapping[str, torch.Tensor], session: Session) -> dict[str, torch.Tensor]:
    """The mean of each tensor over all ranks, the same bytes on each; of integers, those of rank 0.

    Every rank calls it with tensors of the same names and shapes, else it raises MismatchError; what lies together is
    sent together.
    """
    _compare(name, tensors, session)
    found: dict[str, torch.Tensor] = {}
    held: dict[torch.dtype, list[str]] = {}
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() and not tensor.is_complex():
            found[key] = session.send_from(name, 0, tensor.detach().to(session.device).contiguous().clone())
            continue
        dtype = torch.float32 if tensor.dtype in _NARROW else tensor.dtype
        keys = held.setdefault(dtype, [])
        keys.append(key)
        if sum(tensors[one].numel() for one in keys) >= _NUMBERS_AT_ONCE:
            found |= _mean(name, {one: tensors[one] for one in keys}, dtype, session)
            held[dtype] = []
    for dtype, keys in held.items():
        if keys:
            found |= _mean(name, {one: tensors[one] for one in keys}, dtype, session)
    return found


def _compare(name: str, tensors: Mapping[str, torch.Tensor], session: Session) -> None:
    """Lain end to end, tensors of other shapes would be averaged with one another, without an error."""
    own = [f"{key} {tensor.dtype} {list(tensor.shape)}" for key, tensor in tensors.items()]
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=8).hexdigest()
    if len(set(session.gather_texts(name, digest))) == 1:
        return
    first, *others = (json.loads(text) for text in session.gather_texts(name, json.dumps(own)))
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    of_first, of_other = ([text for text in one if text not in two] for one, two in ((first, other), (other, first)))
    has_first, has_other = (", ".join(some[:3]) or "the same in another order" for some in (of_first, of_other))
    raise MismatchError(
        f"the {name} cannot be had: rank 0 holds {has_first}; rank {rank} {has_other}",
        why="parameters and buffers are averaged, each with those of the same name and shape on the other ranks",
        do="let them have one shape on all ranks; keep what grows with a rank's own samples in an attribute, no buffer",
    )


def _mean(
    name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, session: Session
) -> dict[str, torch.Tensor]:
    numbers = [tensor.detach().to(session.device, dtype).reshape(-1) for tensor in tensors.values()]
    flat = torch.cat(numbers)
    session.sum(name, torch.view_as_real(flat) if flat.is_complex() else flat)
    flat /= session.world_size
    parts = flat.split([len(part) for part in numbers])
    return {
        key: part.view(tensor.shape).to(tensor.device, tensor.dtype)
        for (key, tensor), part in zip(tensors.items(), parts, strict=True)
    }


class OuterNesterov:
    """The outer optimizer of DiLoCo, over the weights with which all replicas begin a round."""

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self._rate, self._momentum = learning_rate, momentum
        self.anchors: dict[str, torch.Tensor] = {}
        self.momenta: dict[str, torch.Tensor] = {}

    def follow(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Step these, by name: those that come anew begin where they are, without momentum."""
        self.anchors = {name: self.anchors.get(name, value.detach().clone()) for name, value in weights.items()}
        self.momenta = {name: self.momenta.get(name, torch.zeros_like(value)) for name, value in self.anchors.items()}

    @torch.no_grad()
    def step(self, means: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the next round, from the mean of those that this one has ended with.

        >>> outer = OuterNesterov(learning_rate=1.0, momentum=0.0)
        >>> outer.follow({"w": torch.ones(2)})
        >>> outer.step({"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
        """
        for name, anchor in self.anchors.items():
            change = anchor - means[name]
            momentum = self.momenta[name].mul_(self._momentum).add_(change)
            anchor.sub_(change.add_(momentum, alpha=self._momentum), alpha=self._rate)
        return dict(self.anchors)

    def state(self) -> StateTree:
        return {"anchors": dict(self.anchors), "momenta": dict(self.momenta)}

    def load(self, tree: StateTree, weights: Mapping[str, torch.Tensor]) -> None:
        """What `state` gave, for these weights; {}: a round begins with them."""
        self.anchors, self.momenta = ({
            name: value.to(weights[name].device, copy=True)
            for name, value in tree.get(kind, {}).items()
            if name in weights
        } for kind in ("anchors", "momenta"))  # fmt: skip
        self.follow(weights)
