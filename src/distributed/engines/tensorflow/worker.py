"""The root of one TensorFlow process: a KerasJob and this process's place become a strategy, a model and a loop."""

from __future__ import annotations

import functools
import random
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distributed.core.env import WorkerEnv, ticket_in_env, worker_env
from distributed.core.errors import CheckpointError
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.protocol.process_owner import process_owner_of
from distributed.core.protocol.rank_protocol import Joined, Resumed
from distributed.core.protocol.ticket import Ticket
from distributed.core.run_dir import RunDir
from distributed.data.shares import most_evaluated
from distributed.engines.tensorflow.input.data import KerasEvalLoader, train_loader
from distributed.engines.tensorflow.input.sources import example_of
from distributed.engines.tensorflow.job import KerasJob
from distributed.engines.tensorflow.loop import KerasLoop
from distributed.engines.tensorflow.model.layers import check_layer_losses
from distributed.engines.tensorflow.model.rates import Rate
from distributed.engines.tensorflow.payload import Payload
from distributed.engines.tensorflow.plan import cut_for
from distributed.engines.tensorflow.run_state import KerasRunState
from distributed.engines.tensorflow.step import Stepper
from distributed.engines.tensorflow.world.cluster import announce_in_world
from distributed.engines.tensorflow.world.parameter_server import RemoteStepper, enter, has_servers, join_launcher
from distributed.engines.tensorflow.world.strategy import KerasWorld, make_world
from distributed.observe.utilization import UtilizationSampler
from distributed.observe.watchers import Watchers
from distributed.runtime.agent_line import AgentLine, agent_line
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.signals import StopSignals


class Trained(NamedTuple):
    """What this process has at the end; the model is the one that was trained here."""

    history: History
    model: Any


def run_process(
    job: KerasJob, env: WorkerEnv, *, shows_progress: bool, world: KerasWorld | None = None, model: Any = None
) -> Trained:
    """Train this process's replicas. A `model` that is given was built in the scope of this `world`."""
    plan = job.plan
    world = world or enter_world(plan, env)
    line = agent_line()
    if line is not None and not has_servers(plan):
        line.tell(Joined(False, plan.legal_sizes, in_run=True))
    seed_everything(plan.seed)
    train = train_loader(job.train, plan.batch, world.replicas, seed=plan.seed)
    batch = functools.cache(lambda: example_of(job.train, plan.seed))
    with world.strategy.scope():
        if model is None:
            assert job.model is not None
            model = job.model.make(plan, batch())
        check_layer_losses(model, batch, world.strategy.num_replicas_in_sync // world.processes)
        stepper = (RemoteStepper if has_servers(plan) else Stepper)(model, world.strategy, plan)
    per_epoch = train.steps_per_epoch
    rate = Rate(stepper.optimizer, plan.schedule, per_epoch, plan.total_steps(per_epoch))
    state = KerasRunState(plan, env, world, model, scaler=stepper.scaler, train=train)
    heartbeat = Heartbeat(RunDir(plan.run_dir).attempt(env.attempt), env.rank)
    if has_servers(plan):
        join_launcher(plan.run_dir, env, in_run=True)
    watchers, host = Watchers(shows_progress), process_owner_of(env)
    try:
        with StopSignals(is_supervised=line is not None) as stop:
            host.on_stop(stop.request)
            loop = KerasLoop(
                plan,
                model,
                stepper,
                world,
                state=state,
                train=train,
                evaluation=_evaluation(job, world),
                rate=rate,
                stop=stop,
                heartbeat=heartbeat,
                observer=watchers.observer(plan, env),
                utilization=UtilizationSampler(plan.device).percent,
                host=host,
            )
            loop.begin()
            _report_resumed(line, env, state)
            if env.is_main:
                host.resumed(state.progress.step, state.source)
            history = loop.run()
            state.close()
        host.close()
        if env.is_main:
            history.save(RunDir(plan.run_dir).history)
        _report_end(line)
        return Trained(history, model)
    except BaseException as failed:
        if isinstance(failed, Exception):  # the script may deal with it, and end well
            _report_end(line)
        with suppress(CheckpointError):  # what went wrong first is raised
            state.close()  # the save in flight is whole before this process ends: a next attempt resumes from it
        raise
    finally:
        rate.put_back()
        stepper.close()
        watchers.close()
        heartbeat.close()


def enter_world(plan: Plan, env: WorkerEnv) -> KerasWorld:
    """The strategy of the plan, and this process's part in it; a process that only serves stays in here."""
    announce_in_world(plan, env)
    return enter(plan, env) if has_servers(plan) else make_world(plan, env)


def seed_everything(seed: int) -> None:
    """Python's, numpy's and TensorFlow's generators, by which layers are initialized."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed % 2**31)


def _report_resumed(line: AgentLine | None, env: WorkerEnv, state: KerasRunState) -> None:
    if line is not None and env.is_main:
        line.tell(Resumed(env.attempt, state.progress.step, state.source))


def _report_end(line: AgentLine | None) -> None:
    if line is not None:
        line.tell(Joined(False))


def _evaluation(job: KerasJob, world: KerasWorld) -> KerasEvalLoader | None:
    if job.evaluation is None:
        return None
    if job.plan.data.evaluation == 0:
        return None
    size = job.evaluation.batch_size or job.plan.batch.per_device
    most = functools.partial(most_evaluated, job.plan, own_size=job.evaluation.batch_size)
    return KerasEvalLoader(job.evaluation, size, world.size, world.replicas, job.plan.seed, most)


def main() -> None:
    """A process that `fit` started: `python -m … -m distributed.engines.tensorflow.worker <run_dir>`."""
    run_dir = Path(sys.argv[1])
    ticket = Ticket.from_text(ticket_in_env())
    sys.path[:] = ticket.sys_path
    env = worker_env()
    assert env is not None, "the worker is started by a launcher"
    payload = Payload(run_dir, ticket.payload)
    plan = cut_for(payload.plan, env.world_size, env.num_nodes)
    world = enter_world(plan, env)
    if run_process(replace(payload.job(), plan=plan), env, shows_progress=False, world=world).history.interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
