"""CompiledCall: whether a call of a compiled model runs the compiled code or the eager model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from distributed.runtime.torch_module_compat import compiled_call, set_compiled_call

TRYING, COMPILED, AS_WRITTEN = "trying", "compiled", "as written"


class CompiledCall:
    """Switches a module between compiled and eager calls after `module.compile()`; both compute the same.

    >>> layer = nn.Linear(2, 2)
    >>> layer.compile(backend="eager")
    >>> call = CompiledCall(layer, least=4)
    >>> with call.off():
    ...     compiled_call(layer) is None
    True
    """

    def __init__(self, module: nn.Module, least: int) -> None:
        """`least`: samples of a full micro-batch. A smaller one, at the end of an epoch, runs eagerly: torch would
        otherwise compile for any number of samples, and then use that code for all micro-batches."""
        self._module, self._compiled, self.least = module, compiled_call(module), least
        self._choice = ""

    @property
    def choice(self) -> str:
        """The reason if shapes keep changing; empty: they do not, or that is not known yet."""
        return self._choice

    def choose(self, choice: str) -> None:
        """Run all calls eagerly from here on."""
        self._choice = choice
        self.use(choice != AS_WRITTEN)

    def use(self, compiled: bool) -> None:
        set_compiled_call(self._module, self._compiled if compiled else None)

    @contextmanager
    def off(self) -> Iterator[None]:
        before = compiled_call(self._module)
        set_compiled_call(self._module, None)
        try:
            yield
        finally:
            set_compiled_call(self._module, before)
