"""RayLauncher: Ray places the ranks on its cluster and starts them again after faults; this process follows the run."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager

from ray.experimental import internal_kv
from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from distributed.core.atomic import make_private, write_private
from distributed.core.env import environ_with, inherited_environ
from distributed.core.errors import DistributedError, LaunchError
from distributed.core.run_dir import RunDir
from distributed.engines.ray.cluster import PlacementRequest, RayCluster, connected, shortage
from distributed.engines.ray.follow import Following
from distributed.engines.ray.names import FOLDER, NAMESPACE, stop_key
from distributed.engines.ray.trial import TuneScreen, holds_ranks, is_ray_trial
from distributed.engines.ray.verdict import RayVerdict
from distributed.engines.ray.worker import END_AT_ONCE, PlacedRanks, RankOrder, become_rank
from distributed.launch.base import Launcher
from distributed.launch.local import LocalLauncher
from distributed.launch.node.log_mirror import LogMirror, MirrorScreen
from distributed.launch.node.stop_signals import Stopped, Stops
from distributed.launch.request import LaunchRequest, Rendered, command_line
from distributed.launch.supervise.policy import MAX_RESTARTS
from distributed.launch.supervise.restart_limits import RestartLimits

_POLL_S = 0.1
_CLOSE_S = 10.0  # for a run that is closed without a wait
_END_S = 5.0  # for ranks that end at once
_CONSIDER_SIZE_S = 5.0  # between looks of Ray at whether the run could have more ranks
# What Ray Train takes from the environment; one that is set already is kept. Its reports wait for its looks at the
# workers, so these are frequent.
_RAY_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class RayLauncher(Launcher):
    """Starts ranks on a Ray cluster: the one at the request's address, or one on this machine for this run alone."""

    def run(
        self,
        request: LaunchRequest,
        screen: MirrorScreen | None = None,
        *,
        limits: RestartLimits | None = None,
        on_stop: Callable[[int], None] | None = None,
    ) -> None:
        """Until the run is done. Raises RankFailedError for the rank that it failed of, and Stopped (a
        KeyboardInterrupt) when it was stopped from outside and the ranks ended as asked."""
        limits = limits or RestartLimits()
        if is_ray_trial():
            screen = TuneScreen(screen, request.run_dir)
        if holds_ranks(request):
            LocalLauncher().run(request, screen, limits=limits, on_stop=on_stop)
            return
        placement = placement_of(request, limits)
        with connected(request.address, placement.most, request.device) as cluster:
            problems = shortage(placement, cluster)
            if problems:
                raise LaunchError(problems)
            RayRun(request, limits, placement, cluster=cluster, mirror=LogMirror(screen), on_stop=on_stop).wait()

    def submit(
        self,
        request: LaunchRequest,
        screen: MirrorScreen | None = None,
        *,
        limits: RestartLimits | None = None,
        on_stop: Callable[[int], None] | None = None,
    ) -> RayJob:
        return RayJob(lambda: self.run(request, screen, limits=limits, on_stop=on_stop))

    def reserve(self, ranks: int, device: str) -> AbstractContextManager[object]:
        """A cluster on this machine, which the jobs find."""
        return connected(None, ranks, device)

    def render(self, request: LaunchRequest, limits: RestartLimits) -> Rendered:
        """What would be placed, and what each rank would run."""
        placement = placement_of(request, limits)
        where = f"the Ray cluster at {request.address}" if request.address else "a Ray cluster on this machine"
        size = f"{placement.most}" if placement.fewest == placement.most else f"{placement.fewest} to {placement.most}"
        each = "1 CPU and 1 GPU" if request.device == "cuda" else "1 CPU"
        command = command_line(("python", *request.command), variables_of(request))
        placed = f"{size} ranks on {where}, with {each} each, placed by {placement.strategy}"
        return Rendered((f"run directory {request.run_dir}", placed), (f"[each rank] {command}",))


def variables_of(request: LaunchRequest) -> dict[str, str]:
    """What each rank gets beside its place, which Ray gives it."""
    variables = {}
    if request.threads_per_rank is not None:  # Ray has set it for the CPUs that it has booked
        variables["OMP_NUM_THREADS"] = str(request.threads_per_rank)
    if request.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables | dict(request.env)


def placement_of(request: LaunchRequest, limits: RestartLimits) -> PlacementRequest:
    """How many ranks a request needs, and how they are spread over nodes."""
    per_node = request.ranks_per_node
    fewest = request.fewest_nodes * min(limits.min_gpus or per_node, per_node)
    is_by_node = request.most_nodes > 1
    return PlacementRequest(
        device=request.device,
        fewest=fewest,
        most=request.most_nodes * per_node,
        num_nodes=request.fewest_nodes,
        per_node=per_node if is_by_node and limits.min_gpus is None else None,
    )


class RayJob:
    """A run that a thread of this process follows, so that several can run at once."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, args=(run,), daemon=True)
        self._thread.start()

    def _follow(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: raised by `wait`
            self._error = error

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give the ranks the time to end by themselves; those that do not end with this process."""
        self._thread.join(_CLOSE_S)


