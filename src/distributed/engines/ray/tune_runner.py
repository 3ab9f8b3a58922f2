"""RayRunner: the trials placed by Ray Tune, on this machine or on a cluster.

Ray Tune places the trials, starts an actor for each place and carries what they report; which parameters are tried and
which trials continue is decided by the same search and schedulers as without Ray (tune/trials/lifecycle.py). So a
search has the same trials on both engines, and one that was begun on either can be resumed on the other.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from distributed.core.choices import Device
from distributed.core.env import environ_with
from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.engines.ray.cluster import RayCluster, cluster_now, connected
from distributed.engines.ray.tune_actor import GONE, ActorSettings, PlacedTrial
from distributed.launch.node.stop_signals import Stopped, Stops
from distributed.planner.hardware import probe_hardware
from distributed.tune.runner import TuneRequest, Watcher
from distributed.tune.search_dir import SearchDir
from distributed.tune.trials import placement
from distributed.tune.trials.lifecycle import TrialLifecycle, ending
from distributed.tune.trials.processes import modules_for
from distributed.tune.trials.records import Trial
from distributed.tune.trials.trial import write_function

R_ = TypeVar("R_")
_REFRESH_S = 0.25
_CLIENT = "ray://"
_RAY_UNIT = 10_000  # parts of a device that Ray counts in
# Ray Tune's own output, its result files and its look at our metrics: ours are the screen, the journal and the checks.
_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_RESULT_BUFFER_LENGTH": "1",  # a trial waits at each report for what is decided on it
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # Ray's own state, from which nothing is resumed
    "TUNE_WARN_THRESHOLD_S": "60",
}


class RayRunner:
    """Trials where Ray puts them."""

    name = "ray"

    def __init__(self) -> None:
        self._joined = False  # this runner has connected the process, and ends the connection

    def obstacles(self, request: TuneRequest) -> list[Problem]:
        address = request.address
        if _is_here(request):
            return placement.obstacles(request, probe_hardware())
        if address is not None and address.startswith(_CLIENT):
            return [_through_the_client(address)]
        return cluster_obstacles(request, self._cluster(request))

    def decisions(self, request: TuneRequest) -> list[Decision]:
        return placement.decisions(request, probe_hardware()) if _is_here(request) else []

    def slots(self, request: TuneRequest) -> int:
        if _is_here(request):
            return placement.place(request, probe_hardware()).slots
        return cluster_slots(request, self._cluster(request))

    def run(self, request: TuneRequest, watcher: Watcher) -> None:
        hardware = probe_hardware()
        device = "cuda" if hardware.gpus else "cpu"
        with connected(request.address, placement.devices_of(request, hardware), device) as cluster, _quiet():
            _Search(request, watcher, cluster).run()

    def _cluster(self, request: TuneRequest) -> RayCluster:
        self._joined = self._joined or not ray.is_initialized()
        return cluster_now(request.address or "auto")

    def close(self) -> None:
        if self._joined:
            self._joined = False
            ray.shutdown()


def _is_here(request: TuneRequest) -> bool:
    """Whether Ray is started on this machine for the search."""
    return request.address is None and not ray.is_initialized()


def cluster_slots(request: TuneRequest, cluster: RayCluster) -> int:
    """Trials at a time; one has all of its devices on one node."""
    device = _device(cluster)
    fits = sum(node.slots(device) // request.gpus_per_trial for node in cluster.nodes)
    if request.num_gpus is not None:
        fits = request.num_gpus // request.gpus_per_trial
    return max(1, fits * request.trials_per_gpu)


def trial_resources(request: TuneRequest, device: str) -> dict[str, float]:
    """What Ray books for a trial. Trials that share a device never need more of it than there is.

    >>> from distributed.tune.space import Space
    >>> trial_resources(TuneRequest(print, Space({}), 1, "run", trials_per_gpu=7), "cuda")
    {'cpu': 0.1428, 'gpu': 0.1428}
    """
    share = math.floor(request.gpus_per_trial / request.trials_per_gpu * _RAY_UNIT) / _RAY_UNIT
    return {"cpu": share} | ({"gpu": share} if device == "cuda" else {})


def cluster_obstacles(request: TuneRequest, cluster: RayCluster) -> list[Problem]:
    """What the trials need and the cluster cannot have."""
    device = _device(cluster)
    kind = "GPUs" if device == "cuda" else "CPUs and no GPU"
    there = cluster.slots(device)
    if cluster.grows_to is not None:
        there = max(there, int(cluster.grows_to.get("GPU" if device == "cuda" else "CPU", 0)))
    widest = max((node.slots(device) for node in cluster.nodes), default=0)
    nodes = f"there is: {', '.join(map(str, cluster.nodes)) or 'no node'}"
    asked = there if request.num_gpus is None else request.num_gpus
    if not there:
        return [Problem(f"the Ray cluster has 0 {kind}", why=nodes, do="add nodes with: ray start --address …")]
    problems = []
    if asked > there:
        do = f"set num_gpus={there}, or add nodes with: ray start --address …"
        problems.append(Problem(f"num_gpus={asked}, but the Ray cluster has {there} {kind}", why=nodes, do=do))
    if request.gpus_per_trial > (asked if cluster.grows_to is not None else min(widest, asked)):
        what = f"gpus_per_trial={request.gpus_per_trial}, but "
        what += f"no node has more than {widest}" if widest < request.gpus_per_trial else f"num_gpus={asked}"
        do = f"set gpus_per_trial={max(1, min(widest, asked))} or less"
        problems.append(Problem(what, why=f"a trial runs on one node; {nodes}", do=do))
    cpus = sum(node.cpus for node in cluster.nodes)
    at_a_time = asked // request.gpus_per_trial * request.trials_per_gpu
    if request.trials_per_gpu > 1 and at_a_time > cpus and asked <= there:
        what = f"trials_per_gpu={request.trials_per_gpu} × num_gpus={asked} are {at_a_time} trials at a time"
        do = f"set trials_per_gpu={max(1, int(cpus // asked))}, or less num_gpus"
        problems.append(Problem(f"{what}, and the Ray cluster has {cpus:g} CPUs", why=nodes, do=do))
    return problems


def _through_the_client(address: str) -> Problem:
    return Problem(
        f"address={address!r} is that of a Ray client server, and a search cannot be led through it",
        why="Ray Tune would run in a process of the cluster, with neither the screen nor the journal of this one",
        do="run this on a node of the cluster (`ray job submit -- python …`) with address='auto'",
    )


def _device(cluster: RayCluster) -> Device:
    return "cuda" if any(node.gpus for node in cluster.nodes) else "cpu"


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("ray.tune")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with environ_with(_SETTINGS):
            yield
    finally:
        logger.setLevel(before)


class _Search:
    """One search over Ray Tune. A trial of Ray's is a leg of one of ours: from a start of its process to the end."""

    def __init__(self, request: TuneRequest, watcher: Watcher, cluster: RayCluster) -> None:
        self._request, self._watcher = request, watcher
        self._slots = cluster_slots(request, cluster)
        self._device = _device(cluster)
        self._lifecycle = TrialLifecycle(request, watcher)
        folder = SearchDir(request.run_dir).function
        ticket = write_function(request.train_fn, folder).to_text()
        modules = modules_for(request.train_fn)
        run_dir = os.path.abspath(request.run_dir)
        self._host = ActorSettings(
            run_dir,
            function=str(folder.absolute()),
            ticket=ticket,
            cwd=os.getcwd(),
            modules=modules,
            device=self._device,
            devices=request.gpus_per_trial,
        )
        self._trials: dict[str, Trial] = {}  # by the name that Ray knows a leg by
        self._refreshed = 0.0
        self._failed: BaseException | None = None

    def run(self) -> None:
        with _Interrupts() as stops, environ_with({"TUNE_MAX_PENDING_TRIALS_PG": str(self._slots)}):
            try:
                if not self._lifecycle.is_over:
                    self._tune(stops)
            except Exception:
                if self._failed is not None:  # Ray has made a text of it
                    raise self._failed from None
                raise
            finally:
                self._lifecycle.interrupt()  # those that are left
        if stops.number is not None:
            raise Stopped(stops.number)

    def _tune(self, stops: Stops) -> None:
        storage = SearchDir(self._request.run_dir).ray.absolute()
        number = len(list(storage.glob("tune-*"))) + 1
        tune.run(
            PlacedTrial,
            name=f"tune-{number}",
            storage_path=str(storage),
            search_alg=_Proposals(self),
            scheduler=_Decisions(self),
            stop=_Halt(lambda: stops.count > 0),
            callbacks=[_Refresher(self)],
            num_samples=-1,  # as many as there are legs
            resources_per_trial=trial_resources(self._request, self._device),
            reuse_actors=True,
            raise_on_failed_trial=False,
            verbose=0,
            trial_dirname_creator=lambda leg: f"{leg.config['note']['id']}-{leg.config['note']['attempt']}",
        )

    def guarded(self, call: Callable[[], R_]) -> R_:
        """What our own side raises ends the search; Ray would pass on its text alone."""
        try:
            return call()
        except BaseException as failed:
            self._failed = failed
            raise

    def propose(self, name: str) -> dict[str, Any] | str | None:
        """The next leg, once there is room for it."""
        if len(self._lifecycle.legs) >= self._slots:
            return None
        trial = self._lifecycle.next()
        if trial is None:
            return Searcher.FINISHED if self._lifecycle.is_over else None
        self._trials[name] = trial
        self._lifecycle.started(trial)  # in their order, which a journal is read by; Ray starts them as actors come up
        note = asdict(self._lifecycle.note(trial))
        return {"note": note, "index": trial.index, "host": asdict(self._host)}

    def take_messages(self, leg: Any, messages: list[dict[str, Any]]) -> bool:
        """Whether the trial continues. One that is stopped reports once more when its process has ended."""
        trial = self._trials[leg.trial_id]
        for message in messages:
            age_s = message.pop("age_s")
            if message["kind"] == GONE:
                self._lifecycle.end(trial, ending(message["code"]))
                return False
            if not self._lifecycle.hear(message, age_s) and message["kind"] == "report":
                leg.temporary_state.ray_actor.leave.remote()
        return True

    def lost(self, leg: Any) -> None:
        """Its actor is gone, with its node perhaps, or could not begin."""
        trial = self._trials[leg.trial_id]
        if trial.id in self._lifecycle.legs:
            self._lifecycle.end(trial, _error_of(leg))

    def refresh(self) -> None:
        if time.monotonic() - self._refreshed >= _REFRESH_S:
            self._refreshed = time.monotonic()
            self._watcher.refresh()


