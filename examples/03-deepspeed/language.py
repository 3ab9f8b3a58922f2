"""What these examples share: a small language model, and text that comes with Python. Nothing here is parallel."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

BYTES, LENGTH = 256, 32


class LanguageModel(nn.Module):
    """Bytes (batch, length) in, the logits of each next byte (batch, length, 256) out."""

    def __init__(self, *, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1).bool(), persistent=False)

    def forward(self, ids):
        length = ids.size(1)
        x = self.bytes(ids) + self.places.weight[:length]
        return self.head(self.blocks(x, mask=self.mask[:length, :length]))


def make_model(**size: int) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**size)


def next_byte_loss(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def load_text(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Python's own help, cut into pairs of bytes and the bytes that follow them; 64 more of them are for the test."""
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pairs = ids.unfold(0, LENGTH + 1, LENGTH)
    chosen = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1))]
    train, test = chosen[64 : 64 + samples], chosen[:64]
    return TensorDataset(train[:, :-1], train[:, 1:]), TensorDataset(test[:, :-1], test[:, 1:])
