"""One `fit` of a Keras model: config → plan → processes → the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import ConfigError, PlanError, TaskError
from distributed.core.history import History
from distributed.core.plan import Decision, Plan
from distributed.core.run_dir import RunDir
from distributed.engines.tensorflow.input.sources import (
    Arrays,
    check_order,
    draws_its_own_order,
    example_of,
    read_source,
)
from distributed.engines.tensorflow.job import KerasJob
from distributed.engines.tensorflow.model.layers import batchnorms, finalize, synchronize_batchnorm
from distributed.engines.tensorflow.model.model import (
    Compiled,
    ModelParts,
    array_of,
    build_state,
    check_compiled,
    checked_model,
    compile_model,
    compiled_of,
    decompose_model,
    has_rate_schedule,
    is_compiled,
)
from distributed.engines.tensorflow.model.scope import is_of_this_scope, scope_of, strategy_of
from distributed.engines.tensorflow.model.variables import name_variables
from distributed.engines.tensorflow.payload import write_payload
from distributed.engines.tensorflow.plan import check_world, cut_for, lay_out
from distributed.engines.tensorflow.run_state import read_arrays
from distributed.engines.tensorflow.worker import run_process
from distributed.engines.tensorflow.world.placing import placed_config, placing_engine, why_placed
from distributed.engines.tensorflow.world.strategy import KerasWorld
from distributed.engines.tensorflow.world.user_strategy import (
    adopted,
    check_outside,
    checked_strategy,
    users_world,
    why_there,
)
from distributed.launch.preflight import check_port, check_resume, run_dir_of
from distributed.launch.request import LaunchRequest
from distributed.observe.observers import check_extras
from distributed.planner.decisions.network import announce_network, network_of
from distributed.planner.hardware import probe_for, probe_hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.planner.resources import plan_resources
from distributed.trainers.launching import (
    active_mlflow_run,
    check_checkpoint_dir,
    launch_job,
    next_attempt_in,
    record_run,
    recorded_in_world,
    refuse_several_nodes,
)


class Fit:
    """What the user asked of one `fit`, read and checked."""

    def __init__(
        self,
        config: DistributedConfig,
        given: Any,
        compiled: Mapping[str, Any],
        *,
        strategy: Any,
        train: Any,
        validation: Any,
    ) -> None:
        self._placing = placing_engine(config)
        if self._placing is not None:
            config = placed_config(config, self._placing, owns_strategy=strategy is not None)
        self._config = config
        self._train = read_source(train, "train")
        self._evaluation = None if validation is None else read_source(validation, "validation", shuffle=False)
        if config.overfit_batches is not None and isinstance(self._train, Arrays):
            self._train = replace(self._train, shuffle=False)
            self._evaluation = None if validation is None else self._train
        is_function = callable(given) and not hasattr(given, "compile")
        self._build = given if is_function else None
        self.model: Any = None if is_function else checked_model(given, "model")
        self._compiled = self._compile_arguments(compiled)
        self._home = None if self.model is None else strategy_of(self.model)  # None: no scope of the user's
        self._strategy = checked_strategy(strategy, config) if strategy is not None else adopted(self._home, config)
        check_outside(self._strategy)
        if self.model is not None:
            with scope_of(self._home):
                check_compiled(self.model, self._compiled, lambda: example_of(self._train, config.seed))

    def _compile_arguments(self, given: Mapping[str, Any]) -> Compiled | None:
        """Those of the trainer win over those that the model was compiled with; None: none were given."""
        if all(value is None for value in given.values()):
            return None
        own = compiled_of(self.model) if self.model is not None else Compiled()
        return replace(own, **{name: value for name, value in given.items() if value is not None})

    def alone(self) -> History:
        """Start the processes from this one; a single replica trains right here, where a debugger sees it."""
        config, placing = self._config, self._placing
        if placing is None:
            refuse_several_nodes(config)
        run_dir = run_dir_of(config)
        plan = self._plan(run_dir, None)
        check_extras(plan)
        launch = LaunchRequest(
            command=("-m", "distributed.engines.tensorflow.worker", run_dir),
            run_dir=run_dir,
            ranks_per_node=plan.ranks_per_node,
            num_nodes=plan.num_nodes,
            master_addr=config.master_addr,
            master_port=config.master_port,
            device=plan.device,
            warm=config.warm_start,
            address=config.address,
            network=network_of(config, plan.num_nodes, plan.device),
        ).for_engine("tensorflow", config)
        resumes = bool(plan.checkpoint.resume)
        at = check_resume(plan.checkpoint.resume)
        problems = [*check_checkpoint_dir(plan), *at, *check_port(launch)]
        with next_attempt_in(run_dir, problems, resumes=resumes) as attempt:
            launch = replace(launch, attempt=attempt)
            is_several = plan.world_size > 1 or plan.engine["tasks"] > 1
            if placing is not None or (is_several and self._strategy is None):
                return self._launch(plan, launch)
            record_run(plan, self._config)
            return self._here(plan, WorkerEnv(run_dir=run_dir, attempt=launch.attempt), plan.observe.progress)

    def in_world(self, world: WorkerEnv, number: int) -> History:
        """Join the world that a launcher made, as one of its processes."""
        run_dir = world.run_dir or self._config.run_dir
        if run_dir is None:
            raise ConfigError(
                f"{world.launcher} started this process, and run_dir is not set",
                why="the processes must write to one folder",
                do="set run_dir, the same for all, or start with `distributed train`",
            )
        if world.run_dir and number > 1:
            run_dir = str(RunDir(world.run_dir).fit(number))
        plan = self._plan(run_dir, world)
        check_world(plan, world)
        announce_network(self._config, plan.num_nodes, plan.device, world)
        check_extras(plan)
        followed = world.is_followed and number == 1  # our launcher shows the progress
        with recorded_in_world(plan, self._config, world, is_held=bool(world.run_dir)):
            return self._here(plan, world, plan.observe.progress and not followed)

    def _here(self, plan: Plan, env: WorkerEnv, shows_progress: bool) -> History:
        """Train in this process: the user's own model, where it is in the scope of the strategy that trains."""
        world = users_world(self._strategy or self._home, plan, env)
        is_single = plan.engine["tasks"] * plan.engine["replicas"] == 1
        is_ready = self._home is None and is_single if world is None else world.strategy is self._home
        if self.model is not None and is_ready and plan.precision.kind == "fp32":
            with (world or KerasWorld(_default_strategy(), range(1))).strategy.scope():
                if not self._compile(plan):
                    _check_rate(plan)
                if plan.world_size > 1:
                    synchronize_batchnorm(self.model, plan.replicate.sync_batchnorm)
                build_state(self.model, example_of(self._train, plan.seed))
            job = KerasJob(plan, None, self._train, self._evaluation)
            return run_process(job, env, shows_progress=shows_progress, world=world, model=self.model).history
        history, trained = run_process(self._job(plan), env, shows_progress=shows_progress, world=world)
        if self.model is None and (world is not None or is_single):
            self.model = trained
            return history
        self._load_trained_state(plan, {name: array_of(one) for name, one in name_variables(trained).items()})
        return history

    def _compile(self, plan: Plan) -> bool:
        """In the model's scope; False: it trains as it was compiled."""
        is_own = self._compiled is None and is_compiled(self.model)
        if is_own and is_of_this_scope(self.model.optimizer):
            return False
        compiled = self._compiled or compiled_of(self.model)
        if not is_of_this_scope(compiled.optimizer):
            compiled = compiled.decompose()  # made again in this scope: outside of it, it can update nothing
        compile_model(self.model, compiled, plan)
        return True

    def _launch(self, plan: Plan, launch: LaunchRequest) -> History:
        """Send the job to new processes, wait for them, and take home what they trained."""
        job = self._job(plan)
        write = partial(write_payload, plan, job)
        history = launch_job(plan, self._config, launch, ".bin", write, starts=self._placing)
        self._load_trained_state(plan, read_arrays(history.checkpoint))
        return history

    def _job(self, plan: Plan) -> KerasJob:
        if self.model is None:
            compiled = self._compiled.decompose() if self._compiled is not None else None
            parts = ModelParts("", build=self._build, compiled=compiled)
        else:
            parts = decompose_model(self.model, self._compiled)
        return KerasJob(plan, parts, self._train, self._evaluation)

    def _load_trained_state(self, plan: Plan, trained: Mapping[str, Any]) -> None:
        """The trained state into the user's own model, or into one that the function builds here."""
        if self.model is None:
            assert self._build is not None
            self.model = checked_model(self._build(), "what the given function returned")
            self._home = strategy_of(self.model)
        with scope_of(self._home):
            self._load(plan, trained)

    def _load(self, plan: Plan, trained: Mapping[str, Any]) -> None:
        """In the model's scope."""
        self._compile(plan)
        build_state(self.model, example_of(self._train, plan.seed))
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        peak = None if plan.schedule.is_constant else float(array_of(optimizer.learning_rate))
        named = name_variables(self.model)
        if missing := [name for name in named if name.startswith("model/") and name not in trained]:
            raise TaskError(
                f"the model here has {missing[0].removeprefix('model/')}, which the trained one has not",
                why=f"{len(missing)} of its weights would stay untrained",
                do="pass a function that builds the same model wherever it is called; what was trained is in "
                f"{plan.checkpoint.dir}",
            )
        for name, variable in named.items():
            if name in trained and not name.startswith("metrics/"):
                variable.assign(trained[name])
        finalize(self.model)
        if peak is not None:
            optimizer.learning_rate = peak  # not that of the last step

    def _plan(self, run_dir: str, world: WorkerEnv | None) -> Plan:
        """Of the replicas that were asked for. A launcher counts processes, a plan replicas."""
        config = self._config
        hardware = probe_hardware() if world is not None else probe_for(config)
        if self._strategy is not None:
            config = config.merged({"num_gpus": int(self._strategy.num_replicas_in_sync)}, "strategy=…")
        replicas = None
        if world is not None:
            resources, _, _ = plan_resources(config, hardware)
            layout = lay_out(config, resources.num_nodes, resources.ranks_per_node)
            size = layout.processes * layout.replicas
            replicas = replace(world, world_size=size, local_world_size=-(-size // world.num_nodes))
        plan = make_plan(
            config, self._profile(), hardware, run_dir=run_dir, world=replicas, active_mlflow_run=active_mlflow_run()
        )
        if self._placing is not None:
            plan = plan.with_decisions(*why_placed(plan, config))
        if plan.engine["processes"] > 1:
            for source, role in ((self._train, "train"), (self._evaluation, "validation")):
                check_order(source, role)
        elif (plan.checkpoint.every or plan.checkpoint.resume) and draws_its_own_order(self._train):
            plan = plan.with_decisions(_UNREPEATED)
        plan = plan if world is None else cut_for(plan, world.world_size, world.num_nodes)
        if self._home is None:
            return plan
        users = users_world(self._strategy or self._home, plan, world or WorkerEnv())
        return plan.with_decisions(why_there(self._home, users is not None and users.strategy is self._home))

    def _profile(self) -> JobProfile:
        optimizer = self._compiled.optimizer if self._compiled is not None else None
        if optimizer is None and self.model is not None and is_compiled(self.model):
            optimizer = self.model.optimizer
        schedules = has_rate_schedule(optimizer)
        return JobProfile(
            loader_batch_size=self._train.batch_size,
            samples=self._train.samples,
            evaluations=() if self._evaluation is None else (self._evaluation.samples,),
            has_batchnorm=self.model is not None and bool(batchnorms(self.model)),
            owns_optimizer=optimizer is not None,
            owns_schedule=schedules,
            binds_schedule=schedules,
            parameters=self.model.count_params() if self.model is not None and self.model.built else 0,
        )


def _check_rate(plan: Plan) -> None:
    """A model that trains as it was compiled keeps its optimizer, and so its rate."""
    if plan.optimizer.lr_factor != 1.0:
        raise PlanError(
            f"lr_scaling={plan.settings['lr_scaling']!r} with a model that is compiled, and trained in this process",
            why="the model's optimizer is used as it is, so the setting would have no effect",
            do=f"give the optimizer {plan.optimizer.lr_factor:.4g} times the rate, or pass optimizer= to the trainer",
        )


_UNREPEATED = Decision(
    "a resumed run reads train in another order",
    "its shuffle has no seed, so that in the middle of an epoch samples would be repeated and others left out",
    "dataset.shuffle(buffer_size, seed=0)",
)


def _default_strategy() -> Any:
    import tensorflow as tf

    return tf.distribute.get_strategy()
