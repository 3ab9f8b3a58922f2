"""Paths of modules and tensors in a model: names separated by dots; the model's own path is empty."""

from __future__ import annotations


def join(path: str, name: str) -> str:
    """The path of a module's child or tensor by its name.

    >>> join("layers.0", "weight"), join("", "head")
    ('layers.0.weight', 'head')
    """
    return f"{path}.{name}" if path else name


def is_inside(path: str, outer: str) -> bool:
    """Whether a path equals another one or is below it.

    >>> is_inside("layers.0.mlp", "layers.0"), is_inside("layers.01", "layers.0")
    (True, False)
    """
    return not outer or path == outer or path.startswith(f"{outer}.")


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def fits(path: str, wanted: str) -> bool:
    """Whether a path has as many parts as a pattern, each its name or *.

    >>> fits("layers.1.mlp", "layers.*.mlp")
    True
    """
    parts, names = path.split("."), wanted.split(".")
    return len(parts) == len(names) and all(name in ("*", part) for part, name in zip(parts, names, strict=True))


def pattern_of(path: str) -> str:
    """The pattern of a path, with * for its numbers.

    >>> pattern_of("layers.1.mlp")
    'layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
