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
