"""What these examples share: a small GPT, and text that comes with Python to train it on. Nothing here is parallel."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

VOCABULARY = 256  # tokens are bytes


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (batch, length) in, the logits of each next byte (batch, length, 256) out."""

    def __init__(self, *, width: int = 64, blocks: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits, target):
    """The mean over all bytes; every sample has as many, so it is the mean over the samples too."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def load_text(length: int = 64) -> tuple[TensorDataset, TensorDataset]:
    """Python's own help texts as samples of `length` bytes with the bytes that follow; every 20th is for the test."""
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    samples = ids[: (len(ids) - 1) // length * length + 1].unfold(0, length + 1, length)
    is_test = torch.arange(len(samples)) % 20 == 19
    train, test = samples[~is_test], samples[is_test]
    return TensorDataset(train[:, :-1], train[:, 1:]), TensorDataset(test[:, :-1], test[:, 1:])


@torch.no_grad()
def sample_text(model: GPT, prompt: str, count: int, *, seed: int = 0) -> str:
    """Let a model that is whole continue a text."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        chances = (model.eval()(ids[:, -model.length :])[0, -1] / 0.6).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)[None]], 1)
    return bytes(ids[0].tolist()).decode(errors="replace")
