"""`.pt` files that name classes of another program, read so that none of these is imported, made or called.

What the pickle in such a file names becomes an inert stand-in that keeps what it is given and does nothing. Tensors are
records of where their elements lie; they are checked against the file, and only then mapped from the disk.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distributed.checkpoint.exchange.dcp import as_sizes
from distributed.checkpoint.format.tensors import DTYPES
from distributed.core.errors import CheckpointError

_MAX_PICKLE_BYTES = 256 * 2**20
_BLOCK_BYTES = 16 * 2**20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a file in a zip: its mark, and the lengths of its name and extra field
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_STORAGE_MODULES = ("torch", "torch.storage")


class Stored(NamedTuple):
    """A tensor that lies in a file; a tuple, so that nothing in the pickle can change it once it is checked."""

    record: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Inert:
    """In the place of an object of any class that is not known here."""

    args: tuple[Any, ...] = ()

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Inert:
        return Inert(*args)

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


class InertFile:
    """One file that torch.save wrote: `tree` is what it holds, `tensor` makes a tensor of a record in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sound: set[str] = set()  # storages whose bytes have been looked at
        self._mapped: Any = None  # the whole file as a storage, once it is needed
        try:
            self._size = path.stat().st_size
            self._records, pickled = self._open()
            self.tree = _Reader(pickled, self._records).load()
        except CheckpointError:
            raise
        except OSError as failed:
            raise CheckpointError(f"{path} cannot be read", why=failed.strerror or str(failed)) from failed
        except Exception as bad:  # a hostile pickle can raise anything
            why = f"{type(bad).__name__}: {str(bad)[:200]}"
            raise CheckpointError(f"{path} is not a sound file of torch.save", why=why, do="copy it again") from bad

    def tensor(self, stored: Stored) -> torch.Tensor:
        """Mapped privately: the file is not changed, and is read where the tensor is used."""
        empty = torch.empty(0, dtype=stored.dtype)
        if not stored.numel:
            return empty.reshape(stored.shape)
        start, length, _ = self._records[stored.record]
        self._check_bytes(stored.record)
        if self._mapped is None:
            self._mapped = torch.UntypedStorage.from_file(str(self.path), False, self._size)
        return empty.set_(self._mapped[start : start + length], stored.offset, stored.shape, stored.stride)

    def _check_bytes(self, record: str) -> None:
        """The bytes of a storage have the checksum that the zip has for them; looked at once."""
        start, length, wanted = self._records[record]
        if record in self._sound:
            return
        found = 0
        with open(self.path, "rb") as raw:
            raw.seek(start)
            for done in range(0, length, _BLOCK_BYTES):
                found = zlib.crc32(raw.read(min(_BLOCK_BYTES, length - done)), found)
        if found != wanted:
            why = f"the checksum of data/{record} in it is {found:08x} and should be {wanted:08x}"
            raise CheckpointError(f"{self.path} is damaged", why=why, do="copy it again")
        self._sound.add(record)

    def _open(self) -> tuple[dict[str, tuple[int, int, int]], bytes]:
        """Where the bytes of each tensor's storage begin, how many they are and their checksum; and the pickle."""
        if not zipfile.is_zipfile(self.path):
            raise ValueError("it is not a zip, as torch.save writes it since version 1.6")
        with zipfile.ZipFile(self.path) as archive, open(self.path, "rb") as raw:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if len(entries) != len(archive.infolist()) or "data.pkl" not in entries:
                raise ValueError("it holds no data.pkl, or a name twice")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise ValueError("it is compressed, and torch.save does not compress")
            order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
            if order.decode() != sys.byteorder:
                raise ValueError(f"its numbers are {order[:8]!r}-endian, those of this machine are not")
            if entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
                raise ValueError(f"its pickle has {entries['data.pkl'].file_size} bytes")
            places = {}
            for name, entry in entries.items():
                if name.startswith("data/"):
                    raw.seek(entry.header_offset)
                    mark, name_length, extra_length = _LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))
                    start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
                    if mark != b"PK\x03\x04" or start + entry.file_size > self._size:
                        raise ValueError(f"{name} lies outside of the file")
                    places[name.removeprefix("data/")] = (start, entry.file_size, entry.CRC)
            return places, archive.read(entries["data.pkl"])


class _Reader(pickle.Unpickler):
    """What a pickle gets for the names in it: a few functions of ours, types of numbers, and else stand-ins.

    All are new for each file, because a pickle may set attributes of what it is given.
    """

    def __init__(self, data: bytes, records: dict[str, tuple[int, int, int]]) -> None:
        super().__init__(io.BytesIO(data))
        _check_memo(data)

        class Ordered(dict[Any, Any]):
            def __setstate__(self, state: Any) -> None:  # a state dict's _metadata
                pass

        def rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *more: Any) -> Stored:
            record, dtype = storage
            if len(more) > 2 and isinstance(more[2], torch.dtype):  # _rebuild_tensor_v3 gives the type itself
                dtype = more[2]
            (offset,) = as_sizes((offset,))
            shape, stride = as_sizes(shape), as_sizes(stride)
            stride = tuple(1 if n == 1 else step for n, step in zip(shape, stride, strict=True))  # it has no meaning
            stored = Stored(str(record), dtype, offset, shape, stride)
            last = sum((n - 1) * step for n, step in zip(stored.shape, stored.stride, strict=True))
            # Nor may it have more elements than are there, as one with a stride of 0 has: it would fill our memory.
            needed = max(offset + last + 1, stored.numel) * dtype.itemsize
            if stored.numel and needed > records[stored.record][1]:
                raise ValueError(f"a tensor of {list(stored.shape)[:8]} does not fit into the bytes stored for it")
            return stored

        def first(tensor: Any, *_: Any) -> Any:
            return tensor

        def typed(function: Any, _: Any, args: Any, *__: Any) -> Any:
            return function(*args)  # one of these here or a stand-in: a pickle has no others

        self._known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): lambda items=(): Ordered(items),
            ("torch", "Size"): lambda items=(): tuple(items),
            ("torch._utils", "_rebuild_tensor_v2"): rebuild,
            ("torch._utils", "_rebuild_tensor_v3"): rebuild,
            ("torch._utils", "_rebuild_parameter"): first,
            ("torch._utils", "_rebuild_parameter_with_state"): first,
            ("torch._tensor", "_rebuild_from_type_v2"): typed,
        }
        self._known |= {("torch", name): dtype for name, dtype in DTYPES.items()}
        self._known |= {(module, name): dtype for name, dtype in _STORAGES.items() for module in _STORAGE_MODULES}

    def find_class(self, module: str, name: str) -> Any:
        known = self._known.get((module, name))
        return type("StandIn", (Inert,), {"named": f"{module}.{name}"}) if known is None else known

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise ValueError("it refers to something that is no tensor's storage")
        return key, dtype


def _check_memo(data: bytes) -> None:
    """A pickle numbers what it wants to come back to; for a number of ten digits Python would reserve the memory."""
    for code, value, _ in pickletools.genops(data):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and (value or 0) > len(data):
            raise ValueError(f"its pickle of {len(data)} bytes numbers {value} things")
