"""Proofs: when a captured step is compared with the eager one again, and what is said where they have gone apart.

What the model keeps in Python may begin to matter long after a graph was made: a schedule that starts at step 1000, a
number that other code changes. So a graph is proven at growing distances, and before its weights are saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed.core.errors import TaskError, first_of

FIRST = 16  # replays until the first proof
FACTOR = 4  # by which the next one is farther away
_NAMED = 3


class Proofs:
    """Of one graph: how often it was replayed, and how far it is proven.

    >>> proofs = Proofs()
    >>> for _ in range(FIRST):
    ...     proofs.replayed()
    >>> proofs.is_due
    True
    >>> proofs.passed()
    >>> proofs.due
    64
    """

    def __init__(self) -> None:
        self.replays, self.due = 0, FIRST
        self._proven = 0

    @property
    def is_due(self) -> bool:
        """Whether it was replayed so often that it is to be proven again."""
        return self.replays >= self.due

    @property
    def is_open(self) -> bool:
        """Whether it was replayed since it came to the same."""
        return self.replays > self._proven

    def replayed(self) -> None:
        self.replays += 1

    def passed(self) -> None:
        self._proven = self.replays
        self.due = max(FIRST, FACTOR * self.replays)


def distances() -> str:
    return ", ".join(str(FIRST * FACTOR**power) for power in range(3))


def frozen(found: str, last_good: int, step: int) -> TaskError:
    """A graph repeats what the model no longer does: steps were taken that one process would not take."""
    return TaskError(
        f"the captured step is no longer the model's, which was found after step {step}: {found}",
        why="a CUDA graph repeats what it was captured with, and something that the model, the loss or a metric keeps "
        f"in Python has changed since; both came to the same after step {last_good}, and no step since then is sure",
        do=f"set capture=False, and resume from a checkpoint of step {last_good} or before, or begin again",
    )


def about_unseen(paths: Sequence[str]) -> str:
    """For people: what no look sees into, and what is done about it."""
    return (
        f"what is inside of {first_of(paths, _NAMED)} cannot be seen: captured steps are compared with eager "
        f"ones again after {distances()} … of them and before each save, and the run stops where they differ [capture]"
    )
