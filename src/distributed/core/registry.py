"""Names to implementations, imported on use, and the pip extra to install when one is missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from distributed.core.errors import ConfigError, MissingExtraError

DISTRIBUTION = "distributed-training"


@dataclass(frozen=True)
class Entry:
    """Where a named implementation lives, the module it needs and the extra that brings it."""

    target: str
    needs: str = ""
    extra: str = ""


@dataclass(frozen=True)
class Registry:
    """A closed set of named implementations.

    >>> kinds = Registry("number", {"fraction": Entry("fractions:Fraction")})
    >>> kinds.load("fraction")(1, 2)
    Fraction(1, 2)
    """

    kind: str
    entries: Mapping[str, Entry]

    def load(self, name: str) -> Any:
        if name not in self.entries:
            raise ConfigError(f"{self.kind} {name!r} is not known", do=nearest_hint(name, self.entries))
        entry = self.entries[name]
        if entry.needs:
            import_extra(entry.needs, entry.extra, f"{self.kind} {name!r}")
        module, _, attribute = entry.target.partition(":")
        return getattr(import_module(module), attribute)


def import_extra(module: str, extra: str, wanted_by: str) -> Any:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f"{wanted_by} needs an extra that is not installed",
            why=f"the module {module!r} cannot be imported",
            do=f'pip install "{DISTRIBUTION}[{extra}]"',
        ) from missing


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names most like a mistyped one."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """A sentence for an error: what the user may have meant, or everything there is."""
    names = sorted(known)
    close = nearest(name, names)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(names)}"


STRATEGIES = Registry(
    "backend",
    {
        "pytorch-ddp": Entry("distributed.strategies.torch_mesh:TorchMesh"),
        "fsdp": Entry("distributed.strategies.torch_mesh:TorchMesh"),
    },
)
BITWISE_STRATEGIES = Registry(  # what a backend becomes under reproducible='bitwise'
    "backend with reproducible='bitwise'",
    {"pytorch-ddp": Entry("distributed.strategies.bitwise:BitwiseReplicas")},
)
