"""Errors that say what, why and what to do; each has an exit code and survives pickling between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distributed.core.secrets import mask_text


def first_of(texts: Sequence[str], most: int = 3, *, between: str = ", ") -> str:
    """The first of them, and how many there are besides.

    >>> first_of(["a", "b", "c"]), first_of(["a", "b", "c"], most=1)
    ('a, b, c', 'a and 2 more')
    """
    return between.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what it is, why it cannot be, and what to do about it."""

    what: str
    why: str = ""
    do: str = ""

    def __post_init__(self) -> None:
        for name in ("what", "why", "do"):  # errors are printed, logged and sent
            object.__setattr__(self, name, mask_text(getattr(self, name)))

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.do:
            lines.append(f"  do:  {self.do}")
        return "\n".join(lines)


class DistributedError(Exception):
    """The root of all errors that a user's input, machine or run can cause.

    >>> error = ConfigError("batch_size is 0", why="a step needs a sample", do="set batch_size=1 or more")
    >>> print(error)
    batch_size is 0
      why: a step needs a sample
      do:  set batch_size=1 or more
    """

    exit_code = 1

    def __init__(self, what: str | Sequence[Problem], *, why: str = "", do: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, why, do),) if isinstance(what, str) else tuple(what)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return f"{len(self.problems)} problems\n" + "\n".join(f"- {problem}" for problem in self.problems)


class ConfigError(DistributedError):
    """The settings are wrong or contradict each other; nothing was started."""

    exit_code = 2


class PlanError(DistributedError):
    """The settings are sound but cannot run on this machine; nothing was started."""

    exit_code = 2


class DataError(DistributedError):
    """The data loader, or what it yields, cannot be trained on."""

    exit_code = 2


class TaskError(DistributedError):
    """The model, loss, optimizer or scheduler do not fit together, or cannot be sent to the ranks."""

    exit_code = 2


class LaunchError(DistributedError):
    """The processes could not be started."""

    exit_code = 3


class MissingExtraError(DistributedError):
    """An optional dependency is not installed."""

    exit_code = 4


class CheckpointError(DistributedError):
    """A checkpoint is missing, damaged or of another model."""

    exit_code = 5


class NonFiniteLossError(DistributedError):
    """The loss became NaN or infinite."""

    exit_code = 6


class CannotGoOnError(DistributedError):
    """A rank whose world broke holds too little to continue in another one; its replacement resumes."""

    exit_code = 7
    collateral = True  # it is not this rank's fault


class ReplicasDifferError(DistributedError):
    """Ranks that should hold the same do not. Another attempt begins with a checkpoint, where they did."""

    exit_code = 8


class MismatchError(DistributedError):
    """Ranks called a collective with other shapes, dtypes or operations than their peers."""


class CallbackError(DistributedError):
    """A callback failed, or asked for what cannot be; steps that are taken meanwhile would not show that it works."""

    exit_code = 2


class RankFailedError(DistributedError):
    """A rank ended early; carries the first failing rank's traceback and the path of its log."""

    def __init__(
        self,
        what: str | Sequence[Problem],
        *,
        why: str = "",
        do: str = "",
        rank: int = -1,
        traceback: str = "",
        log_path: str = "",
        exit_code: int = 1,
    ) -> None:
        super().__init__(what, why=why, do=do)
        self.rank = rank
        self.traceback = traceback
        self.log_path = log_path
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        return (type(self), (self.problems,), self.__dict__)
