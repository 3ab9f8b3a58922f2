"""Modes of a model: which modules stay in eval mode while it is trained, what is trained, and eval mode for a scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from distributed.core.plan import Decision


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A scope in eval mode; every module's training flag is restored after it.

    >>> layer = nn.Dropout()
    >>> with evaluating(layer):
    ...     layer.training
    False
    >>> layer.training
    True
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class KeptModes:
    """The modes that a model came with: where they differ, modules in eval mode stay there in training.

    A model that is in eval mode as a whole, as `from_pretrained` returns one, is trained in training mode.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    >>> modes = KeptModes(model)
    >>> modes.keep(model.train())
    >>> model[0].training, model[1].training
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = {path: part.training for path, part in module.named_modules()}
        evaluated = [path for path, mode in self._before.items() if not mode]
        self._is_evaluated = len(evaluated) == len(self._before)
        self._kept = [] if self._is_evaluated else evaluated
        self._trained: dict[str, bool] = {}

    def note_trained(self, module: nn.Module) -> None:
        """Callbacks may freeze and unfreeze parameters from here on, until `restore`."""
        self._trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}

    def keep(self, module: nn.Module) -> None:
        """After the whole model was switched to training mode."""
        self._set(module, dict.fromkeys(self._kept, False))

    def restore(self, module: nn.Module) -> None:
        """As they came, also for a next world, whose ranks make one optimizer of what is trained."""
        self._set(module, self._before)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad != self._trained.get(name, parameter.requires_grad):
                parameter.requires_grad_(self._trained[name])

    def decisions(self) -> list[Decision]:
        if self._is_evaluated:
            return [Decision("training mode", "all modules of the model are in eval mode, so none was singled out")]
        if not self._kept:
            return []
        named = ", ".join(self._kept[:3]) + (" …" if len(self._kept) > 3 else "")
        count = f"{len(self._kept)} module{'s' * (len(self._kept) > 1)}"
        return [Decision(f"{count} in eval mode", f"{named} came so, and the others in training mode", "model.train()")]

    def _set(self, module: nn.Module, modes: Mapping[str, bool]) -> None:
        """By path, as engines replace modules; without their own `train`, which may act on others."""
        parts = dict(module.named_modules())
        for path, mode in modes.items():
            if path in parts:
                parts[path].training = mode
