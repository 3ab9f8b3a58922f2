"""A digest of what is read of a stream: some of its samples by their places, so that ranks and runs can be compared.

It is a sum, so it does not hang on how the samples are put into batches. It looks at the first samples of an epoch and
then at one of a few, and at some elements of each: a stream that was shuffled otherwise differs in nearly all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

_ALL_UNTIL = 64  # samples from the beginning that are all looked at
_ONE_OF = 64  # and later ones
_ELEMENTS = 64  # of a tensor, evenly spaced
_ITEMS = 64  # of a list or a dict
_MODULUS = 2**61
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_BROKEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_KINDS = frozenset((*_WHOLE, *_BROKEN))  # of tensors whose elements are looked at


class StreamDigest:
    """Of one reader of a stream, from its first sample on."""

    def __init__(self, worker: int) -> None:
        self._worker, self._place = worker, 0

    def add(self, samples: list[Any]) -> int:
        """The part of these, which come next."""
        first, self._place = self._place, self._place + len(samples)
        places = (p for p in range(first, self._place) if p < _ALL_UNTIL or p % _ONE_OF == 0)
        return total_digest(*(sample_digest(samples[p - first], f"{self._worker}/{p}") for p in places))


def total_digest(*digests: int) -> int:
    return sum(digests) % _MODULUS


def sample_digest(sample: Any, place: str = "") -> int:
    """61 bits of a sample: of its tensors, arrays, numbers and texts, wherever they are in it.

    >>> sample_digest([torch.ones(3), "a"]) == sample_digest([torch.ones(3), "a"])
    True
    >>> sample_digest([torch.ones(3), "a"]) == sample_digest([torch.ones(3), "b"])
    False
    """
    mixed = hashlib.blake2b(place.encode(), digest_size=8)
    for part in _bytes_of(sample):
        mixed.update(part)
    return int.from_bytes(mixed.digest(), "little") % _MODULUS


def _bytes_of(value: Any) -> Iterable[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.layout is torch.strided and value.device.type == "cpu" and value.dtype in _KINDS:
            yield _some(value).tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield repr(_spaced(value).tolist()).encode() if value.dtype.hasobject else _spaced(value).tobytes()
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:_ITEMS]:
            yield repr(key).encode()
            yield from _bytes_of(item)
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for item in value[:_ITEMS]:
            yield from _bytes_of(item)
    elif isinstance(value, str | int | float | complex | bytes | bool | np.generic | None):
        yield repr(value).encode()
    else:  # its repr may hold an address
        yield type(value).__name__.encode()


def _some(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return _spaced(plain.view(torch.int16).numpy() if plain.dtype is torch.bfloat16 else plain.numpy())


def _spaced(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _ELEMENTS)][: _ELEMENTS + 1]
