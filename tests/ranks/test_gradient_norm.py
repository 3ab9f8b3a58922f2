"""The norm and the mean of gradients over ranks that hold parts, copies, or nothing of a parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distributed.strategies.data_parallel.gradient_norm import GradientNorm
from distributed.strategies.gradient_sums import mean_gradients, sum_gradients
from distributed.strategies.placement import Layout
from distributed.testing import run_ranks
from tests.meshes import joined

RANKS = 2


class Parts(nn.Module):
    """Of `cut` each rank has its half, of `copied` all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.copied = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))


def clip(max_norm: float) -> tuple[float, list[float]]:
    """The norm of the whole gradient (1, 2, 3, 4 | 2, 2, 2) and this rank's part of it after clipping."""
    model = Parts()
    model.cut.grad = torch.tensor([1.0, 2.0]) + 2 * dist.get_rank()
    model.copied.grad = torch.full((3,), 2.0)
    copies = {"cut": 1, "copied": RANKS}
    gradient = GradientNorm(dict(model.named_parameters()), Layout(model), copies.__getitem__, joined())
    norm = gradient.clip(max_norm)
    return norm.item(), [*model.cut.grad.tolist(), *model.copied.grad.tolist()]


def reduce() -> list[list[float]]:
    """Rank 1 has no gradient of the second parameter."""
    group = dist.distributed_c10d._get_default_group()
    found = []
    for reduced in (mean_gradients, sum_gradients):
        model = Parts()
        model.cut.grad = torch.tensor([1.0, 2.0]) + 2 * dist.get_rank()
        model.copied.grad = None if dist.get_rank() else torch.full((3,), 2.0)
        reduced("test", model.parameters(), joined(), group)
        assert model.copied.grad is not None
        found.append([*model.cut.grad.tolist(), *model.copied.grad.tolist()])
    return found


def everything() -> tuple[list[tuple[float, list[float]]], list[list[float]]]:
    return [clip(3.0), clip(100.0)], reduce()


def test_sharded_gradients_are_clipped_by_the_global_norm() -> None:
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0, 2.0, 2.0, 2.0])
    norm = whole.norm().item()
    for rank, (clipped, reduced) in enumerate(run_ranks(everything, RANKS)):
        mine = torch.cat([whole[2 * rank : 2 * rank + 2], whole[4:]])
        for (found, gradient), factor in zip(clipped, (3.0 / norm, 1.0), strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(norm))
            torch.testing.assert_close(torch.tensor(gradient), mine * factor)
        assert reduced == [[2.0, 3.0, 1.0, 1.0, 1.0], [4.0, 6.0, 2.0, 2.0, 2.0]]
