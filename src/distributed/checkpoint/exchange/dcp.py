"""torch.distributed.checkpoint directories, read without running code.

torch (2.13) reads their `.metadata` with pickle.load, which lets a file run anything. Here the pickle may name only the
few records that DCP itself writes, and gets inert stand-ins for them; any other name is refused.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from distributed.checkpoint.exchange.pt import load_weights
from distributed.checkpoint.format.tensors import DTYPES
from distributed.checkpoint.storage.files import check_name
from distributed.core.errors import CheckpointError

METADATA = ".metadata"
_MAX_METADATA_BYTES = 256 * 2**20
_MAX_PIECES = 4096
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # before torch 2.3
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


@dataclass(frozen=True)
class DcpPiece:
    """A box of a tensor, and where in which file it lies as a saved tensor of its own."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor that has not been read yet."""

    folder: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[DcpPiece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for piece in self.pieces:
            path = os.path.join(self.folder, piece.file)
            try:
                with open(path, "rb") as file:
                    file.seek(piece.start)
                    data = file.read(piece.length)
            except OSError as failed:
                raise CheckpointError(f"{path} cannot be read", why=failed.strerror or str(failed)) from failed
            part = load_weights(io.BytesIO(data), f"{path} (of {self.name})", len(data))
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != piece.sizes or part.dtype != self.dtype:
                raise _damaged(self.folder, f"a piece of {self.name} is not the tensor that is announced")
            box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
            whole[box] = part
        return whole


def read_dcp(folder: Path, *, trust: bool = False) -> dict[Any, Any]:
    """The tree that was saved, with tensors that are read later; what is no tensor is None."""
    try:
        metadata = _read_metadata(folder, trust)
        found: dict[str, DcpTensor | None] = {}
        places: dict[tuple[str, tuple[int, ...]], Any] = {}
        for index, info in metadata.storage_data.items():
            places[str(index.fqn), as_sizes(getattr(index, "offset", None) or ())] = info
        for name, stored in metadata.state_dict_metadata.items():
            found[str(name)] = _tensor(folder, str(name), stored, places) if hasattr(stored, "chunks") else None
        return _nest(found, metadata.planner_data)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as bad:
        raise _damaged(str(folder), f"{type(bad).__name__}: {bad}") from bad


def _tensor(folder: Path, name: str, stored: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> DcpTensor:
    dtype, shape = stored.properties.dtype, as_sizes(stored.size)
    if dtype not in DTYPES.values():
        raise _damaged(str(folder), f"{name} has the type {dtype}")
    pieces = []
    for chunk in stored.chunks:
        offsets, sizes = as_sizes(chunk.offsets), as_sizes(chunk.sizes)
        if not len(offsets) == len(sizes) == len(shape) or any(
            at + size > length for at, size, length in zip(offsets, sizes, shape, strict=True)
        ):
            raise _damaged(str(folder), f"a piece of {name} lies outside of it")
        info = places.get((name, offsets)) or places[name, ()]
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{folder} was written with a transformation of its files, which cannot be undone here",
                do="load it with torch.distributed.checkpoint, and save it without",
            )
        (start, length) = as_sizes((info.offset, info.length))
        file = check_name(info.relative_path)
        try:
            held = os.path.getsize(folder / file)
        except OSError as failed:
            raise _damaged(str(folder), f"{file}: {failed.strerror}") from failed
        needed = math.prod(sizes) * dtype.itemsize
        if start + length > held or needed > length:  # so that no number here makes us allocate more than is stored
            raise _damaged(str(folder), f"{name} needs {needed} bytes, and {file} does not have them")
        pieces.append(DcpPiece(offsets, sizes, file, start, length))
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape) or _overlap(pieces):
        raise _damaged(str(folder), f"the pieces of {name} do not make up the whole")
    return DcpTensor(str(folder), name, dtype, shape, tuple(pieces))


def _overlap(pieces: list[DcpPiece]) -> bool:
    if len(pieces) > _MAX_PIECES:
        return True
    return any(
        all(a < b + n and b < a + m for a, m, b, n in zip(x.offsets, x.sizes, y.offsets, y.sizes, strict=True))
        for x, y in combinations([piece for piece in pieces if math.prod(piece.sizes)], 2)
    )


def _nest(found: Mapping[str, DcpTensor | None], paths: Any) -> dict[Any, Any]:
    """DCP writes {"model": {"w": …}} as model.w and keeps the path beside it."""
    tree: dict[Any, Any] = {}
    for name, value in found.items():
        path = paths.get(name) if isinstance(paths, dict) else None
        *above, last = path if isinstance(path, tuple) and path else (name,)
        inner = tree
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def _read_metadata(folder: Path, trust: bool) -> Any:
    path = folder / METADATA
    if trust:
        return FileSystemReader(folder).read_metadata()
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise _damaged(str(folder), f"{METADATA} has {path.stat().st_size} bytes")
        data = path.read_bytes()
    except OSError as failed:
        raise CheckpointError(f"{path} cannot be read", why=failed.strerror or str(failed)) from failed
    try:
        return _Reader(io.BytesIO(data), str(path)).load()
    except CheckpointError:
        raise
    except Exception as bad:  # a hostile pickle can raise anything
        raise _damaged(str(folder), f"{METADATA}: {type(bad).__name__}: {bad}") from bad


class _Reader(pickle.Unpickler):
    """All that a pickle can call here are the stand-ins, which only keep what they are given."""

    def __init__(self, stream: io.BytesIO, where: str) -> None:
        super().__init__(stream)
        self._where = where
        # New ones for each file: a pickle may set attributes of the classes that it is given.
        self._records = {key: type(key[1], (_Record,), {}) for key in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._records:
            return self._records[module, name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in (("torch", "Size"), ("builtins", "tuple")):
            return lambda items=(): tuple(items)
        if (module, name) == ("collections", "OrderedDict"):
            return lambda items=(): dict(items)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return lambda *parts: "/".join(map(str, parts))
        if (module, name) == ("torch.serialization", "_get_layout") or name.endswith("MEM_FORMAT_ENCODING"):
            return lambda *value: value
        raise CheckpointError(
            f"{self._where} names {module}.{name}, which no plain torch checkpoint does",
            why="the file is a pickle, and what a pickle names could run code; so nothing of it was read",
            do="only if you trust who made it: add --trust, which lets it run code",
        )


class _Record:
    """Keeps the attributes of one of DCP's records."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.dtype = state[0]  # of TensorProperties, whose state is a tuple


def as_sizes(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**60 for n in numbers):
        raise ValueError(f"{str(numbers)[:60]} are not sizes")
    return numbers


def _damaged(folder: str, why: str) -> CheckpointError:
    return CheckpointError(f"{folder} is not a sound torch checkpoint", why=why[:300], do="use another one")
