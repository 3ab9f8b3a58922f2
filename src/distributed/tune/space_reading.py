"""A Space from what users write: Python values, YAML, Ray's `tune.loguniform(…)` or Optuna's distributions.

Everything that is wrong is reported at once, each with its line of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import nearest_hint
from distributed.tune.space import Choice, Constant, Domain, Float, Grid, Int, Normal, Space

SearchSpace = Mapping[str, Any] | str | os.PathLike[str] | Space


class _Wrong(ValueError):
    """What is wrong with one parameter: what, and what to write instead."""

    def __init__(self, what: str, why: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.do = what, why, do


def read_space(given: SearchSpace) -> tuple[Space, list[Problem]]:
    """The space, and all that is wrong with it.

    >>> space, problems = read_space({"lr": {"loguniform": [1e-4, 1e-2]}, "layers": {"int": [4, 1]}, "seed": 3})
    >>> problems[0].what
    'layers: int [4, 1] is an inverted range'
    """
    if isinstance(given, Space):
        given = given.domains
    sources: Mapping[str, str] = {}
    problems: list[Problem] = []
    if isinstance(given, str | os.PathLike):
        given, sources, problems = _read_file(os.fspath(given))
        if problems:
            return Space({}), problems
    if not isinstance(given, Mapping):
        what = f"the search space is a {type(given).__name__}"
        return Space({}), [Problem(what, do="pass {'lr': {'loguniform': [1e-4, 1e-2]}, …} or the path of a YAML file")]
    domains: dict[str, Domain] = {}
    for name, value in given.items():
        where = f"{sources[name]}: " if name in sources else ""
        try:
            domains[str(name)] = _checked(_domain(value))
        except _Wrong as wrong:
            problems.append(Problem(f"{where}{name}: {wrong.what}", wrong.why, wrong.do))
    if not problems and not any(not isinstance(domain, Constant) for domain in domains.values()):
        what = "the search space has nothing to search" if domains else "the search space is empty"
        problems.append(Problem(what, do="name a parameter: {'lr': {'loguniform': [1e-4, 1e-2]}}"))
    return Space(domains), problems


def _read_file(path: str) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """A YAML mapping, and the line of each of its keys."""
    try:
        with open(path, encoding="utf-8") as stream:
            loader = yaml.SafeLoader(stream.read())
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            what = f"{path} does not hold a search space"
            return {}, {}, [Problem(what, do="write one parameter a line: lr: {loguniform: [1e-4, 1e-2]}")]
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        problems: list[Problem] = []
        for key_node, value_node in root.value:
            name, where = str(loader.construct_object(key_node)), _where(path, key_node)
            if name in values:
                problems.append(Problem(f"{name} is set twice: {sources[name]} and {where}", do="keep one of them"))
            values[name], sources[name] = loader.construct_object(value_node, deep=True), where
    except OSError as error:
        return (
            {},
            {},
            [Problem(f"the search space {path} cannot be read", why=error.strerror or "", do=f"ls -l {path}")],
        )
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{os.path.basename(path)}:{mark.line + 1}: " if mark is not None else ""
        return {}, {}, [Problem(f"{where}{path} is not valid YAML", why=getattr(error, "problem", "") or str(error))]
    return values, sources, problems


def _where(path: str, node: yaml.Node) -> str:
    return f"{os.path.basename(path)}:{node.start_mark.line + 1}"


def _domain(value: Any) -> Domain:
    if isinstance(value, Choice | Grid | Float | Int | Normal | Constant):
        return value
    module = type(value).__module__
    if module.startswith("ray.tune"):
        return _from_ray(value)
    if module.startswith("optuna."):
        return _from_optuna(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, list | tuple | set):
        raise _Wrong("a list does not say how it is searched", do="write {choice: […]}, or {constant: […]}")
    return Constant(value)


def _from_mapping(value: Mapping[str, Any]) -> Domain:
    if len(value) != 1:
        raise _Wrong(
            f"{json.dumps(dict(value), default=str)} names {len(value)} kinds",
            why="a parameter has exactly one kind",
            do=_kinds(),
        )
    ((kind, given),) = value.items()
    if kind not in _KINDS:
        raise _Wrong(f"there is no kind {kind!r}", do=nearest_hint(str(kind), _KINDS))
    return _KINDS[kind](str(kind), given)


def _values(kind: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _Wrong(f"{kind} wants a list of values, not {given!r}", do=f"write {{{kind}: [a, b]}}")
    return tuple(given)


def _bounds(kind: str, given: Any, *, most: int = 2) -> list[float]:
    """Numbers in a list, or as {low: …, high: …}. YAML reads 1e-4 as a text, since it has no dot."""
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in ("low", "high", "step")]
        if unknown or not {"low", "high"} <= given.keys():
            raise _Wrong(f"{kind} {dict(given)} is not low, high and step", do=f"write {{{kind}: [low, high]}}")
        given = [given["low"], given["high"], *([given["step"]] if "step" in given else [])]
    if not isinstance(given, Sequence) or isinstance(given, str) or not 2 <= len(given) <= most:
        wanted = "[low, high]" if most == 2 else "[low, high, step]"
        raise _Wrong(f"{kind} wants {wanted}, not {given!r}", do=f"write {{{kind}: {wanted}}}")
    try:
        return [value if isinstance(value, int) and not isinstance(value, bool) else float(value) for value in given]
    except (TypeError, ValueError):
        raise _Wrong(f"{kind} {list(given)} has a bound that is no number") from None


def _float(log: bool, most: int = 2) -> Callable[[str, Any], Domain]:
    def make(kind: str, given: Any) -> Domain:
        low, high, *step = _bounds(kind, given, most=most)
        return Float(float(low), float(high), log, float(step[0]) if step else None)

    return make


def _int(log: bool) -> Callable[[str, Any], Domain]:
    def make(kind: str, given: Any) -> Domain:
        numbers = _bounds(kind, given, most=3)
        if any(number != int(number) for number in numbers):
            raise _Wrong(
                f"{kind} {numbers} has a bound that is not whole", do="use uniform for numbers with a fraction"
            )
        low, high, *step = (int(number) for number in numbers)
        return Int(low, high, log, step[0] if step else 1)

    return make


def _normal(kind: str, given: Any) -> Domain:
    mean, deviation = _bounds(kind, given)
    return Normal(float(mean), float(deviation))


_KINDS: dict[str, Callable[[str, Any], Domain]] = {
    "choice": lambda kind, given: Choice(_values(kind, given)),
    "grid": lambda kind, given: Grid(_values(kind, given)),
    "grid_search": lambda kind, given: Grid(_values(kind, given)),  # as Ray writes it
    "uniform": _float(log=False),
    "loguniform": _float(log=True),
    "quniform": _float(log=False, most=3),
    "int": _int(log=False),
    "randint": _int(log=False),
    "logint": _int(log=True),
    "normal": _normal,
    "constant": lambda kind, given: Constant(given),
}


def _kinds() -> str:
    return f"choose one of: {', '.join(_KINDS)}"


def _from_ray(value: Any) -> Domain:
    """Ray's domains keep how they are drawn in a sampler."""
    sampler: Any = getattr(value, "sampler", None)
    step = getattr(sampler, "q", None)  # Quantized, around another
    inner = type(getattr(sampler, "sampler", None) or sampler).__name__.lower()
    kind = type(value).__name__
    if kind == "Categorical":
        return Choice(tuple(value.categories))
    if kind == "Float" and "normal" in inner:
        source = getattr(sampler, "sampler", None) or sampler
        return Normal(float(source.mean), float(source.sd))
    if kind == "Float" and hasattr(value, "lower"):
        return Float(float(value.lower), float(value.upper), "log" in inner, step)
    if kind == "Integer":  # its upper bound is not included, but with a step it is
        return Int(int(value.lower), int(value.upper) - (step is None), "log" in inner, int(step or 1))
    raise _Wrong(f"Ray's {kind} has no counterpart here", do=_kinds())


