"""Stages: how blocks are shared out, what a rank keeps of a model, and which models a pipeline refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.errors import PlanError
from distributed.strategies.pipeline.interception import Interception, StageEnd
from distributed.strategies.pipeline.stages import balance, cut, find_sides
from distributed.strategies.placement import Layout

CPU = torch.device("cpu")


class Chain(nn.Module):
    """Held in another order than it is used in."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.embedding = nn.Embedding(8, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Nested(Chain):
    """Calls in calls: what is written first is used last."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)
        self.layers = nn.Sequential(*self.layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


class Skipping(Chain):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = begun = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + begun))


class Conditioned(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
            return self.linear(x + condition)

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(8, 4), nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = condition = self.embedding(ids)
        for block in self.blocks:
            x = block(x, condition)
        return x


class Twice(Chain):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(x)


class Hidden(Chain):
    """Its forward does not say that the head, which is held before the blocks, comes after them."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.finish(self.begin(ids))

    def begin(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def stage_of(model: nn.Module, stage: int, stages: int = 2) -> tuple[Interception, Layout]:
    layout = Layout(model)
    return Interception(model, layout, cut(model, stages), [stage], CPU), layout


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    "costs", [[1.0] * 6, [9, 1, 1, 1, 1, 5], [1, 2, 3, 4, 5, 6], [6, 1, 6, 1, 6, 1], [1, 1, 1, 2, 5, 1]]
)
def test_stage_balance_minimises_the_largest_stage(costs: list[float], parts: int) -> None:
    found = balance(costs, parts)
    assert [at for part in found for at in part] == list(range(len(costs)))
    assert all(found)
    bounds = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), parts - 1)]
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(bound)) for bound in bounds)
    assert max(sum(costs[at] for at in part) for part in found) == best


def test_layers_outside_the_blocks_count_for_the_end_stages() -> None:
    model = Chain(6)
    model.head = nn.Linear(4, 20)  # as large as five blocks
    assert [len(part) for part in cut(model, 2)] == [5, 1]


def test_sides_of_nested_modules_are_found() -> None:
    sides = find_sides(Nested(), "layers")
    assert (sides["embedding"].before, sides["embedding"].after) == (True, False)
    assert (sides["head"].before, sides["head"].after) == (False, True)


def test_models_without_enough_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="no stack of blocks"):
        cut(nn.Linear(2, 2), 2)
    with pytest.raises(PlanError, match="at most 4 stages"):
        cut(Chain(4), 5)


def test_tied_weights_between_inner_stages_are_refused_by_name() -> None:
    model = Chain(4)
    model.layers[2].weight = model.layers[0].weight
    with pytest.raises(PlanError, match=r"layers\.0\.weight and layers\.2\.weight"):
        stage_of(model, 0, 4)
    stage_of(model, 0, 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rank_keeps_its_stage_and_each_tensor_is_stored_once(device: str) -> None:
    with torch.device(device):
        first, last = Chain(), Chain()
    names = [name for name, _ in [*first.named_parameters(), *first.named_buffers()]]
    tensors = dict([*first.named_parameters(), *first.named_buffers()])
    layouts = [stage_of(first, 0)[1], stage_of(last, 1)[1]]
    assert {name.split(".")[0] for name, _ in first.named_parameters()} == {"embedding", "layers"}
    assert [name for name, _ in last.named_parameters() if "layers" not in name] == [
        "head.weight", "head.bias", "norm.weight", "norm.bias"
    ]  # fmt: skip
    assert first.head.weight.is_meta
    assert len(first.layers) == len(last.layers) == 4
    for name in names:
        stored = [layout for layout in layouts if layout.is_here(name) and layout.shard(name, tensors[name]).stores]
        assert len(stored) == 1, name
    assert last.shift.device.type == device
    assert layouts[1].is_here("shift")
    assert not layouts[0].is_here("norm.running_mean")


def test_two_stages_in_sequence_match_the_whole_model() -> None:
    whole = Chain()
    first, last = Chain(), Chain()
    for model in (first, last):
        model.load_state_dict(whole.state_dict())
    parts = [stage_of(first, 0)[0], stage_of(last, 1)[0]]
    ids = torch.arange(6)
    with parts[0].at(0, None), pytest.raises(StageEnd) as left:
        first(ids)
    with parts[1].at(1, left.value.hidden):
        found = last(ids)
    torch.testing.assert_close(found, whole(ids))


def test_stages_needing_more_than_the_hidden_state_are_refused() -> None:
    def run(model: Any, stage: int = 1) -> Any:
        parts, _ = stage_of(model, stage)
        with parts.at(stage, torch.zeros(6, 4, requires_grad=True) if stage else None):
            return model(torch.arange(6))

    with pytest.raises(PlanError, match="the output of embedding in more places"):
        run(Skipping()).sum().backward()
    with pytest.raises(PlanError, match="more places than the first block"):
        run(Conditioned())
    with pytest.raises(PlanError, match="out of order, or twice"):
        run(Twice())
    with pytest.raises(PlanError, match=r"uses head after its blocks.*\n.*\n.*assign head after 'layers'"):
        run(Hidden())
