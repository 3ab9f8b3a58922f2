"""What a prepared DataLoader yields: this rank's share of each batch, on its device, in step with the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from distributed.runtime.torch_compat import tree_map

Begin = Callable[[], Iterator[Any]]


class TrainingBatches:
    """The training data of a run; a pass over it is the rest of an epoch."""

    def __init__(self, dataset: Any, begin: Begin, length: Callable[[], int]) -> None:
        self.dataset, self._begin, self._length = dataset, begin, length

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self._length()


class EvaluationBatches:
    """Data that is not trained on: every sample once, over all ranks."""

    def __init__(
        self,
        dataset: Any,
        loader: Iterable[tuple[Any, int]],
        *,
        move: Callable[[Any], Any],
        begun: Callable[[], None],
        entered: Callable[[int | None], None],
        left: Callable[[], None],
        ended: Callable[[], object],
    ) -> None:
        """`begun` is called before the first batch; `entered` gets the samples of each, and None where the pass ends.
        `left` is called where the loop breaks it off, and `ended` by every rank after its last batch."""
        self.dataset, self._loader, self._move, self._entered = dataset, loader, move, entered
        self._begun, self._left, self._ended = begun, left, ended

    def __iter__(self) -> Iterator[Any]:
        self._begun()
        try:
            for batch, size in self._loader:
                moved = self._move(batch)
                self._entered(size)
                yield moved if size else _without_samples(moved)
        except GeneratorExit:  # the loop leaves it
            self._left()
            raise
        finally:
            self._entered(None)
        self._ended()


def _without_samples(batch: Any) -> Any:
    """Of a stand-in, with which a rank keeps in step with the others: tensors without rows."""
    return tree_map(lambda leaf: leaf[:0] if hasattr(leaf, "dim") and leaf.dim() else leaf, batch)
