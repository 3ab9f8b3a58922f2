"""The parameters that a step has used on any rank: all others must have no gradient.

An optimizer skips a parameter without a gradient, and may move one whose gradient is zeros (weight decay, momentum).
In one process a parameter that no sample has used has no gradient. Here a parameter that some rank has used gets zeros
on the other ranks, and one that no rank has used gets no gradient anywhere.

The ranks agree on the used parameters in the first step. Later each rank checks only its own use, which costs no
message: while no rank's use changes, the union does not. With `find_unused_parameters` the ranks agree in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from distributed.core.errors import TaskError, first_of

Agree = Callable[[torch.Tensor], torch.Tensor]  # the largest of the ranks' numbers, for each parameter
_SHOWN = 5


class UsedParameters:
    """The use of one rank, by name. `alike`: parameters that all ranks must use, as their gradients are not reduced."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], agree: Agree, *, every_step: bool, alike: Sequence[str], rank: int
    ) -> None:
        self._parameters, self._agree, self._every_step, self._rank = parameters, agree, every_step, rank
        self._alike = [name for name in parameters if name in set(alike)]
        self._first: tuple[bool, ...] | None = None  # this rank's own use in the first step
        self._used: dict[str, nn.Parameter] | None = None  # by any rank
        self._unused: list[nn.Parameter] = []  # by none

    @property
    def settled(self) -> frozenset[str] | None:
        """The names of the parameters that any rank uses; None: not agreed on yet in this step."""
        return None if self._used is None or self._every_step else frozenset(self._used)

    def find(self, own: Sequence[bool]) -> Mapping[str, nn.Parameter]:
        """The parameters that any rank used in a step; this rank used `own`. All ranks must call it."""
        mine = tuple(own)
        if self._used is not None and not self._every_step:
            if mine != self._first:
                raise self._changed(mine)
            self._forget_unused()
            return self._used
        self._first = mine
        by_any = self._settle(mine)
        pairs = zip(self._parameters.items(), by_any, strict=True)
        self._used = {name: parameter for (name, parameter), is_used in pairs if is_used}
        self._unused = [parameter for name, parameter in self._parameters.items() if name not in self._used]
        self._forget_unused()
        return self._used

    def _forget_unused(self) -> None:
        for parameter in self._unused:
            parameter.grad = None

    def _settle(self, mine: tuple[bool, ...]) -> list[bool]:
        """Agree in one message on the used parameters, and on those of `alike` that a rank did not use."""
        position = {name: index for index, name in enumerate(self._parameters)}
        unlike = [not mine[position[name]] for name in self._alike]
        found = self._agree(torch.tensor([*mine, *unlike], dtype=torch.int32)).tolist()
        used, unused_somewhere = found[: len(mine)], found[len(mine) :]
        pairs = zip(self._alike, unused_somewhere, strict=True)
        differing = [name for name, is_unused in pairs if is_unused and used[position[name]]]
        if differing:
            raise TaskError(
                f"{first_of(differing, _SHOWN)} got a gradient on some ranks only",
                why="the ranks compute the same with each of these parameters, and would update it differently",
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
    """The error of a step whose used parameters differ from those of the first step; it was not taken."""
    what = f"{first_of(gone, _SHOWN)} got no gradient" if gone else f"{first_of(late, _SHOWN)} got a gradient"
    return TaskError(
        f"{what} on rank {rank} in this step, unlike in the first one",
        why="which parameters are reduced over the ranks is decided in the first step",
        do="set find_unused_parameters=True, or let the model use the same parameters in every step",
    )
