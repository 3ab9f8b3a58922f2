"""Files that hold one frozen dataclass as JSON: read back as it was written, and only by the version that wrote it."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from distributed.core.errors import ConfigError
from distributed.core.secrets import mask

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION = "schema_version"
T = TypeVar("T")


def to_plain(value: DataclassInstance, version: int) -> dict[str, Any]:
    """A dataclass as plain data with its version; secrets are masked."""
    plain: dict[str, Any] = mask(asdict(value))
    return {VERSION: version, **plain}


def to_json(value: DataclassInstance, version: int) -> str:
    return json.dumps(to_plain(value, version), indent=2) + "\n"


def read(kind: type[T], path: Path, version: int, *, why: str) -> T:
    """The dataclass in a file of a run directory; `why` says when a run writes it."""
    try:
        content = path.read_bytes()
    except OSError as failed:
        raise ConfigError(
            f"{path} cannot be read: {failed.strerror}",
            why=why,
            do="pass the directory of a run; `fit` and `distributed train` make theirs in runs/",
        ) from None
    return from_json(kind, content, version, str(path))


def from_json(kind: type[T], text: str | bytes, version: int, name: str) -> T:
    """The dataclass that `to_json` wrote; `name` is the file's in errors.

    >>> from distributed.core.mesh import MeshSpec
    >>> from_json(MeshSpec, to_json(MeshSpec(tp=2), 1), 1, "mesh.json")
    MeshSpec(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=2)
    """
    try:
        content = json.loads(text)
    except ValueError as broken:
        raise ConfigError(f"{name} is not JSON: {broken}", why="the file is damaged", do=_AGAIN) from None
    found = content.pop(VERSION, None) if isinstance(content, dict) else None
    if found != version:
        raise ConfigError(
            f"{name} has the schema version {found or 'of an older release'}, and this release reads {version}",
            why="between versions, values are added, removed or given another meaning",
            do=f"read it with the release that wrote it; or {_AGAIN}",
        )
    try:
        result: T = _read(kind, content, "")
    except _DoesNotFitError as wrong:
        raise ConfigError(
            f"{name}: {wrong}", why="the file was changed, or another release wrote it", do=_AGAIN
        ) from None
    return result


_AGAIN = "start the run again, in another run_dir"


class _DoesNotFitError(Exception):
    """A value that is not of its field's type."""


def _read(kind: Any, value: Any, path: str) -> Any:
    """A value of JSON as a type of Python: dataclasses, tuples, mappings, choices and plain values."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(value, dict):
        return _read_dataclass(kind, value, path)
    if origin in (Union, UnionType):
        for part in parts:
            try:
                return _read(part, value, path)
            except _DoesNotFitError:
                continue
    elif origin is Literal:
        if any(value == part and type(value) is type(part) for part in parts):
            return value
    elif origin is tuple and isinstance(value, list):
        kinds = [parts[0]] * len(value) if parts[-1] is ... else parts
        if len(kinds) == len(value):
            return tuple(
                _read(part, item, f"{path}[{at}]") for at, (part, item) in enumerate(zip(kinds, value, strict=True))
            )
    elif origin is dict and isinstance(value, dict):
        return {key: _read(parts[1], item, f"{path}[{key!r}]") for key, item in value.items()}
    elif type(value) is kind or (kind is float and type(value) is int) or (kind is NoneType and value is None):
        return value
    raise _DoesNotFitError(f"{path}={value!r} is not of the type {getattr(kind, '__name__', kind)}")


def _read_dataclass(kind: Any, value: dict[str, Any], path: str) -> Any:
    hints = get_type_hints(kind)
    for name in sorted(hints.keys() ^ value.keys()):
        raise _DoesNotFitError(f"{path}.{name} is {'missing' if name in hints else 'unknown'}".lstrip("."))
    values = {name: _read(hint, value[name], f"{path}.{name}".lstrip(".")) for name, hint in hints.items()}
    try:
        return kind(**values)
    except AssertionError as wrong:  # its own invariant
        raise _DoesNotFitError(f"{path}: {wrong}") from None
