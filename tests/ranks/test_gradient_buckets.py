"""Gradients that are reduced after the backward pass are those of DDP, to the byte, and agreement is everybody's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.core.errors import TaskError
from distributed.core.plan import ReplicatePlan
from distributed.strategies.data_parallel.ddp import replicate
from distributed.strategies.data_parallel.gradient_buckets import GradientBuckets
from distributed.testing import run_ranks
from tests.meshes import joined

PLANS = [ReplicatePlan(bucket_cap_mb=cap) for cap in (25.0, 0.05, 0.001)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(64, 96), nn.Linear(96, 96), nn.Linear(96, 8)
        self.frozen.requires_grad_(False)
        self.unused: nn.Parameter | None = None
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.last(self.frozen(self.first(x)).relu())
        return made * self.scale


def both_ways() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {"layouts": [], "gradients": []}
    for plan in PLANS:
        torch.manual_seed(0)
        mine = Layers()
        theirs = copy.deepcopy(mine)
        mine.scale.fill_(rank + 1)  # of which rank 0's counts
        buckets = GradientBuckets(mine, plan, joined(), sends_buffers=True)
        ddp = replicate(theirs, plan, torch.device("cpu"), sends_buffers=False)
        assert isinstance(ddp, DistributedDataParallel)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
        buckets.send_buffers()
        mine(x).square().mean().backward()
        buckets.reduce()
        ddp(x).square().mean().backward()
        names = {parameter: name for name, parameter in theirs.named_parameters()}
        own = {parameter: name for name, parameter in mine.named_parameters()}
        theirs_layout = [[names[p] for p in b.parameters()] for b in ddp.reducer._get_zeros_like_grad_buckets()]
        found["layouts"].append((theirs_layout, [[own[p] for p in bucket] for bucket in buckets.layout]))
        found["gradients"].append(
            [(a.grad, b.grad) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True) if a.requires_grad]
        )
    mine.unused = nn.Parameter(torch.zeros(1))
    buckets = GradientBuckets(mine, plan, joined(), sends_buffers=False)
    try:
        buckets.reduce()
    except TaskError as error:
        found["told"] = str(error)
    return found


def test_gradient_buckets_are_bitwise_those_of_ddp() -> None:
    for found in run_ranks(both_ways, 3):
        for theirs, ours in found["layouts"]:
            assert ours == theirs
        assert len(found["layouts"][0][0]) == 1
        assert len(found["layouts"][2][0]) == 2
        for pairs in found["gradients"]:
            for ours, theirs in pairs:
                assert torch.equal(ours, theirs)
        assert "a parameter got no gradient on rank" in found["told"]


def scale_in_ddp() -> tuple[float, float]:
    """A buffer of each rank's own after DDP was made, and after a step of it."""
    module = Layers()
    module.scale.fill_(1.0 + torch.distributed.get_rank())
    replicated = replicate(module, PLANS[0], torch.device("cpu"), sends_buffers=True, is_alike=True)
    made = float(module.scale)
    replicated(torch.ones(2, 64)).sum().backward()
    return made, float(module.scale)


def test_ddp_made_within_a_run_sends_buffers_in_steps_only() -> None:
    assert run_ranks(scale_in_ddp, 2) == [(1.0, 1.0), (2.0, 1.0)]
