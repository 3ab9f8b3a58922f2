"""What is asked of the collectives benchmark: sizes in the words of nccl-tests, operations, algorithms, backend."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, get_args

from distributed.bench.collectives.benchmark import ALGORITHMS, LARGEST, MORE_OPERATIONS, OPERATIONS
from distributed.core.choices import Collectives
from distributed.core.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """
    >>> parse_size("8"), parse_size("128M"), parse_size("1K")
    (8, 134217728, 1024)
    """
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if found is None:
        raise ConfigError(f"{text!r} is no size", why="it is a number of bytes, K, M or G", do="128M, for example")
    return int(found.group(1)) * _UNITS[found.group(2)]


def sizes_between(smallest: int, largest: int, factor: int) -> list[int]:
    """
    >>> sizes_between(1024, 2**16, 4)
    [1024, 4096, 16384, 65536]
    """
    if smallest > largest:
        raise ConfigError(
            f"the smallest message, {smallest} bytes, is larger than the largest, {largest}", do="-b 8 -e 64M"
        )
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


class AskedCollectives(NamedTuple):
    sizes: list[int]
    operations: Sequence[str]
    algorithms: Sequence[str]
    backend: Collectives | None


def read_asked(
    *,
    begin: str,
    end: str,
    factor: int,
    largest_mib: float | None,
    operations: Sequence[str] | None,
    algorithms: Sequence[str] | None,
    backend: str | None,
) -> AskedCollectives:
    """The options of the command, checked."""
    if end and largest_mib is not None:
        raise ConfigError("--largest and --end", why="both say how large the largest message is", do="leave one out")
    if backend is not None and backend not in get_args(Collectives):
        raise ConfigError(f"--backend {backend}", do=f"choose one of: {', '.join(get_args(Collectives))}")
    largest = parse_size(end) if end else LARGEST if largest_mib is None else int(largest_mib * 2**20)
    return AskedCollectives(
        sizes_between(parse_size(begin), largest, factor),
        _chosen("--operation", operations, (*OPERATIONS, *MORE_OPERATIONS), OPERATIONS),
        _chosen("--algorithm", algorithms, ALGORITHMS, ALGORITHMS[:1]),
        backend,  # type: ignore[arg-type]
    )


def _chosen(option: str, asked: Sequence[str] | None, known: Sequence[str], usual: Sequence[str]) -> Sequence[str]:
    if not asked:
        return usual
    if "all" in asked:
        return known
    for name in asked:
        if name not in known:
            raise ConfigError(f"{option} {name}", do=f"choose one of: {', '.join(known)}, all")
    return list(dict.fromkeys(asked))
