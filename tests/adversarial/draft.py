"""Draft: the text of a model as it is put together from parts. What is drawn is a program that a person can read."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.adversarial.helpers import HELPERS


@dataclass
class Draft:
    """Lines of `__init__` and `forward`, the helper classes that they use, and what is peculiar about the model."""

    rng: random.Random
    width: int = 6  # of the last dimension, or of the channels of an image
    inits: list[str] = field(default_factory=list)
    forwards: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    afters: list[str] = field(default_factory=list)  # on the finished model
    helpers: list[str] = field(default_factory=list)
    traits: set[str] = field(default_factory=set)
    _count: int = 0

    def name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def init(self, *lines: str) -> None:
        self.inits += lines

    def forward(self, *lines: str) -> None:
        self.forwards += lines

    def after(self, *lines: str) -> None:
        self.afters += lines

    def method(self, text: str) -> None:
        self.methods.append(textwrap.dedent(text).strip("\n"))

    def helper(self, name: str) -> str:
        """A class of `HELPERS`, whose text the program then has."""
        assert name in HELPERS, name
        if name not in self.helpers:
            self.helpers.append(name)
        return name

    def trait(self, *names: str) -> None:
        self.traits |= set(names)

    def linear(self, stem: str = "linear", out: int | None = None, *, bias: bool | None = None) -> str:
        """A layer of its own, from the present width to `out`; returns its name."""
        name, out = self.name(stem), self.width if out is None else out
        told = "" if bias is None or bias else ", bias=False"
        self.init(f"self.{name} = nn.Linear({self.width}, {out}{told})")
        return name

    def model_text(self, arguments: str, result: list[str]) -> str:
        """The class `Model`."""
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.inits]
        lines += ["", f"    def forward(self, {arguments}):"]
        lines += [f"        {line}" for line in [*self.forwards, *result]]
        for method in self.methods:
            lines += ["", textwrap.indent(method, "    ")]
        helpers = [HELPERS[name].strip("\n") for name in self.helpers]
        return "\n\n\n".join([*helpers, "\n".join(lines)])


Part = Callable[[Draft], None]


@dataclass(frozen=True)
class Choice:
    """A part of a grammar, and how often it is drawn."""

    part: Part
    weight: float


def draw_part(rng: random.Random, choices: dict[str, Choice], allowed: Callable[[str], bool]) -> str:
    """The name of a part, by its weight, among those that are allowed."""
    names = [name for name in choices if allowed(name)]
    return rng.choices(names, [choices[name].weight for name in names])[0]
