"""TrainedParameters: which parameters require a gradient, so that a change by a callback is noticed and agreed on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter

from torch import nn

from distributed.core.errors import CallbackError, first_of
from distributed.runtime.session import Session

_SHOWN = 3


class TrainedParameters:
    """Of one rank. A look costs 20 ns for each parameter."""

    _flag = attrgetter("requires_grad")

    def __init__(self, module: nn.Module) -> None:
        self._named = dict(module.named_parameters())
        self._parameters = list(self._named.values())
        self._known = self._flags()
        self.changed: dict[str, bool] = {}  # since the run began, on any rank

    def change(self, flags: Mapping[str, bool]) -> None:
        """As the callbacks of the run that is resumed had left them; the ranks then agree on it as on any change."""
        self.changed |= flags
        for name in flags.keys() & self._named.keys():
            if not self._named[name].is_meta:
                self._named[name].requires_grad_(flags[name])

    def _flags(self) -> list[bool]:
        return list(map(self._flag, self._parameters))

    @property
    def has_changed(self) -> bool:
        return self._flags() != self._known

    def agree(self, session: Session) -> None:
        """Take the changes of all ranks for made; raises on all ranks if a rank that has a parameter differs."""
        before, self._known = self._known, self._flags()
        pairs = zip(self._named, before, self._known, strict=True)
        mine = {name: now for name, was, now in pairs if was != now}
        found = [json.loads(text) for text in session.gather_texts("what is trained", json.dumps(mine))]
        changed: dict[str, bool] = {}
        for one in found:
            changed |= one
        self.changed |= changed
        unlike = [name for name, now in changed.items() if self._differs(name, now)]
        texts = session.gather_texts("what is trained alike", json.dumps(unlike))
        differing = sorted({name for text in texts for name in json.loads(text)})
        if differing:
            raise CallbackError(
                f"a change of whether {first_of(differing, _SHOWN)} requires a gradient, on some ranks only",
                why="the gradients of a parameter are reduced over all ranks that have it, or over none",
                do="change requires_grad alike on all ranks",
            )

    def _differs(self, name: str, now: bool) -> bool:
        return name in self._named and self._named[name].requires_grad != now
