"""A batch of any structure onto this rank's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device; other objects are moved by their own `.to`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(item, device) for item in batch)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict or not hasattr(batch, "to") else batch.to(device)  # HF's BatchEncoding
    return batch.to(device) if hasattr(batch, "to") else batch
