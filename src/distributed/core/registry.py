"""Names to implementations, imported on use, and the pip extra to install when one is missing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from distributed.core.errors import ConfigError, MissingExtraError

DISTRIBUTION = "distributed-training"


@dataclass(frozen=True)
class Entry:
    """Where a named implementation lives, the module it needs and the extra that brings it."""

    target: str
    needs: str = ""
    extra: str = ""
    install: str = ""  # what installs it, where that is no extra

    @property
    def brought_by(self) -> str:
        """The command that installs what it needs; "": nothing is needed."""
        return self.install or (_pip(self.extra) if self.extra else "")


E_ = TypeVar("E_", bound=Entry)


@dataclass(frozen=True)
class Registry(Generic[E_]):
    """A closed set of named implementations.

    >>> kinds = Registry("number", {"fraction": Entry("fractions:Fraction")})
    >>> kinds.load("fraction")(1, 2)
    Fraction(1, 2)
    """

    kind: str
    source: Mapping[str, E_] | str  # or the "module:attribute" that holds them, imported on first use

    @cached_property
    def entries(self) -> Mapping[str, E_]:
        found: Mapping[str, E_] = load_target(self.source) if isinstance(self.source, str) else self.source
        return found

    def load(self, name: str) -> Any:
        return load_target(self.require(name).target)

    def require(self, name: str) -> E_:
        """The entry of a name, once what it needs can be imported."""
        if name not in self.entries:
            raise ConfigError(f"{self.kind} {name!r} is not known", do=nearest_hint(name, self.entries))
        entry = self.entries[name]
        require_installed(entry, f"{self.kind} {name!r}")
        return entry


def require_installed(entry: Entry, wanted_by: str) -> None:
    """An error that names the extra, unless what an entry needs can be imported."""
    if not is_installed(entry.needs):
        raise _missing(entry.needs, wanted_by, entry.brought_by)


def load_target(target: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def is_installed(module: str) -> bool:
    """Whether it can be found, without the time that importing it takes; nothing needs nothing."""
    try:
        return not module or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def installed_version(distribution: str = DISTRIBUTION) -> str:
    """The version of an installed distribution, without importing it; "unknown" where it is not installed.

    >>> installed_version("a-distribution-that-does-not-exist")
    'unknown'
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # ours: a source tree that is not installed
        return "unknown"


def import_extra(module: str, extra: str, wanted_by: str) -> Any:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise _missing(module, wanted_by, _pip(extra)) from missing


def _missing(module: str, wanted_by: str, do: str) -> MissingExtraError:
    what = f"{wanted_by} needs an extra that is not installed"
    return MissingExtraError(what, why=f"the module {module!r} cannot be imported", do=do)


def _pip(extra: str) -> str:
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that a name stands for or is one word of; where there is none, those most like it.

    >>> nearest("lr", ["learning_rate", "lora"]), nearest("size", ["sizes", "batch_size"])
    (['learning_rate'], ['batch_size'])
    """
    names = list(known)
    short = [one for one in names if initials(one) == name.lower()]
    within = sorted((one for one in names if name.lower() in re.split("[-_]", one)), key=len)
    found = list(dict.fromkeys([*short, *within]))[:most]
    return found or difflib.get_close_matches(name, names, n=most, cutoff=0.5)


def initials(name: str) -> str:
    """
    >>> initials("learning_rate"), initials("epochs")
    ('lr', '')
    """
    words = re.split("[-_]", name)
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """A sentence for an error: what the user may have meant, or everything there is."""
    names = sorted(known)
    close = nearest(name, names)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(names)}"
