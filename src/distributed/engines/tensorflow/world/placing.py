"""Keras models on ranks that a cluster places: `backend="ray"`, or the address of a cluster."""

from __future__ import annotations

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES, Engine
from distributed.core.errors import PlanError, Problem
from distributed.core.plan import Decision, Plan
from distributed.core.registry import load_target

_STRATEGY = "multi_worker"  # a process for each device, on whichever node it is


def placing_engine(config: DistributedConfig) -> Engine | None:
    """The engine whose launcher places the ranks; None: they are started on this machine, or by each machine."""
    placing = next((name for name, engine in ENGINES.entries.items() if "keras" in engine.places), "")
    is_asked = config.address is not None or (placing and config.backend == placing)
    return ENGINES.require(placing) if is_asked and placing else None


def placed_config(config: DistributedConfig, placing: Engine, *, owns_strategy: bool) -> DistributedConfig:
    """The settings of TensorFlow's part of the run, or an error with all that does not go with a cluster."""
    named = config.merged({"backend": _name_of(placing)}, "address")
    problems: list[Problem] = load_target(placing.checks)(named) if placing.checks else []
    asked = config.tensorflow_strategy
    if asked not in ("auto", _STRATEGY):
        why = "on a cluster each rank is a process of its own, on any of its nodes"
        do = f"leave tensorflow_strategy out, or set {_STRATEGY}"
        problems.append(Problem(f"tensorflow_strategy={asked!r} on a cluster", why=why, do=do))
    if owns_strategy:
        why = "the strategy is of this process, and the ranks are processes of the cluster's nodes"
        problems.append(Problem("strategy= with a cluster", why=why, do="leave it out"))
    if problems:
        raise PlanError(problems)
    return config.merged({"backend": "tensorflow", "tensorflow_strategy": _STRATEGY}, "a cluster")


def why_placed(plan: Plan, config: DistributedConfig) -> tuple[Decision, ...]:
    """Where the ranks are, and what a fault costs there."""
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}"
    on = f"on {config.address or 'a cluster on this machine for this run'}"
    found = [Decision(f"Ray places {ranks}", on, "address")]
    if plan.checkpoint.every is None:
        why = "Ray restarts all ranks, and they resume from the newest checkpoint; none is saved before the end"
        found.append(Decision("after a fault, step 0", why, "checkpoint_frequency"))
    return tuple(found)


def _name_of(engine: Engine) -> str:
    return next(name for name, one in ENGINES.entries.items() if one is engine)
