"""ModelSummary: what is known of a model's layers and of the memory of a step, as a table and as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_UNKNOWN = "unknown"
NOT_CALLED = "–"  # of a module that only holds others
_WIDTH = 160  # characters of a table as text; it takes what it needs
_THOUSANDS = ("", " k", " M", " G", " T", " P")


@dataclass(frozen=True)
class LayerSummary:
    """A module with all that is in it."""

    name: str  # its path; "": the whole model
    kind: str  # its class
    depth: int
    parameters: int | None  # numbers; None: a lazy layer has not been called
    trained: int | None
    shape: str = ""  # of its output; "": not known, or it was not called
    flops: int | None = None  # of a sample, forward; two for a multiplication and addition
    parameter_bytes: int = 0
    activation_bytes: int | None = None  # of a batch: what its forward pass keeps for backward


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step of the whole model; None: not known."""

    parameters: int
    gradients: int | None
    optimizer: int | None
    activations: int | None

    @property
    def total(self) -> int | None:
        parts = [self.parameters, self.gradients, self.optimizer, self.activations]
        return None if None in parts else sum(part for part in parts if part is not None)


@dataclass(frozen=True)
class ModelSummary:
    """The layers of a model down to some depth. Printed, it is a table; `to_json` has all of it.

    FLOPs are those of matrix products, convolutions and attention. Of a sharded run, a dry run (`--dry-run=RANKS`) says
    what each rank holds.
    """

    layers: tuple[LayerSummary, ...]  # the whole model first
    memory: StepMemory
    batch: int | None  # samples with which shapes, FLOPs and activations were found; None: no data was given
    backward_flops: int | None = None  # of a sample
    unknown: tuple[str, ...] = ()  # what could not be found out, and why

    @property
    def parameters(self) -> int | None:
        return self.layers[0].parameters

    @property
    def trained(self) -> int | None:
        return self.layers[0].trained

    @property
    def flops(self) -> int | None:
        return self.layers[0].flops

    def to_plain(self) -> dict[str, Any]:
        return asdict(self) | {"parameters": self.parameters, "trained": self.trained, "flops": self.flops}

    def to_json(self) -> str:
        return json.dumps(self.to_plain(), indent=2) + "\n"

    def __rich__(self) -> Group:
        return Group(self._table(), *(Text(line) for line in self._lines()))

    def __str__(self) -> str:
        console = Console(width=_WIDTH, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        columns = ["layer", "class", "parameters", "trained", "output", "FLOPs a sample", "memory", "activations"]
        for at, name in enumerate(columns):
            table.add_column(name, justify="left" if at in (0, 1, 4) else "right", no_wrap=at != 4)
        for layer in self.layers:
            name = "  " * layer.depth + (layer.name.rpartition(".")[2] or "(model)")
            counts = [_count(layer.parameters), _count(layer.trained)]
            sizes = [_size(layer.parameter_bytes), _size(layer.activation_bytes)]
            table.add_row(name, layer.kind, *counts, layer.shape or _UNKNOWN, _count(layer.flops, short=True), *sizes)
        return table

    def _lines(self) -> list[str]:
        memory, trained = self.memory, _count(self.trained)
        lines = [f"parameters {_count(self.parameters)}, of which {trained} are trained"]
        samples = "" if self.batch is None else f" of {self.batch} sample{'s' * (self.batch > 1)}"
        if self.batch is not None:
            passes = f"{_count(self.flops, short=True)} forward, {_count(self.backward_flops, short=True)} backward"
            lines.append(f"FLOPs a sample: {passes}")
        parts: Sequence[tuple[str, int | None]] = (
            ("parameters", memory.parameters),
            ("gradients", memory.gradients),
            ("optimizer state", memory.optimizer),
            (f"activations{samples}", memory.activations),
        )
        said = ", ".join(f"{name} {_size(size)}" for name, size in parts)
        lines.append(f"memory of the whole model: {said}; together {_size(memory.total)}")
        return [*lines, *(f"{_UNKNOWN}: {why}" for why in self.unknown)]


def _count(count: int | None, *, short: bool = False) -> str:
    """
    >>> _count(1234567), _count(1234567, short=True), _count(None)
    ('1,234,567', '1.23 M', 'unknown')
    """
    if count is None:
        return _UNKNOWN
    if not short:
        return f"{count:,}"
    amount, unit = float(count), 0
    while amount >= 1000 and unit < len(_THOUSANDS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.2f}{_THOUSANDS[unit]}" if unit else str(count)


def _size(size: int | None) -> str:
    """
    >>> _size(512), _size(3 << 20), _size(None)
    ('512 B', '3.0 MiB', 'unknown')
    """
    if size is None:
        return _UNKNOWN
    for unit, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << unit:
            return f"{size / (1 << unit):.1f} {name}"
    return f"{size} B"
