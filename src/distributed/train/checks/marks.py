"""Marks: what one value is now, in a form that can be compared later, without running code of the user's."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import hashlib
import operator
import pathlib
import random
import re
import types
import uuid
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

BYTES = 64 << 20  # of arrays and of tensors of the host that a look reads, each
_NUMBERS = (bool, int, complex, str, bytes, type(None), range)
_VALUES = (decimal.Decimal, fractions.Fraction, uuid.UUID, datetime.date, datetime.time, datetime.timedelta)
_RAW = (bytearray, memoryview, array.array)
_OF_ONE_BYTE, _OF_MORE = torch.uint8, {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Drawn(NamedTuple):
    """Of a random generator: where it stands."""

    state: bytes


class TensorMark(NamedTuple):
    """Of a tensor: which it is, where it lies, how often it was written to, and what its bits add up to."""

    identity: int
    place: int
    needs_grad: bool
    version: int = 0
    total: Any = None  # a tensor of one number, which a device may still be computing


class TooLarge(Exception):
    """There is more than a look reads."""


class Marker:
    """Marks of the values of one look, within its bounds. `own`: the tensors that a step is known to change."""

    def __init__(self, own: frozenset[int]) -> None:
        self._own = own
        self._left_on_host = self._left_in_arrays = BYTES

    def mark(self, value: Any) -> Any:
        """What the value is now; None: nothing that could change, or something that has parts instead."""
        kind = type(value)
        if kind is float:
            return kind, value if value == value else "nan"
        if kind in _NUMBERS:
            return kind, value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return None if value.dtype.hasobject else (kind, value.dtype.str, value.shape, self._array(value))
        if isinstance(value, enum.Enum):
            return kind, value.name
        if isinstance(value, _RAW):
            return kind, _digest(bytes(value))
        if isinstance(value, _VALUES) or kind in (torch.Size, torch.dtype, torch.device):
            return kind, str(value)
        if isinstance(value, pathlib.PurePath | re.Pattern):
            return kind, repr(value)
        return _drawn(value)

    def _array(self, value: Any) -> bytes:
        self._left_in_arrays -= value.nbytes
        if self._left_in_arrays < 0:
            raise TooLarge
        return _digest(value.tobytes())

    @torch.no_grad()
    def _tensor(self, value: torch.Tensor) -> TensorMark:
        identity, needs_grad = id(value), value.requires_grad
        place = version = 0
        with suppress(RuntimeError, NotImplementedError):  # it has no memory of its own
            place = value.data_ptr()
        if identity in self._own:
            return TensorMark(identity, place, needs_grad)
        with suppress(RuntimeError):  # one of inference has no versions
            version = value._version
        return TensorMark(identity, place, needs_grad, version, self._total(value) if place else None)

    def _total(self, value: torch.Tensor) -> torch.Tensor | None:
        """Also what is written past torch's count of versions, through `.data`, changes it. Waits for no device."""
        if value.layout != torch.strided or value.is_quantized:
            return None
        if value.device.type == "cpu":
            self._left_on_host -= value.numel() * value.element_size()
            if self._left_on_host < 0:
                return None
        with suppress(RuntimeError, NotImplementedError):  # of a kind whose bits torch does not show
            plain = torch.view_as_real(value) if value.is_complex() else value
            plain = plain.detach().resolve_neg()
            dtype = _OF_MORE.get(plain.element_size(), _OF_ONE_BYTE)
            return plain.view(dtype).sum(dtype=torch.int64)
        return None


def same(was: Any, now: Any) -> bool:
    """Whether two marks are of one value."""
    if not (isinstance(was, TensorMark) and isinstance(now, TensorMark)):
        return bool(was == now)
    if was[:4] != now[:4] or (was.total is None) != (now.total is None):
        return False
    return was.total is None or bool(was.total == now.total)


def iterator_mark(value: Any) -> Any:
    """Of an iterator of Python's own: how much is left; None: not known."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else frame.f_lasti
    if type(value).__name__ in ("count", "repeat"):
        return repr(value)
    left = operator.length_hint(value, -1) if hasattr(type(value), "__length_hint__") else -1
    return None if left < 0 else left


def _drawn(value: Any) -> Drawn | None:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Drawn(_digest(repr(random.Random.getstate(value)).encode()))
    if isinstance(value, np.random.Generator):
        return Drawn(_digest(repr(value.bit_generator.state).encode()))
    if isinstance(value, np.random.BitGenerator):
        return Drawn(_digest(repr(value.state).encode()))
    if isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state()
        return Drawn(_digest(repr((kind, np.asarray(keys).tobytes(), *rest)).encode()))
    if isinstance(value, torch.Generator):
        return Drawn(_digest(value.get_state().numpy().tobytes()))
    return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
