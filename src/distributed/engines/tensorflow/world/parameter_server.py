"""Training around a parameter server: a chief hands batches to workers, each of which updates what the servers hold.

A worker that dies is replaced while the others continue: its batch is given to another one. The chief and the servers
hold what cannot be replaced; when one of them dies, all begin again from the newest checkpoint.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import tensorflow as tf

from distributed.core.env import WorkerEnv
from distributed.core.plan import Plan
from distributed.core.protocol.heartbeat import read_beat
from distributed.core.protocol.rank_protocol import Joined, Resumed
from distributed.core.run_dir import RunDir
from distributed.engines.tensorflow.input.data import Micro, ReplicaPart
from distributed.engines.tensorflow.step import Stepper, StepResult
from distributed.engines.tensorflow.world.strategy import KerasWorld, Setup, set_threads
from distributed.runtime.agent_line import AgentLine, agent_line
from distributed.runtime.heartbeat import Heartbeat

_STEPS_AHEAD = 2  # that are handed out while earlier ones are not done


def has_servers(plan: Plan) -> bool:
    return bool(plan.engine["strategy"] == "parameter_server")


def enter(plan: Plan, world: WorkerEnv) -> KerasWorld:
    """The strategy as the chief sees it, once all others answer. In any other process this does not return: it answers
    the chief until the launcher ends it, which is when the chief has ended."""
    set_threads(Setup.of(plan), plan.threads_per_rank)
    return ChiefWorld(join_cluster(world), range(plan.engine["processes"]))


@functools.cache
def join_cluster(world: WorkerEnv) -> Any:
    """The chief's strategy, once in a process: what was made in TensorFlow before has no device any more."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        _serve(world, resolver)
    return tf.distribute.ParameterServerStrategy(resolver)


class ChiefWorld(KerasWorld):
    """A replica is a worker, though TensorFlow counts one, since each updates by itself."""

    @property
    def size(self) -> int:
        return len(self.replicas)

    @property
    def measures_training(self) -> bool:
        """They are sums that workers read and then write: of two at once, one would not be counted."""
        return False


def _serve(world: WorkerEnv, resolver: Any) -> NoReturn:
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    heartbeat = Heartbeat(
        RunDir(world.run_dir).attempt(world.attempt), world.rank
    )  # says that it lives; it makes no steps
    join_launcher(world.run_dir, world)
    server.join()
    raise AssertionError(f"{heartbeat} and {server} are there for as long as this process is")


def join_launcher(run_dir: str, world: WorkerEnv, *, in_run: bool = False) -> None:
    """Report to the launcher that this process survives when others are replaced; once it has a heartbeat."""
    line = agent_line()
    if line is None:
        return
    line.tell(Joined(regroups=True, sizes=[world.world_size], in_run=in_run))
    follow = threading.Thread(target=_follow, args=(line, run_dir, world), name="worlds", daemon=True)
    follow.start()


def _follow(line: AgentLine, run_dir: str, world: WorkerEnv) -> None:
    """A world in which another task was replaced is the same to this one; the launcher looks for it in the new one."""
    first = RunDir(run_dir).attempt(world.attempt).heartbeat(world.rank)
    after = world.attempt
    while (world_after := line.next_world(after)) is not None:
        after = world_after.attempt
        folder = RunDir(run_dir).attempt(after)
        os.makedirs(folder, exist_ok=True)
        with suppress(OSError):  # it has one already
            os.link(first, folder.heartbeat(world.rank))
        if world.is_main:
            beat = read_beat(first)
            line.tell(Resumed(after, beat.step if beat is not None else 0, "memory of rank 0"))


class RemoteStepper(Stepper):
    """Gives every replica's part of a step to a free worker, each as an update of its own."""

    def __init__(self, model: Any, strategy: Any, plan: Plan) -> None:
        super().__init__(model, strategy, plan)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._most = _STEPS_AHEAD * plan.engine["processes"]
        self._handed_out: deque[Any] = deque()
        _count_atomically(self.optimizer)

    def step(self, micros: Sequence[Micro], *, is_asked: bool = False) -> StepResult:
        """Returns when the parts are handed out, and not too many are."""
        parts = [part for micro in micros for part in micro.parts if part.size]
        results = [self._hand_out(part) for part in parts]
        sizes = [part.size for part in parts]
        loss, norm = (Later(self._fetch, results, sizes, position) for position in (0, 1))
        return StepResult(loss, norm, self._asked if is_asked else self._not_asked)

    def settle(self) -> None:
        """Wait until everything that was handed out is done: then the parameters are those after this step."""
        self._coordinator.join()
        self._handed_out.clear()

    def evaluate(self, micro: Micro) -> tuple[Any, Any]:
        """One part after another: metrics are counters that two workers at once would not keep right."""
        loss, count = tf.zeros(()), tf.zeros(())
        for part in micro.parts:
            if part.size:
                arguments = (_tensors(part), tf.constant(float(part.size)), False)
                of_part, samples = self._fetch(self._coordinator.schedule(self._evaluate, args=arguments))
                loss, count = loss + of_part, count + samples
        return loss, count

    def _hand_out(self, part: ReplicaPart) -> Any:
        while len(self._handed_out) >= self._most:
            self._fetch(self._handed_out.popleft())
        arguments = (_tensors(part), tf.ones(()), tf.constant(float(part.size)), None, self._not_asked)
        result = self._coordinator.schedule(self._last, args=(*arguments, self._not_asked, False))
        self._handed_out.append(result)
        return result

    def _fetch(self, result: Any) -> Any:
        """What a worker made of a part. It counts as there before it has left the worker: when the worker dies in
        between, another one makes it again, and has once all is done."""
        try:
            return result.fetch()
        except tf.errors.OpError:
            self._coordinator.join()  # raises what cannot be repeated
            return result.fetch()

    def _gradients(self, *arguments: Any) -> tuple[list[Any], Any]:
        self._trains = True  # while a step is traced
        try:
            return super()._gradients(*arguments)
        finally:
            self._trains = False

    _trains = False

    def _measure(self, *arguments: Any, **named: Any) -> None:
        if not self._trains:
            super()._measure(*arguments, **named)


class Later:
    """The mean over a step's parts of a number that workers have yet to return; reading it waits for them."""

    def __init__(
        self, fetch: Callable[[Any], Any], results: Sequence[Any], sizes: Sequence[int], position: int
    ) -> None:
        self._fetch, self._results, self._sizes, self._position = fetch, results, sizes, position

    def _values(self) -> Iterator[float]:
        total = sum(self._sizes)
        for result, size in zip(self._results, self._sizes, strict=True):
            yield float(self._fetch(result)[self._position]) * size / total

    def __float__(self) -> float:
        return sum(self._values())

    def numpy(self) -> float:
        return float(self)


def _tensors(part: ReplicaPart) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, part.batch)


def _count_atomically(optimizer: Any) -> None:
    """Keras 3 reads its counter of steps and then writes it: of two workers at once, one would not be counted."""
    iterations = optimizer.iterations
    held = getattr(iterations, "value", None)
    if isinstance(held, tf.Variable):
        iterations.assign_add = lambda value: held.assign_add(tf.cast(value, held.dtype))
