"""Paths of modules and tensors in a model: names with dots between, where the model's own is empty."""

from __future__ import annotations


def join(path: str, name: str) -> str:
    """The path of what a module holds under a name.

    >>> join("layers.0", "weight"), join("", "head")
    ('layers.0.weight', 'head')
    """
    return f"{path}.{name}" if path else name


def is_inside(path: str, outer: str) -> bool:
    """Whether a path is another one or leads into it.

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
    """With * for the numbers in it.

    >>> pattern_of("layers.1.mlp")
    'layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