def _from_optuna(value: Any) -> Domain:
    kind = type(value).__name__
    if kind == "CategoricalDistribution":
        return Choice(tuple(value.choices))
    if kind == "FloatDistribution":
        return Float(value.low, value.high, value.log, value.step)
    if kind == "IntDistribution":
        return Int(value.low, value.high, value.log, value.step)
    raise _Wrong(f"Optuna's {kind} has no counterpart here", do=_kinds())


def _checked(domain: Domain) -> Domain:
    """What can be drawn from."""
    if isinstance(domain, Choice | Grid):
        if not domain.values:
            raise _Wrong(f"{domain.kind} has no values", do=f"write {{{domain.kind}: [a, b]}}")
        return type(domain)(tuple(_plain(value) for value in domain.values))
    if isinstance(domain, Constant):
        return Constant(_plain(domain.value))
    if isinstance(domain, Normal):
        if domain.deviation <= 0:
            raise _Wrong(f"normal has a deviation of {domain.deviation}", do="give one above 0")
        return domain
    ((kind, bounds),) = domain.describe().items()
    text = f"{kind} {bounds[:2]}"
    if domain.low > domain.high:
        raise _Wrong(f"{text} is an inverted range", do=f"write {{{kind}: [{domain.high}, {domain.low}]}}")
    if domain.low == domain.high or domain.low != domain.low or domain.high != domain.high:
        raise _Wrong(f"{text} is an empty range", do=f"widen it, or write the value itself: {domain.low}")
    if domain.log and domain.low <= 0:
        raise _Wrong(
            f"{text} begins at {domain.low}",
            why="a logarithmic range has a lower bound above 0",
            do=f"{{{kind}: [1e-6, {domain.high}]}}",
        )
    if domain.step is not None and not 0 < domain.step <= domain.high - domain.low:
        raise _Wrong(
            f"{text} has steps of {domain.step}",
            why=f"the range is {domain.high - domain.low:g} wide, and a step must be above 0 and fit into it",
            do="give a smaller step",
        )
    if domain.log and isinstance(domain, Int) and domain.step != 1:
        raise _Wrong(f"{text} has a logarithm and steps of {domain.step}", do="leave one of them out")
    return domain


def _plain(value: Any) -> Any:
    """What goes into the journal and back: what JSON can hold."""
    if isinstance(value, tuple):
        value = list(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's numbers
        value = value.item()
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise _Wrong(
        f"{value!r} is a {type(value).__name__}",
        why="parameters are plain values: numbers, texts, lists of them",
        do="use a name for it, and look the object up in train_fn",
    )


def require_space(given: SearchSpace) -> Space:
    space, problems = read_space(given)
    if problems:
        raise ConfigError(problems)
    return space
