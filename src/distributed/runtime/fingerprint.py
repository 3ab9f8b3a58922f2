"""Fingerprints of tensors: one pass over memory, next to none taken, and no wait for the device.

They find differences, not forgeries.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import torch

_COLUMNS = 128  # of eight bytes each, which a fingerprint distinguishes
_RAW_BYTES = 1 << 16  # up to this size a tensor's own bytes are summed up by zlib


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """One number of a tensor's bytes, on its device: nothing waits for it. Equal bytes give equal numbers.

    >>> bool(fingerprint(torch.ones(3000)) == fingerprint(torch.ones(3000)))
    True
    >>> bool(fingerprint(torch.arange(3000)) == fingerprint(torch.arange(3000).flip(0)))
    False
    """
    raw = _bytes_of(tensor)
    if raw.device.type == "cpu" and raw.numel() <= _RAW_BYTES:
        return torch.tensor(zlib.crc32(raw.numpy().data))
    return _folded([raw])[0]


def fingerprints(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The fingerprint of each tensor, on one device: for tensors on a GPU in few kernels, however many tensors.

    >>> fingerprints([torch.ones(3), torch.zeros(3)], torch.device("cpu")).shape
    torch.Size([2])
    """
    on_gpu = tuple(at for at, tensor in enumerate(tensors) if tensor.device.type != "cpu")
    numbers = [0 if tensor.device.type != "cpu" else int(fingerprint(tensor)) for tensor in tensors]
    found = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
    if on_gpu:
        found[numbers_on(device, on_gpu)] = _folded([_bytes_of(tensors[at]) for at in on_gpu])
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().contiguous().view(-1)
    if plain.is_complex():
        plain = torch.view_as_real(plain).view(-1)
    raw = plain.view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw


def _folded(raws: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number of each: of its whole rows, one kernel a tensor, and of what is left, together."""
    device, row = raws[0].device, 8 * _COLUMNS
    wholes = [raw.numel() // row * row for raw in raws]
    factors = _factors(device)
    sums = [raw[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0) for raw, whole in zip(raws, wholes, strict=True)]
    numbers = (torch.stack(sums) * factors[:_COLUMNS]).sum(1)
    rests = [raw[whole:] for raw, whole in zip(raws, wholes, strict=True)]
    sizes = tuple(rest.numel() for rest in rests)
    if not any(sizes):
        return numbers
    owners, columns = _places(sizes, device)
    return numbers.index_add_(0, owners, torch.cat(rests).to(torch.int64) * factors[columns])


@functools.lru_cache(maxsize=64)
def _places(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every byte in a row of pieces: the piece that it is in, and its place there."""
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    columns = torch.cat([torch.arange(size) for size in sizes])
    return owners.to(device), columns.to(device)


@functools.lru_cache(maxsize=64)
def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> torch.Tensor:
    """Numbers that are the same in most comparisons, sent to the device once; not to be written to."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers that distinguish the columns of a fold."""
    drawn = torch.randint(1, 2**62, (8 * _COLUMNS,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)
