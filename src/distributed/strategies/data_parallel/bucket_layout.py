"""BucketLayout: which gradients DDP reduces together, and in which order it expects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from distributed.core.plan import Decision
from distributed.runtime.torch_compat import ddp_buckets

T = TypeVar("T", bound=torch.Tensor)


@dataclass(frozen=True)
class BucketLayout:
    """The same on all ranks. Where a gradient lies in its bucket decides in which order three and more ranks add it."""

    cap_mb: float
    order: tuple[int, ...] = ()  # numbers of the trained parameters, as their gradients come; (): the last one first

    def in_order(self, parameters: Sequence[T]) -> list[T]:
        """Parameters as their gradients come.

        >>> first, second, third = torch.zeros(3).unbind()
        >>> [int(p.data_ptr() == third.data_ptr()) for p in BucketLayout(25.0).in_order([first, second, third])]
        [1, 0, 0]
        """
        if sorted(self.order) != list(range(len(parameters))):  # also of a model that has frozen some since
            return list(parameters[::-1])
        return [parameters[number] for number in self.order]

    def buckets(self, parameters: Sequence[T]) -> list[list[T]]:
        """DDP's buckets after its first step: as gradients come, by type, each up to the cap."""
        ordered = self.in_order(parameters)
        if not ordered:
            return []
        buckets = ddp_buckets(ordered, int(self.cap_mb * 2**20))
        return [[ordered[index] for index in bucket] for bucket in buckets]


def different(caps_mb: Sequence[float], parameters: Sequence[torch.Tensor]) -> list[float]:
    """Of several caps those that come to different buckets: the first of each kind.

    >>> different((1, 5, 25), [torch.zeros(2**18), torch.zeros(2**18)])  # 1 MB each
    [1, 5]
    """
    found: dict[tuple[int, ...], float] = {}
    for cap_mb in caps_mb:
        found.setdefault(tuple(map(len, BucketLayout(cap_mb).buckets(parameters))), cap_mb)
    return list(found.values())


@dataclass(frozen=True)
class BucketChoice:
    """Where a run stands that measures which buckets are the fastest."""

    layout: BucketLayout  # of the coming step
    begun_at: int  # the step after which the measurement began
    ranks: int  # that measure
    caps_mb: tuple[float, ...] = ()  # of the sizes that are compared
    is_settled: bool = False  # whether it is over

    def to_save(self) -> dict[str, object]:
        """As JSON has it."""
        where = {"begun_at": self.begun_at, "ranks": self.ranks, "is_settled": self.is_settled}
        sizes = {"cap_mb": self.layout.cap_mb, "caps_mb": list(self.caps_mb)}
        return {"order": list(self.layout.order), **sizes, **where}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> BucketChoice:
        """
        >>> choice = BucketChoice(BucketLayout(5.0, (1, 0)), begun_at=0, ranks=2)
        >>> BucketChoice.from_saved(choice.to_save()) == choice
        True
        """
        layout = BucketLayout(float(saved["cap_mb"]), tuple(saved["order"]))
        return cls(layout, saved["begun_at"], saved["ranks"], tuple(saved["caps_mb"]), saved["is_settled"])


def said_of(choice: BucketChoice, ranks: int) -> Decision:
    """Of a choice that an earlier part of the run has made; `ranks`: of this part.

    >>> said_of(BucketChoice(BucketLayout(5.0), begun_at=0, ranks=2), ranks=3).reason
    'measured earlier in this run, with 2 ranks; with 3 another size may be faster'
    """
    reason = "measured earlier in this run"
    if choice.ranks != ranks:
        reason += f", with {choice.ranks} ranks; with {ranks} another size may be faster"
    return Decision(f"buckets of {choice.layout.cap_mb:g} MB", reason, "bucket_cap_mb")
