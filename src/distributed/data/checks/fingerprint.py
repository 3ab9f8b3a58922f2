"""Fingerprints of a dataset, part by part, by which ranks and resumed runs see whether they have built the same.

No sample is read: a class of the user's own may draw, count or download in `__getitem__`. Looked at are lengths, the
indices of a Subset, tensors of a TensorDataset, and attributes with one number or name for each sample; of large ones
some rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.weak import WeakTensorKeyDictionary

from distributed.data.checks.stream_digest import sample_digest
from distributed.data.loading.dali import DaliBatches
from distributed.data.source import Source, reader_of

_LOOKS = 1024  # entries of what has one for each sample, evenly spaced
_ROWS = 16  # of a tensor
_WHOLE_BYTES = 16 << 20  # up to which all of a tensor is looked at
_DEEPEST = 8  # datasets within datasets
_MOST_PARTS = 64
_KNOWN = WeakTensorKeyDictionary()  # of tensors that were looked at: their count of writes then, and what was found


def fingerprint(source: Source) -> dict[str, str]:
    """What is alike wherever the same data is loaded, by name; nothing of a stream, which is compared as it is read."""
    if not _can_compare(source):
        return {}
    own = source.own_sampler
    said = {
        "batch_size": str(source.batch_size),
        "shuffle": str(source.shuffle),
        "drop_last": str(source.drop_last),
        "sampler": "none" if own is None else f"{own.name} of {len(own)}",
    } | ({} if source.length_of is None else {"length": source.length_of.name})
    return said | data_parts(source)


def data_parts(source: Source) -> dict[str, str]:
    """Of the dataset alone, however it is read."""
    if not _can_compare(source):
        return {}
    return dict(islice(_parts("dataset", source.dataset, 0), _MOST_PARTS))


def _can_compare(source: Source) -> bool:
    return not source.is_stream and not isinstance(source.dataset, DaliBatches)


def _parts(name: str, dataset: Any, depth: int) -> Iterator[tuple[str, str]]:
    length = len(dataset) if hasattr(dataset, "__len__") else None
    yield f"the class of {name}", type(dataset).__name__
    yield f"the length of {name}", str(length)
    if depth >= _DEEPEST or not length or reader_of(dataset):
        return
    if isinstance(dataset, Subset):
        yield f"{name}.indices", _of_entries(dataset.indices) or ""
        yield from _parts(f"{name}.dataset", dataset.dataset, depth + 1)
    elif isinstance(dataset, ConcatDataset):
        for number, inner in enumerate(dataset.datasets[:_DEEPEST]):
            yield from _parts(f"{name}.datasets[{number}]", inner, depth + 1)
    elif isinstance(dataset, TensorDataset):
        for number, tensor in enumerate(dataset.tensors):
            yield f"{name}.tensors[{number}]", _of_rows(tensor) or str(tuple(tensor.shape))
    else:
        for key, value in sorted(getattr(dataset, "__dict__", {}).items(), key=lambda item: str(item[0])):
            found = _of_entries(value) if _length(value) == length else None
            if found is not None:
                yield f"{name}.{key}", found


def _length(value: Any) -> int | None:
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


def _of_entries(values: Any) -> str | None:
    """Of numbers, or of the last parts of paths: nodes may keep the same files in other folders. Else None."""
    if isinstance(values, torch.Tensor) or (isinstance(values, np.ndarray) and values.dtype.kind != "U"):
        return _of_rows(values)
    some = list(values[:: max(1, len(values) // _LOOKS)][: _LOOKS + 1])
    if all(isinstance(value, int | float | np.number) for value in some):
        entries = [repr(float(value)) for value in some]
    elif all(isinstance(value, str | os.PathLike) for value in some):
        entries = [os.path.basename(os.fspath(value)) for value in some]
    else:
        return None
    return f"{len(values)} {_of_texts(entries)}"


def _of_texts(texts: Iterable[str]) -> str:
    return hashlib.blake2b(chr(0).join(texts).encode(), digest_size=8).hexdigest()


def _of_rows(values: np.ndarray | torch.Tensor) -> str | None:
    if isinstance(values, np.ndarray) and values.dtype.hasobject:
        return None
    if isinstance(values, torch.Tensor) and (values.layout is not torch.strided or values.is_meta):
        return None
    if values.nbytes <= _WHOLE_BYTES:
        return _of_whole(values)
    looks = _ROWS if values.ndim > 1 else _LOOKS
    rows = values[:: max(1, len(values) // looks)][: looks + 1]
    rows = rows.detach().cpu() if isinstance(rows, torch.Tensor) else rows
    digest = f"{sample_digest([*rows]):x}" if values.ndim > 1 else _of_texts(map(repr, rows.tolist()))
    return f"{tuple(values.shape)} {digest}"


def _raw(values: np.ndarray | torch.Tensor) -> memoryview:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _of_whole(values: np.ndarray | torch.Tensor) -> str:
    """Of a tensor, from the cache if it was not written to since: every save needs it."""
    counts = isinstance(values, torch.Tensor) and not values.is_inference()
    version, found = _KNOWN.get(values, (-1, "")) if counts else (-1, "")
    if counts and version == values._version:  # type: ignore[union-attr]
        return str(found)
    found = f"{tuple(values.shape)} {hashlib.blake2b(_raw(values), digest_size=8).hexdigest()}"
    if counts:
        _KNOWN[values] = (values._version, found)  # type: ignore[union-attr,index]
    return found
