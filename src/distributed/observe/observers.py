"""The observers that a plan names, as one that cannot end the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

from distributed.core.errors import MissingExtraError, Problem
from distributed.core.events import Event, Observer
from distributed.core.plan import Plan
from distributed.core.registry import DISTRIBUTION, Entry, Registry
from distributed.core.run_dir import RunDir
from distributed.observe.background import Background, failure_text, warn_on_stderr
from distributed.observe.csv_log import CsvLog
from distributed.observe.event_log import EventLog
from distributed.observe.trial import trial_observers

OBSERVERS = Registry(
    "observer",
    {
        "tensorboard": Entry("distributed.observe.tensorboard:TensorBoardObserver", "tensorboard", "tensorboard"),
        # No `needs`: importing mlflow takes seconds, which its observer spends in the background.
        "mlflow": Entry("distributed.observe.mlflow:MlflowObserver", "", "mlflow"),
    },
)


class Observers:
    """Several observers as one. One that raises is named on stderr, once, and gets no more events."""

    def __init__(self, observers: Iterable[Observer], *, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._observers = list(observers)
        self._warn = warn

    def on(self, event: Event) -> None:
        for observer in tuple(self._observers):
            self._guard(observer, partial(observer.on, event))

    def close(self) -> None:
        for observer in tuple(self._observers):
            self._guard(observer, observer.close)
        self._observers.clear()

    def _guard(self, observer: Observer, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - an observer that fails is dropped, and never ends a run
            self._observers.remove(observer)
            self._warn(failure_text(observer, error))


def observers_for(plan: Plan) -> list[Observer]:
    """What rank 0 feeds: the event log always, dashboards as planned, and the search whose trial this is.

    Wrap the list in `Observers`.
    """
    run = RunDir(plan.run_dir)
    observers: list[Observer] = [EventLog(run.events), *trial_observers()]
    if plan.observe.csv:
        observers.append(CsvLog(run.metrics))
    if plan.observe.tensorboard_dir:
        observers.append(OBSERVERS.load("tensorboard")(plan.observe.tensorboard_dir))
    if plan.observe.mlflow is not None:
        observers.append(Background(OBSERVERS.load("mlflow")(plan.observe.mlflow, plan.run_dir)))
    return observers


def check_extras(plan: Plan) -> None:
    """Raise before anything starts when a dashboard that the plan names is not installed; imports none of them."""
    wanted = [("tensorboard", bool(plan.observe.tensorboard_dir)), ("mlflow", plan.observe.mlflow is not None)]
    problems = [
        Problem(
            f"observer {name!r} needs an extra that is not installed",
            why=f"the module {name!r} cannot be imported",
            do=f'pip install "{DISTRIBUTION}[{OBSERVERS.entries[name].extra}]"',
        )
        for name, asked in wanted
        if asked and not _installed(name)
    ]
    if problems:
        raise MissingExtraError(problems)


def _installed(module: str) -> bool:
    """A folder of that name in the working directory, which Python takes for a package without code, does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
