"""Parameters that a backward pass leaves out under DeepSpeed, which would step them by zeros, or not reduce the rest.

ZeRO steps flat ranges, so that a parameter without a gradient is stepped all the same: weight decay and momentum move
it. Ranks that leave out different parameters fill their messages with different ones. So each pass must use those of
the first, and what that leaves out must stay where it is when its gradient is zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError, first_of
from distributed.runtime.session import Session
from distributed.strategies.checks.elementwise import moves_on_zeros

_SHOWN = 5


class UseCheck:
    """Counts the gradients that come to DeepSpeed, and looks at them before it reduces the last ones of a pass."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], session: Session) -> None:
        self._engine, self._zero, self._session = engine, engine.optimizer, session
        is_stage_3 = hasattr(self._zero, "fp16_groups")
        held = self._zero.fp16_groups if is_stage_3 else self._zero.bit16_groups
        called = "reduce_ready_partitions_and_remove_grads" if is_stage_3 else "process_gradients"
        trained = {id(p) for group in held for p in group if p.requires_grad}
        self._names = {id(p): name for name, p in parameters.items() if id(p) in trained}
        self._seen: set[int] = set()
        self._unused: set[int] | None = None  # in every pass, on every rank
        self._take, self._reduce = getattr(self._zero, called), engine.allreduce_gradients
        setattr(self._zero, called, self._note)
        engine.allreduce_gradients = self._reduce_all

    def unused(self) -> frozenset[str] | None:
        """The names of those that no pass uses; None: there was no pass yet."""
        return None if self._unused is None else frozenset(self._names[key] for key in self._unused)

    def _note(self, parameter: nn.Parameter, *args: Any) -> None:
        self._seen.add(id(parameter))
        self._take(parameter, *args)

    def _reduce_all(self, *args: Any, **options: Any) -> None:
        missing = self._names.keys() - self._seen
        self._seen = set()
        if self._unused is None:
            self._unused = self._settle(missing)
        elif missing != self._unused:
            changed = missing ^ self._unused
            raise self._refusal(changed, "the model has left them out, or used them, unlike in the first pass")
        self._reduce(*args, **options)

    def _settle(self, missing: set[int]) -> set[int]:
        """In the first pass, by all ranks."""
        flags = [int(key in missing) for key in self._names]
        own = torch.tensor([*flags, *(1 - flag for flag in flags)], device=self._session.device)
        found = self._session.max("unused parameters", own).tolist()
        missing_anywhere, there_anywhere = found[: len(flags)], found[len(flags) :]
        rows = zip(self._names, missing_anywhere, there_anywhere, strict=True)
        differing = {key for key, is_missing, is_there in rows if is_missing and is_there}
        if differing:
            raise self._refusal(differing, "some ranks have used them and others have not")
        if missing and moves_on_zeros(self._zero.optimizer):
            name = type(self._zero.optimizer).__name__
            raise self._refusal(missing, f"ZeRO gives them zeros, by which {name} moves them; in one process they stay")
        return missing

    def _refusal(self, keys: set[int], why: str) -> TaskError:
        names = [name for key, name in self._names.items() if key in keys]
        return TaskError(
            f"rank {self._session.rank}: not every backward pass gives a gradient to {first_of(names, _SHOWN)}",
            why=f"{why}, and DeepSpeed's flat gradients have no place for a parameter without one",
            do="freeze what is never used with requires_grad_(False), or use backend='pytorch-ddp' or 'fsdp' with "
            "find_unused_parameters=True",
        )
