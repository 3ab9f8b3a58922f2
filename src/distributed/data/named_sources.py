"""The loaders of an evaluation: one, several in their order, or by name; what is wrong with any is reported at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset

from distributed.core.errors import DataError, Problem
from distributed.data.source import Source, read_source

NamedSources = dict[str, Source]  # by the name that their metrics have; "": the only one, which has none

_NAME = re.compile(r"[\w.-]+")


def read_sources(data: Any, role: str, *, reads_all: bool = False) -> NamedSources:
    """The sources of a loader, of a list of loaders (named by their places), or of a mapping from names to loaders.

    `reads_all`: every row is read once, in the dataset's order, whatever a loader shuffles or drops.

    >>> list(read_sources([[1, 2], [3]], "val_loader"))
    ['']
    >>> list(read_sources({"clean": [1, 2], "noisy": [3]}, "val_loader"))
    ['clean', 'noisy']
    """
    if isinstance(data, Mapping):
        given = dict(data)
    elif _holds_loaders(data):
        given = {str(place): loader for place, loader in enumerate(data)} if len(data) > 1 else {"": data[0]}
    else:
        given = {"": data}
    if not given:
        raise DataError(f"{role} is empty", why="there is no loader in it", do=f"leave {role} out, or pass a loader")
    problems: list[Problem] = []
    found: NamedSources = {}
    for name, loader in given.items():
        where = role_of(role, name)
        if name != "" and (not isinstance(name, str) or not _NAME.fullmatch(name)):
            problems.append(_odd_name(role, name))
            continue
        try:
            found[name] = _read(loader, where, reads_all)
        except DataError as wrong:
            problems += wrong.problems
    if problems:
        raise DataError(problems)
    return found


def role_of(role: str, name: str) -> str:
    """How a message names one of them.

    >>> role_of("val_loader", ""), role_of("val_loader", "clean"), role_of("val_loader", "0")
    ('val_loader', "val_loader['clean']", 'val_loader[0]')
    """
    if name == "":
        return role
    return f"{role}[{name}]" if isinstance(name, str) and name.isdigit() else f"{role}[{name!r}]"


def prefix_of(name: str) -> str:
    """What the names of its metrics begin with.

    >>> prefix_of(""), prefix_of("clean")
    ('', 'clean_')
    """
    return f"{name}_" if name else ""


def _holds_loaders(data: Any) -> bool:
    """A list of samples is a dataset; one with a loader or a dataset in it is a list of loaders."""
    is_listed = isinstance(data, Sequence) and not isinstance(data, str | bytes)
    return is_listed and any(isinstance(item, DataLoader | Dataset | Source) for item in data)


def _read(loader: Any, role: str, reads_all: bool) -> Source:
    source = read_source(loader, role)
    if reads_all:
        source = replace(source, shuffle=False, drop_last=False)
    if source.samples == 0:
        raise DataError(f"{role} is empty", why="nothing would be measured on it", do="check the dataset that you pass")
    size = source.batch_size
    if source.drop_last and size is not None and source.samples is not None and source.samples < size:
        raise DataError(
            f"{role} has {source.samples} samples and drops incomplete batches of {size}",
            why="drop_last=True leaves nothing to measure",
            do="make the DataLoader with drop_last=False",
        )
    return source


def _odd_name(role: str, name: Any) -> Problem:
    return Problem(
        f"a loader of {role} is called {name!r}",
        why="its metrics are named after it, as in val_clean_loss: letters, digits, '_', '-' and '.' can be in a name",
        do=f"{role}={{'clean': …, 'noisy': …}}",
    )
