"""Space: what each parameter of a search may be, as data. `space_reading.py` makes one of what a user writes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Choice:
    """One of some values, each as likely."""

    values: tuple[Any, ...]
    kind: ClassVar[str] = "choice"

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    def describe(self) -> dict[str, Any]:
        return {self.kind: list(self.values)}


@dataclass(frozen=True)
class Grid:
    """Each of some values in turn: trials are made for every combination of the grids of a space."""

    values: tuple[Any, ...]
    kind: ClassVar[str] = "grid"

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    def describe(self) -> dict[str, Any]:
        return {self.kind: list(self.values)}


@dataclass(frozen=True)
class Float:
    """A number from `low` to `high`; `log`: each order of magnitude is as likely. `step`: only multiples of it."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    kind: ClassVar[str] = "uniform"

    def draw(self, rng: random.Random) -> float:
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high)
        return self.fit(value)

    def describe(self) -> dict[str, Any]:
        if self.step is not None:
            return {"quniform": [self.low, self.high, self.step]}
        return {"loguniform" if self.log else "uniform": [self.low, self.high]}

    def fit(self, value: float) -> float:
        """The nearest value that is allowed."""
        if self.step is not None:
            value = round(round(value / self.step) * self.step, 12)
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Int:
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int
    log: bool = False
    step: int = 1
    kind: ClassVar[str] = "int"

    def draw(self, rng: random.Random) -> int:
        if self.log:
            return self.fit(math.exp(rng.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5))))
        return rng.randrange(self.low, self.high + 1, self.step)

    def describe(self) -> dict[str, Any]:
        bounds: list[int] = [self.low, self.high, *([self.step] if self.step != 1 else [])]
        return {"logint" if self.log else "int": bounds}

    def fit(self, value: float) -> int:
        whole = self.low + round((value - self.low) / self.step) * self.step
        while whole > self.high:
            whole -= self.step
        return max(whole, self.low)


@dataclass(frozen=True)
class Normal:
    """A number around `mean`, with no bounds."""

    mean: float
    deviation: float
    kind: ClassVar[str] = "normal"

    def draw(self, rng: random.Random) -> float:
        return rng.gauss(self.mean, self.deviation)

    def describe(self) -> dict[str, Any]:
        return {self.kind: [self.mean, self.deviation]}

    def fit(self, value: float) -> float:
        return value


@dataclass(frozen=True)
class Constant:
    """Always this value."""

    value: Any
    kind: ClassVar[str] = "constant"

    def draw(self, rng: random.Random) -> Any:
        return self.value

    def describe(self) -> Any:
        return {self.kind: self.value} if isinstance(self.value, dict | list) else self.value


Domain = Choice | Grid | Float | Int | Normal | Constant


@dataclass(frozen=True)
class Space:
    """The domains by parameter name, in the order given.

    >>> Space({"lr": Float(1e-4, 1e-2, log=True), "layers": Constant(2)}).draw(random.Random(0))["layers"]
    2
    """

    domains: Mapping[str, Domain]

    def draw(self, rng: random.Random) -> dict[str, Any]:
        return {name: domain.draw(rng) for name, domain in self.domains.items()}

    @property
    def searched(self) -> dict[str, Domain]:
        """Those that are not constant."""
        return {name: domain for name, domain in self.domains.items() if not isinstance(domain, Constant)}

    def describe(self) -> dict[str, Any]:
        """As it would stand in YAML: {'lr': {'loguniform': [0.0001, 0.01]}}."""
        return {name: domain.describe() for name, domain in self.domains.items()}

    def grid_points(self) -> list[dict[str, Any]]:
        """Every combination of the grids; one empty point without any."""
        points: list[dict[str, Any]] = [{}]
        for name, domain in self.domains.items():
            if isinstance(domain, Grid):
                points = [point | {name: value} for point in points for value in domain.values]
        return points


def choice(values: Sequence[Any]) -> Choice:
    """One of these values."""
    return Choice(tuple(values))


def grid(values: Sequence[Any]) -> Grid:
    """Each of these values in turn."""
    return Grid(tuple(values))


def uniform(low: float, high: float, step: float | None = None) -> Float:
    """A number between the two."""
    return Float(low, high, step=step)


def loguniform(low: float, high: float) -> Float:
    """A number between the two, each order of magnitude as likely."""
    return Float(low, high, log=True)


def integer(low: int, high: int, *, log: bool = False, step: int = 1) -> Int:
    """A whole number between the two, both included."""
    return Int(low, high, log, step)


def normal(mean: float, deviation: float) -> Normal:
    """A number around the mean."""
    return Normal(mean, deviation)
