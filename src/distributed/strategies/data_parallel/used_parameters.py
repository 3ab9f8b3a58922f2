"""Which parameters a step has used, over all ranks that share them: the others must have no gradient.

An optimizer leaves a parameter without a gradient alone, and may move one whose gradient is zeros (weight decay,
momentum). In one process a parameter that no sample has used has none. Here one that some rank has used gets zeros
where another rank has not, and one that nobody has used gets none anywhere.

Who uses what is agreed on in the first step. Later each rank looks at its own use alone, which costs no message: as
long as no rank's changes, the whole does not. With `find_unused_parameters` the ranks agree in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from distributed.core.errors import TaskError

Agree = Callable[[torch.Tensor], torch.Tensor]  # the largest of the ranks' numbers, for each parameter
_SHOWN = 5


class UsedParameters:
    """Of one rank, by name. `alike` are those that ranks may not use differently, as none adds up their gradients."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], agree: Agree, *, every_step: bool, alike: Sequence[str], rank: int
    ) -> None:
        self._parameters, self._agree, self._every_step, self._rank = parameters, agree, every_step, rank
        self._alike = [name for name in parameters if name in set(alike)]
        self._first: tuple[bool, ...] | None = None  # this rank's own use in the first step
        self._used: dict[str, nn.Parameter] | None = None  # by any rank

    @property
    def settled(self) -> frozenset[str] | None:
        """The names of those that any rank uses; None: that is still to be agreed on in this step."""
        return None if self._used is None or self._every_step else frozenset(self._used)

    def find(self, own: Sequence[bool]) -> Mapping[str, nn.Parameter]:
        """After the last backward pass: all that a rank has used, where this one has used its `own`. All ranks come."""
        mine = tuple(own)
        if self._used is not None and not self._every_step:
            if mine != self._first:
                raise self._changed(mine)
            return self._used
        self._first = mine
        by_any = self._settle(mine)
        pairs = zip(self._parameters.items(), by_any, strict=True)
        self._used = {name: parameter for (name, parameter), is_used in pairs if is_used}
        for name, parameter in self._parameters.items():
            if name not in self._used:
                parameter.grad = None
        return self._used

    def _settle(self, mine: tuple[bool, ...]) -> list[bool]:
        """One message tells who uses a parameter and, of those that must be used alike, who does not."""
        position = {name: index for index, name in enumerate(self._parameters)}
        unlike = [not mine[position[name]] for name in self._alike]
        found = self._agree(torch.tensor([*mine, *unlike], dtype=torch.int32)).tolist()
        used, unused_somewhere = found[: len(mine)], found[len(mine) :]
        pairs = zip(self._alike, unused_somewhere, strict=True)
        apart = [name for name, is_unused in pairs if is_unused and used[position[name]]]
        if apart:
            raise TaskError(
                f"{_some(apart)} got a gradient on some ranks only",
                why="these ranks compute the same with it, and would step it differently",
                do="let the model use the same parameters on all of them, or train with data parallelism alone",
            )
        return [bool(is_used) for is_used in used]

    def _changed(self, mine: tuple[bool, ...]) -> TaskError:
        assert self._first is not None
        now = zip(self._parameters, self._first, mine, strict=True)
        differing = [(name, is_used) for name, was_used, is_used in now if was_used != is_used]
        gone = [name for name, is_used in differing if not is_used]
        late = [name for name, is_used in differing if is_used]
        return changed(gone, late, self._rank)


def changed(gone: list[str], late: list[str], rank: int) -> TaskError:
    """Of a step that was not taken, whose parameters are not those of the first one."""
    what = f"{_some(gone)} got no gradient" if gone else f"{_some(late)} got a gradient"
    return TaskError(
        f"{what} on rank {rank} in this step, unlike in the first one",
        why="which parameters are reduced over the ranks is decided in the first step",
        do="set find_unused_parameters=True, or let the model use the same parameters in every step",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