class RayRun:
    """One run on a cluster that this process is connected to."""

    def __init__(
        self,
        request: LaunchRequest,
        limits: RestartLimits,
        placement: PlacementRequest,
        *,
        cluster: RayCluster,
        mirror: LogMirror,
        on_stop: Callable[[int], None] | None,
    ) -> None:
        self._request, self._limits, self._placement, self._cluster = request, limits, placement, cluster
        self._run, self._run_dir = uuid.uuid4().hex, os.path.abspath(request.run_dir)
        self._stops = Stops(on_stop)
        self._following = Following(self._run_dir, request.attempt, mirror, placement)
        self._answered, self._end_by = 0, float("inf")
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._write_launch()
        trainer = self._trainer()
        fitting = threading.Thread(target=self._fit, args=(trainer,), daemon=True, name="ray.train")
        environ = inherited_environ()
        unset = {name: value for name, value in _RAY_TRAIN.items() if name not in environ}
        status = "failed"
        with self._stops, environ_with(unset):
            fitting.start()
            try:
                while fitting.is_alive() and time.monotonic() < self._end_by:
                    self._answer()
                    self._following.look()
                    fitting.join(_POLL_S)
                if fitting.is_alive():
                    self._following.look()
                else:
                    self._conclude()
                status = "stopped" if self._stops.count else "done"
            finally:
                if fitting.is_alive():  # they had their time, or this thread was made to leave, as by Ray Tune
                    self._ask(END_AT_ONCE)
                    fitting.join(_END_S)
                self._following.close(status)
                if not fitting.is_alive():  # else ranks that come later still have to hear it
                    internal_kv._internal_kv_del(f"{self._run}/", del_by_prefix=True, namespace=NAMESPACE)
        if self._stops.number is not None:
            raise Stopped(self._stops.number)

    def _write_launch(self) -> None:
        """Rank 0 writes its own. Where the first world does not come to that, the next one must not take the id of an
        earlier launch for this one's, and that one's checkpoints for its own."""
        make_private(self._run_dir)
        write_private(RunDir(self._run_dir).launch, json.dumps({"id": self._run}) + "\n")

    def _ask(self, number: int) -> None:
        internal_kv._internal_kv_put(stop_key(self._run), str(number).encode(), namespace=NAMESPACE)

    def _fit(self, trainer: DataParallelTrainer) -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: raised when the run is concluded
            self._error = error

    def _conclude(self) -> None:
        """What the end of Ray's run means: nothing where it is done, or was stopped as asked; else the error."""
        self._following.look()
        if self._stops.count > 1 or (self._error is None and self._stops.count):
            return
        if self._error is None:
            self._following.finish()
            return
        failed = self._following.failure()
        if failed is not None:
            raise failed
        if isinstance(self._error, DistributedError):
            raise self._error
        lines = str(self._error).strip().splitlines() or [type(self._error).__name__]
        raise LaunchError(
            f"Ray ended the run: {lines[0]}",
            why=" ".join(" ".join(lines[1:]).split())[:600],
            do=f"the logs of the ranks are under {RunDir(self._run_dir).attempts}; "
            "Ray's own are in its temporary directory",
        ) from self._error

    def _answer(self) -> None:
        """The first request to stop is passed on to the ranks, which may want to save; the second ends them."""
        requests = self._stops.count
        if requests <= self._answered:
            return
        assert self._stops.number is not None
        self._ask(int(self._stops.number) if requests == 1 else END_AT_ONCE)
        if requests == 1:
            self._stops.announce()
        can_save = requests == 1 and self._following.has_ranks
        grace = self._limits.interrupt_grace_s if can_save else _END_S
        self._end_by = time.monotonic() + grace
        self._answered = requests

    def _trainer(self) -> DataParallelTrainer:
        request, placement = self._request, self._placement
        order = RankOrder(
            run=self._run,
            command=request.command,
            run_dir=self._run_dir,
            folder=os.getcwd(),
            first_attempt=request.attempt,
            nominal_ranks=request.num_nodes * request.ranks_per_node,
            env=variables_of(request),
            roles=request.roles,
            network=request.network,
        )
        verdict = RayVerdict(self._run, self._run_dir, self._limits.max_restarts, request.attempt)
        return DataParallelTrainer(
            become_rank,
            train_loop_config=vars(order),
            backend_config=PlacedRanks(),
            scaling_config=ScalingConfig(
                num_workers=placement.most
                if placement.fewest == placement.most
                else (placement.fewest, placement.most),
                use_gpu=request.device == "cuda",
                resources_per_worker={"CPU": 1} | ({"GPU": 1} if request.device == "cuda" else {}),
                placement_strategy=placement.strategy,
                elastic_resize_monitor_interval_s=_CONSIDER_SIZE_S,
            ),
            run_config=RunConfig(  # type: ignore[arg-type]  # Ray types it as the older one
                # Ray takes up an old run where it finds the same name; ours resumes from its own checkpoints.
                name=f"launch-{request.attempt}-{self._run[:8]}",
                storage_path=str(RunDir(self._run_dir).engine_folder(FOLDER)),
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=MAX_RESTARTS),
                callbacks=[verdict],  # type: ignore[list-item]  # Ray takes those of its workers' groups too
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
