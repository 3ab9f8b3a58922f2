"""A language model that returns logits and loss."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn


@dataclass
class ModelArgs:
    n_layer: int
    n_embd: int
    vocab_size: int
    block_size: int
    dropout: float


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.n_embd)
        self.drop = nn.Dropout(args.dropout)
        self.layers = nn.GRU(args.n_embd, args.n_embd, args.n_layer, batch_first=True)
        self.head = nn.Linear(args.n_embd, args.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        logits = self.head(self.layers(self.drop(self.embedding(idx)))[0])
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