def _error_of(leg: Any) -> str:
    """What Ray wrote down of it; our own words where an error of ours is in it."""
    lines = Path(leg.error_file).read_text(encoding="utf-8").splitlines() if leg.error_file else []
    ours = [line for line in lines if line.startswith("distributed.core.errors.")]
    if ours:
        return ours[-1].partition(": ")[2]
    return f"Ray lost its actor: {lines[1]}" if len(lines) > 1 else "Ray lost its actor"


class _Proposals(Searcher):  # type: ignore[misc]
    """The search behind Ray's interface."""

    def __init__(self, search: _Search) -> None:
        super().__init__()
        self._search = search

    def suggest(self, trial_id: str) -> Any:
        return self._search.guarded(lambda: self._search.propose(trial_id))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The scheduler has heard it."""

    def save(self, checkpoint_path: str) -> None:
        """The journal has it."""

    def restore(self, checkpoint_path: str) -> None:
        """The journal has it."""


class _Decisions(FIFOScheduler):  # type: ignore[misc]
    """The scheduler behind Ray's interface."""

    def __init__(self, search: _Search) -> None:
        super().__init__()
        self._search = search

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        continues = self._search.guarded(lambda: self._search.take_messages(trial, json.loads(result["messages"])))
        return str(self.CONTINUE if continues else self.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._search.guarded(lambda: self._search.lost(trial))


class _Refresher(tune.Callback):  # type: ignore[misc]
    def __init__(self, search: _Search) -> None:
        self._search = search

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._search.guarded(self._search.refresh)


class _Interrupts(Stops):
    """Ctrl-C and SIGTERM: the first ends all trials, which may save; the second does not wait for them."""

    def request(self, number: int) -> None:
        super().request(number)
        if self.count > 1:
            raise KeyboardInterrupt


class _Halt(Stopper):  # type: ignore[misc]
    """Ends all trials when it is asked to."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray saves it, and it is never read: a search is resumed by its journal

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._is_asked()
