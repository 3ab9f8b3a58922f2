"""Paths of modules: their parts, and patterns of them in which * is any one part."""

from __future__ import annotations


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def is_in(path: str, outer: str) -> bool:
    """Whether it is this module, or one within it.

    >>> is_in("layers.1.mlp", "layers.1"), is_in("layers.10", "layers.1")
    (True, False)
    """
    return not outer or path == outer or path.startswith(f"{outer}.")


def fits(path: str, wanted: str) -> bool:
    """Whether a path has as many parts as a pattern, each its name or *.

    >>> fits("layers.1.mlp", "layers.*.mlp")
    True
    """
    parts, names = path.split("."), wanted.split(".")
    return len(parts) == len(names) and all(name in ("*", part) for part, name in zip(parts, names, strict=True))


def pattern_of(path: str) -> str:
    """With * for the numbers in it.

    >>> pattern_of("layers.1.mlp")
    'layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
