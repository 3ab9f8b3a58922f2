"""A GPT as people write it, in the sizes that are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class GptSize:
    """Of the model and of a batch."""

    blocks: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 50304


SIZES = {
    "tiny": GptSize(2, 64, 2, 32, 4, 256),
    "124m": GptSize(12, 768, 12, 1024, 64),
    "1.3b": GptSize(24, 2048, 16, 1024, 16),
}


class Block(nn.Module):
    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.num_heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.fc1, self.fc2 = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Returns its loss; the head is the embedding."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.blocks)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def flops_per_token(model: nn.Module, size: GptSize) -> float:
    """Of forward and backward: six for each parameter, and attention's products."""
    return 6.0 * sum(p.numel() for p in model.parameters()) + 12.0 * size.blocks * size.width * size.length
