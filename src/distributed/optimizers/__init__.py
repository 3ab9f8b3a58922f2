"""Optimizers for large batches: LARS and LAMB, whose norms are those of whole parameters under every strategy.

>>> import torch
>>> layer = torch.nn.Linear(4, 2)
>>> optimizer = LAMB(layer.parameters(), lr=0.01, weight_decay=0.01)
>>> layer(torch.ones(1, 4)).sum().backward()
>>> optimizer.step()
"""

from __future__ import annotations

from distributed.optimizers.lamb import LAMB
from distributed.optimizers.lars import LARS

__all__ = ["LAMB", "LARS"]
