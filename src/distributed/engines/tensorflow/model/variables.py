"""Names for what a checkpoint holds, the same in every process that builds the same model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from distributed.engines.tensorflow.model.model import state_of

_NUMBERED = re.compile(r"(.+)_(\d+)$")


def name_variables(model: Any, scaler: Any = None) -> dict[str, Any]:
    """Variables of the model, of its optimizer, of its metrics and of the loss's scale, by `component/name`."""
    named: dict[str, Any] = {}
    paths: dict[str, str] = {}  # as Keras has them, and as they are named here
    for place, variable in _walk(model, "", set()):
        paths[_path(variable)] = _add(named, f"model/{place}", variable).removeprefix("model/")
    for variable in state_of(model.optimizer):
        _add(named, f"optimizer/{_slot(_path(variable), paths)}", variable)
    for number, variable in enumerate(metric_variables(model)):
        named[f"metrics/{number}.{_path(variable).rpartition('/')[2]}"] = variable
    if scaler is not None:
        named |= {"scaler/scale": scaler.scale, "scaler/good_steps": scaler.good_steps}
    return named


def _walk(layer: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Variables by the layers that own them. Keras's own paths depend on how a model was built."""
    children = list(layer._flatten_layers(recursive=False, include_self=False))
    theirs = {id(variable) for child in children for variable in child.variables}
    theirs |= {id(variable) for metric in getattr(layer, "metrics", ()) for variable in metric.variables}
    for variable in layer.variables:
        if id(variable) not in theirs | seen:
            seen.add(id(variable))
            yield prefix + _path(variable).rpartition("/")[2], variable
    for name, child in zip(_renumbered(children), children, strict=True):
        yield from _walk(child, f"{prefix}{name}/", seen)


def metric_variables(model: Any) -> list[Any]:
    return [variable for metric in model.metrics for variable in metric.variables]


def seed_variables(named: dict[str, Any]) -> list[Any]:
    """The counters that Keras 3 draws dropout by."""
    return [variable for name, variable in named.items() if name.endswith("seed_generator_state")]


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def _add(named: dict[str, Any], name: str, variable: Any) -> str:
    number, unique = 1, name
    while unique in named:
        number, unique = number + 1, f"{name}.{number}"
    named[unique] = variable
    return unique


def _renumbered(layers: list[Any]) -> list[str]:
    """Keras numbers layers over all models that a process has built: here they are numbered in this one alone."""
    counts: dict[str, int] = {}
    names = []
    for layer in layers:
        base = _snake(type(layer).__name__)
        match = _NUMBERED.match(layer.name)
        if layer.name != base and not (match and match.group(1) == base):  # the user's own name
            names.append(str(layer.name))
            continue
        number = counts[base] = counts.get(base, -1) + 1
        names.append(f"{base}_{number}" if number else base)
    return names


def _slot(path: str, paths: dict[str, str]) -> str:
    """An optimizer's variable, named after the one that it belongs to.

    >>> _slot("adam/dense_4_kernel_momentum", {"dense_4/kernel": "dense/kernel"})
    'momentum/dense/kernel'
    >>> _slot("m/dense_4/kernel", {"dense_4/kernel": "dense/kernel"}), _slot("adam/iteration", {})
    ('m/dense/kernel', 'iteration')
    """
    tail = path.partition("/")[2] or path
    for own, name in sorted(paths.items(), key=lambda pair: -len(pair[0])):
        if tail.startswith(own.replace("/", "_") + "_"):  # Keras 3
            return f"{tail[len(own) + 1 :]}/{name}"
        if path.endswith(f"/{own}"):  # legacy
            return f"{path[: -len(own) - 1]}/{name}"
    return tail


def _snake(name: str) -> str:
    """
    >>> _snake("BatchNormalization"), _snake("Conv2D"), _snake("LSTM")
    ('batch_normalization', 'conv2d', 'lstm')
    """
    name = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
