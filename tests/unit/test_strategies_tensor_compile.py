"""Blocks with cut layers are compiled once for all equal blocks, however many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from distributed.strategies.model.compilation import compile_blocks
from distributed.strategies.tensor.forwards import patch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Held:
    """As the forwards of modules that hold cut layers: an object for each module, around its own forward."""

    def __init__(self, m: nn.Module) -> None:
        self._forward = m.forward

    def __call__(self, *args: Any) -> Any:
        return self._forward(*args)


def cut(layer: nn.Linear) -> None:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, layer.bias)

    patch(layer, multiply, compiles=False)


def stack(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


@pytest.fixture
def graphs() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize("blocks", [2, 12])
def test_equal_blocks_with_cut_layers_share_compiled_code(blocks: int, graphs: Any) -> None:
    plain, model = stack(blocks), stack(blocks)
    for block in model:
        assert isinstance(block, Block)
        cut(block.up)
        cut(block.down)
        patch(block, Held(block), compiles=True)
    compile_blocks(model, backend="eager")
    x = torch.randn(3, 4, requires_grad=True)  # as between two blocks
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))
    assert graphs() == 3  # before, between and after the cut layers
