"""CollectedPredictions: the logits and labels of an evaluation, gathered over the ranks for `compute_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from distributed.adapters.gathering import gather_shares
from distributed.core.errors import TaskError
from distributed.core.registry import import_extra
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import tree_flatten, tree_map, tree_unflatten
from distributed.train.whole_set.metrics import WholeSetMetrics

_PADDING = -100  # of predictions and labels of other lengths


class CollectedPredictions(WholeSetMetrics):
    """Of one rank. `compute_metrics` is called on every rank, with the same, in the order of the data."""

    names = [""]  # noqa: RUF012 (what the metrics' names begin with: they are known once they are computed)

    def __init__(
        self,
        compute: Callable[[Any], Mapping[str, float]] | None,
        preprocess: Callable[[Any, Any], Any] | None,
        *,
        labels: list[str],
        ignored: list[str],
    ) -> None:
        """`preprocess`: of the logits of a batch; `labels`: the entries of a batch; `ignored`: those of the outputs."""
        super().__init__({})
        self._compute, self._preprocess, self._labels, self._ignored = compute, preprocess, labels, ignored
        self._logits: list[Any] = []  # of each batch
        self._targets: list[Any] = []

    def __bool__(self) -> bool:
        return self._compute is not None

    def reset(self) -> None:
        self._logits, self._targets = [], []

    def add(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        """Those of a batch, which go to the host."""
        items = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
        logits = _single([value for name, value in items if name != "loss" and name not in self._ignored])
        found = [batch[name] for name in self._labels if batch.get(name) is not None]
        targets = _single(found) if found else None
        if self._preprocess is not None:
            logits = self._preprocess(logits, targets)
        self._logits.append(_on_host(logits))
        if targets is not None:
            self._targets.append(_on_host(targets))

    def update(self, outputs: Any, target: Any) -> None:
        """Nothing: `add` has had the whole batch."""

    def compute(self, session: Session) -> dict[str, float]:
        shares = gather_shares(session, "predictions", (self._logits, self._targets))
        self._logits, self._targets = [one for share in shares for one in share[0]], [t for s in shares for t in s[1]]
        found = self.measure()
        if "loss" in found:
            raise TaskError(
                "compute_metrics returned a 'loss'",
                why="an evaluation has one already, and one of the two would be lost",
                do="return it by another name",
            )
        return found

    def gathered(self) -> tuple[Any, Any]:
        """Logits and labels as arrays, each None where there are none."""
        logits, targets = self._logits, self._targets
        return _arrays(_joined(logits)) if logits else None, _arrays(_joined(targets)) if targets else None

    def measure(self) -> dict[str, float]:
        """What `compute_metrics` says of them, by names without a prefix."""
        logits, targets = self.gathered()
        if self._compute is None or logits is None or targets is None:
            return {}
        transformers = import_extra("transformers", "transformers", "hf_trainer")
        found = self._compute(transformers.EvalPrediction(predictions=logits, label_ids=targets))
        numbers = {name: value for name, value in found.items() if _is_number(value)}
        if numbers.keys() != found.keys():
            other = next(name for name in found if name not in numbers)
            raise TaskError(
                f"compute_metrics returned {other!r} as a {type(found[other]).__name__}",
                why="the metrics of an epoch are numbers",
                do="leave it out, or return a number",
            )
        return {name.removeprefix("eval_"): float(value) for name, value in numbers.items()}


def _single(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else tuple(found)


def _on_host(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _arrays(tree: Any) -> Any:
    def array(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()

    return tree_map(array, tree)


def _joined(trees: list[Any]) -> Any:
    """Trees of tensors with their samples one after the other, padded to one length.

    >>> _joined([torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)]).tolist()
    [[1, -100], [1, 1]]
    """
    columns, form = zip(*(tree_flatten(tree) for tree in trees), strict=True)
    return tree_unflatten([_cat(list(parts)) for parts in zip(*columns, strict=True)], form[0])


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    lengths = {part.shape[1] for part in parts if part.dim() > 1}
    if len(lengths) > 1:
        longest = max(lengths)
        behind = [(0, 0) * (part.dim() - 2) + (0, longest - part.shape[1]) for part in parts]
        parts = [pad(part, sizes, value=_PADDING) for part, sizes in zip(parts, behind, strict=True)]
    return torch.cat(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0
