"""WholeSetMetrics: those of a task; each rank adds its batches, and one rank computes over the states of all.

A state holds this rank's samples, every one once, so what is computed is what one process would compute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from distributed.core.errors import CheckpointError, TaskError
from distributed.core.protocol.failure import is_collateral
from distributed.runtime.session import Session
from distributed.train.resume.sharing import Tree, send_tree
from distributed.train.whole_set.functions import GatheredFunction, WholeSetFunction
from distributed.train.whole_set.torch_metrics import MergedMetric, is_collection, is_metric


class WholeSetMetric(Protocol):
    """One of them, on one rank."""

    def reset(self) -> None: ...

    def update(self, outputs: Any, target: Any) -> None:
        """Add a batch of this rank's."""

    def state(self) -> Tree | None:
        """What this rank has added: tensors, numbers and texts; None: nothing."""

    def compute(self, states: list[Tree]) -> Any:
        """The value over the states of all ranks that have one, in their order."""


class WholeSetMetrics:
    """By the names that users gave them. Every rank computes at the same time."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._all: dict[str, WholeSetMetric] = {}
        for name, metric in metrics.items():
            if isinstance(metric, WholeSetFunction):
                self._all[name] = GatheredFunction(metric.function)
            elif is_collection(metric):
                self._all |= {f"{name}_{part}": MergedMetric(own) for part, own in metric.items()}
            else:
                self._all[name] = MergedMetric(metric)

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def names(self) -> list[str]:
        """One with several values has more names, which begin with its own."""
        return list(self._all)

    def reset(self) -> None:
        for metric in self._all.values():
            metric.reset()

    def update(self, outputs: Any, target: Any) -> None:
        if outputs is None:
            raise TaskError(
                f"{self.names[0]} is measured over the whole set, and validation_step returned no outputs",
                why="the metric is computed of outputs and targets, and the step returned its loss alone",
                do="return {'loss': …, 'outputs': …, 'target': …} from validation_step",
            )
        for name, metric in self._all.items():
            try:
                metric.update(outputs, target)
            except Exception as failed:
                if is_collateral(failed):
                    raise
                raise _failed(name, "take a batch", failed) from failed

    def compute(self, session: Session) -> dict[str, float]:
        """The values over all ranks, the same on each of them."""
        found: dict[str, float] = {}
        for name, metric in self._all.items():
            found |= self._compute_one(name, metric, session)
        return found

    def _compute_one(self, name: str, metric: WholeSetMetric, session: Session) -> dict[str, float]:
        try:
            states = states_of_ranks("a whole-set metric", metric.state(), session)
        except CheckpointError as failed:
            raise _failed(name, "be sent to another rank", failed) from failed
        if states is None:
            return {}
        text = None
        if states:
            try:
                text = json.dumps(values_of(name, metric.compute(states)))
            except Exception as failed:
                if is_collateral(failed) or isinstance(failed, TaskError):
                    raise
                raise _failed(name, "be computed", failed) from failed
        found: dict[str, float] = json.loads(session.share_text(f"whole-set-{session.number()}", text))
        return found


def states_of_ranks(what: str, mine: Tree | None, session: Session, *, on_all: bool = False) -> list[Tree] | None:
    """Of the ranks that have one, in their order: on the first of them, or `on_all`; every rank calls it.

    On the others it is empty. None: no rank has a state.
    """
    has_state = session.gather_texts(f"who has {what}", "" if mine is None else "yes")
    sources = [rank for rank, text in enumerate(has_state) if text]
    if not sources:
        return None
    states: list[Tree] = []
    for source in sources:
        state: Tree = {"state": mine}
        if len(sources) > 1 or (on_all and session.world_size > 1):
            state = send_tree(session, what, source, state)
        if on_all or session.rank == sources[0]:
            states.append(state["state"])
    return states


def is_whole_set(metric: Any) -> bool:
    """Whether a metric is one of whole sets, and no function of a batch."""
    return isinstance(metric, WholeSetFunction) or is_metric(metric) or is_collection(metric)


def values_of(name: str, value: Any) -> dict[str, float]:
    """What a metric has computed, as numbers by name.

    >>> values_of("f1", [0.5, 1.0])
    {'f1_0': 0.5, 'f1_1': 1.0}
    >>> values_of("rouge", {"l": 0.25})
    {'rouge_l': 0.25}
    """
    if isinstance(value, Mapping):
        return {key: number for part, own in value.items() for key, number in values_of(f"{name}_{part}", own).items()}
    if isinstance(value, tuple | list):
        found = enumerate(value)
        return {key: number for place, own in found for key, number in values_of(f"{name}_{place}", own).items()}
    if hasattr(value, "tolist") and not isinstance(value, float | int):  # of torch or numpy
        listed = value.tolist()
        return values_of(name, listed if isinstance(listed, list) else float(listed))
    if isinstance(value, float | int):
        return {name: float(value)}
    raise TaskError(
        f"metric {name!r} has computed a {type(value).__name__}",
        why="a metric is a number, or several by name or by place",
        do="return a float, or a dict of floats",
    )


def _failed(name: str, what: str, failed: Exception) -> TaskError:
    return TaskError(
        f"the whole-set metric {name!r} could not {what}: {type(failed).__name__}: {failed}",
        why="without it, the metrics of the validation would not be those of the whole set",
        do="correct the metric, or leave it out",
    )
