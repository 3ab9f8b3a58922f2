"""The networks that are measured beside GPT: plain PyTorch, in the shapes of MLPerf's families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from distributed.bench.workloads.gpt import GptSize


def make_mlp(widths: Sequence[int]) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_convnet(width: int = 32, classes: int = 10) -> nn.Sequential:
    """For images of one channel and 28 × 28 points."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 49, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, classes),
    )


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1, around which the input goes; the stride is in the middle, as MLPerf has it (v1.5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        nn.init.zeros_(self.norm3.weight)  # so that a block begins as the identity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """With the sizes that are given here, ResNet-50."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            blocks = []
            for number in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = 4 * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


class BertLayer(nn.Module):
    """Norms come after the sums, as in BERT. No dropout, so that contenders can be compared number for number."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.num_heads = size.heads
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.fc1, self.fc2 = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.proj(mixed.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.fc2(functional.gelu(self.fc1(x))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Predicts the tokens at the positions that were masked, and only those; the head is the embedding."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.layers = nn.ModuleList([BertLayer(size) for _ in range(size.blocks)])
        self.transform, self.head_norm = nn.Linear(size.width, size.width), nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        chosen = x.gather(1, masked.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        return self.head(self.head_norm(functional.gelu(self.transform(chosen))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DlrmSize:
    tables: tuple[int, ...]  # rows of each
    width: int  # of an embedding
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int
    dense: int = 13

    @property
    def pairs(self) -> int:
        """Of the embeddings and the bottom's output, each with each other."""
        count = len(self.tables) + 1
        return count * (count - 1) // 2

    @property
    def layers(self) -> tuple[list[int], list[int]]:
        return [self.dense, *self.bottom, self.width], [self.width + self.pairs, *self.top, 1]


class Dlrm(nn.Module):
    """Products of each two of the categories' embeddings and of what the bottom makes of the numbers, into the top."""

    def __init__(self, size: DlrmSize) -> None:
        super().__init__()
        bottom, top = size.layers
        self.tables = nn.ModuleList([nn.Embedding(rows, size.width) for rows in size.tables])
        self.bottom, self.top = nn.Sequential(*make_mlp(bottom), nn.ReLU()), make_mlp(top)
        for table, rows in zip(self.tables, size.tables, strict=True):
            nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)  # type: ignore[arg-type]
        count = len(size.tables) + 1
        self.register_buffer("below", torch.tensor([a * count + b for a in range(count) for b in range(a)]))

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        low = self.bottom(numbers)
        looked_up = [table(categories[:, at]).to(low.dtype) for at, table in enumerate(self.tables)]
        features = torch.stack([low, *looked_up], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([low, products.index_select(1, self.below)], 1)).squeeze(1)  # type: ignore
