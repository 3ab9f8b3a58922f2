"""Dropout on ranks that share the work on the same samples: equal on what each has, independent in their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed.core.errors import PlanError
from distributed.strategies.context.context_parallel import ContextParallel
from distributed.strategies.model.recompute import recompute
from distributed.strategies.placement import Layout
from distributed.strategies.tensor.plans import find_styles
from distributed.strategies.tensor.tensor_parallel import TensorParallel
from distributed.testing import run_ranks
from tests.meshes import joined

SAMPLES, LENGTH, WIDTH = 500, 8, 16


class Units(nn.Module):
    """Counts the hidden units that dropout has left of its 8; then drops what every rank has."""

    def __init__(self, after: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(4, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 4, bias=False)
        self.after = nn.Dropout(after)
        nn.init.constant_(self.fc1.weight, 0.25)
        nn.init.constant_(self.fc2.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.fc2(self.drop(self.fc1(x))))


class Block(nn.Module):
    """An attention and a residual that drop elements, and a depth that drops samples."""

    def __init__(self, within: str = "") -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.linear2(F.dropout(self.linear1(x).relu(), 0.2, self.training))
        if self.within == "checkpoint":
            return checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
        if not self.training:
            return x
        element = F.dropout(torch.ones_like(x), 0.5)
        sample = torch.empty(len(x), 1, 1).bernoulli_(0.5)
        noise = torch.randn(x.shape)
        self.seen = element.detach(), sample, noise
        return x * element * (0.5 + sample) + 0.1 * noise


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def cut(model: nn.Module, *, sequence: bool = False) -> TensorParallel:
    world = dist.group.WORLD
    assert world is not None
    return TensorParallel(model, Layout(model), world, find_styles(model, 2), joined(), sequence=sequence)


def gathered(value: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.detach().contiguous())
    return found


def is_same(value: torch.Tensor) -> bool:
    one, other = gathered(value)
    return bool(torch.equal(one, other))


def units() -> dict[str, Any]:
    model = Stack([Units(), Units(0.5)])
    tensor = cut(model)
    counts, dropped = model.layers[0], model.layers[1]
    counts(torch.ones(SAMPLES, 4))  # which tries the cut
    torch.manual_seed(11)
    left = counts(torch.ones(SAMPLES, 4))
    again = counts(torch.ones(SAMPLES, 4))
    after = dropped(torch.ones(SAMPLES, 4))
    tensor.check_streams(torch.device("cpu"))
    torch.manual_seed(11)
    repeated = counts(torch.ones(SAMPLES, 4))
    model.eval()
    state = torch.get_rng_state()
    whole = counts(torch.ones(2, 4))
    return {
        "variance": left[:, 0].var().item(),
        "mean": left[:, 0].mean().item(),
        "same on ranks": is_same(left) and is_same(after) and is_same(torch.get_rng_state()),
        "another mask": not torch.equal(left, again),
        "by the seed": torch.equal(left, repeated),
        "evaluation draws nothing": torch.equal(state, torch.get_rng_state()) and bool((whole == 4).all()),
    }


def gradient_of(model: nn.Module, *, again: bool) -> torch.Tensor:
    if again:
        recompute(model, "full")
    x = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    torch.manual_seed(7)
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def blocks(kind: str, *, again: bool = False) -> Any:
    """A stack of blocks on two ranks; the gradient of its input."""
    torch.manual_seed(0)
    model = Stack([Block(), Block()])
    if kind == "context":
        if again:
            recompute(model, "full")
        assert dist.group.WORLD is not None
        ContextParallel(model, dist.group.WORLD, joined())
        return model, gradient_of(model, again=False)
    cut(model, sequence=kind == "sequence")
    with torch.no_grad():
        model(torch.zeros(3, LENGTH, WIDTH))  # which tries the cut
    return model, gradient_of(model, again=again)


def masks(kind: str) -> dict[str, bool]:
    model, gradient = blocks(kind)
    element, sample, noise = model.layers[1].seen
    _, other = blocks(kind, again=True)
    total, repeated = gradient.clone(), other.clone()
    if kind == "context":  # each has the gradient of its part
        dist.all_reduce(total)
        dist.all_reduce(repeated)
    return {
        "elements are the same": is_same(element),
        "noise is the same": is_same(noise),
        "samples are the same": is_same(sample),
        "state is the same": is_same(torch.get_rng_state()),
        "the same again": bool(torch.allclose(total, repeated, atol=1e-5)),
    }


def refused(kind: str) -> str:
    model = Stack([Block(kind), Block(kind)]) if kind != "channels" else Stack([Units(), Units()])
    try:
        if kind != "channels":
            if kind == "statistics":
                model.layers[1].norm = nn.BatchNorm1d(WIDTH)
            assert dist.group.WORLD is not None
            ContextParallel(model, dist.group.WORLD, joined())
            model(torch.randn(3, LENGTH, WIDTH))
        else:
            model.layers[0].drop = nn.Dropout1d(0.5)
            cut(model)
    except PlanError as error:
        return str(error)
    return ""


def everything() -> dict[str, Any]:
    kinds = ("tensor", "sequence", "context")
    return {
        "units": units(),
        **{kind: masks(kind) for kind in kinds},
        "checkpoint": refused("checkpoint"),
        "channels": refused("channels"),
        "statistics": refused("statistics"),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


def test_dropout_masks_of_sharded_units_are_independent(ranks: list[dict[str, Any]]) -> None:
    """Of 8 units, each left by a half: a variance of 2. Two equal masks of 4 units would have 4."""
    for rank in ranks:
        found = dict(rank["units"])
        assert 1.6 < found.pop("variance") < 2.5
        assert 3.75 < found.pop("mean") < 4.25
        assert all(found.values()), found


@pytest.mark.parametrize("kind", ["tensor", "sequence", "context"])
def test_dropout_masks_are_equal_on_replicated_activations(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        is_whole = kind == "tensor"
        assert rank[kind] == {
            "elements are the same": is_whole,
            "noise is the same": is_whole,
            "samples are the same": True,
            "state is the same": True,
            "the same again": True,
        }


def test_dropout_in_unsupported_layers_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "torch.utils.checkpoint" in rank["checkpoint"]
        assert "layers.0.drop" in rank["channels"]
        assert "BatchNorm1d" in rank["statistics"]
