"""Metrics of torchmetrics: their states are merged over the ranks by their own reductions.

Its own synchronization gathers tensor by tensor, where a rank without samples has none, and under no name of ours.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from distributed.core.errors import TaskError
from distributed.runtime.torch_compat import tree_map_only
from distributed.train.resume.sharing import Tree

_PACKAGE = "torchmetrics"
_ADDING = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat")  # reductions in which one may stand for all
_KEPT_BY_METRIC = ("_update_count", "_computed", "_forward_cache")  # by torchmetrics' own class


def is_metric(value: Any) -> bool:
    return _is_a(value, "Metric")


def is_collection(value: Any) -> bool:
    return _is_a(value, "MetricCollection")


class MergedMetric:
    """One of them on one rank."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._beside: dict[str, float] = {}
        self._has_added = False

    def reset(self) -> None:
        for part in self._parts().values():
            part.distributed_available_fn = _never  # compute would gather, on the one rank that computes
        self._metric.reset()
        self._beside, self._has_added = self._numbers_beside(), False

    def update(self, outputs: Any, target: Any) -> None:
        device = next((given.device for given in (outputs, target) if isinstance(given, torch.Tensor)), None)
        if device is not None and device != self._metric.device:
            self._metric.to(device)
        self._metric.update(outputs, target)
        self._has_added = True

    def state(self) -> Tree | None:
        parts = self._parts()
        has_added = self._has_added or any(part.update_called for part in parts.values())  # a wrapper does not say
        if not has_added:
            return None
        return {path: dict(part.metric_state) for path, part in parts.items()}

    def compute(self, states: list[Tree]) -> Any:
        if len(states) > 1:
            self._refuse_beside("update")
            self._put(self._merged(states))
        self._beside = self._numbers_beside()
        value = self._metric.compute()
        self._refuse_beside("compute")
        return value

    def as_one(self, states: list[Tree]) -> Tree | None:
        """A copy of the state of all ranks, with which one may go on; None: their reductions know no such state."""
        if len(states) == 1:
            return cast(Tree, tree_map_only(torch.Tensor, torch.clone, states[0]))
        reductions = [reduce for part in self._parts().values() for reduce in part._reductions.values()]
        adds = all(getattr(reduce, "__name__", "") in _ADDING for reduce in reductions)
        return self._merged(states) if adds else None

    def go_on(self, state: Tree | None) -> None:
        """With what was added before; None: anew."""
        self._metric.reset()
        if state is not None:
            self._put(state)
            self._metric._update_count = 1

    def _merged(self, states: list[Tree]) -> Tree:
        return {
            path: {
                name: _merge([state[path][name] for state in states], reduce, part.device)
                for name, reduce in part._reductions.items()
            }
            for path, part in self._parts().items()
        }

    def _put(self, state: Tree) -> None:
        for path, part in self._parts().items():
            for name, value in state[path].items():
                setattr(part, name, _to(value, part.device))

    def _refuse_beside(self, method: str) -> None:
        """What is no state lacks what other ranks have added, and is neither reset nor kept."""
        beside = self._numbers_beside()
        if changed := sorted(name for name, value in self._beside.items() if beside.get(name) != value):
            kind = type(self._metric).__name__
            raise TaskError(
                f"the metric {kind} keeps {', '.join(changed)} in {method}, which is no state of it",
                why="what ranks have added is put together of states, and they alone are reset and kept",
                do="declare it with add_state; of MinMaxMetric and Running, pass what they wrap",
            )

    def _numbers_beside(self) -> dict[str, float]:
        found = {}
        for path, part in self._parts().items():
            for name, value in vars(part).items():
                is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
                if is_number and not isinstance(value, bool) and name not in (*part._reductions, *_KEPT_BY_METRIC):
                    found[f"{path}.{name}".lstrip(".")] = float(value)
        return found

    def _parts(self) -> dict[str, Any]:
        """The metric itself and those inside of it, by path."""
        return {path: part for path, part in self._metric.named_modules() if is_metric(part)}


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _merge(states: list[Any], reduce: Any, device: torch.device) -> Any:
    if isinstance(states[0], list):
        return _to([item for state in states for item in state], device)
    stacked = torch.stack([state.to(device) for state in states])
    if getattr(reduce, "__name__", "") == "dim_zero_mean" and not bool((stacked == stacked[0]).all()):
        raise TaskError(
            "a torchmetrics metric has a state that is averaged over the ranks (dist_reduce_fx='mean')",
            why="ranks have unequal numbers of samples, so that a mean over ranks is not that over the samples",
            do="keep a sum and a count as two states with dist_reduce_fx='sum', and divide them in compute",
        )
    return stacked if reduce is None else reduce(stacked)


def _never() -> bool:
    return False


def _is_a(value: Any, name: str) -> bool:
    """Without importing the package, which is an extra: who has made such an object has imported it."""
    kinds = type(value).__mro__
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == _PACKAGE for kind in kinds)
