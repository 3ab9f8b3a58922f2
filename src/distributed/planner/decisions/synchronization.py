"""Replicas that step alone: how often they meet, and what that cannot be had together with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan
from distributed.core.plan_parts.synchronization import SynchronizationPlan
from distributed.core.values import parse_start
from distributed.planner.decisions.asynchronous import plan_asynchronous

_EVERY = {"local_sgd": 16, "post_local_sgd": 16, "diloco": 100}
_DENSE = "set synchronization='every_step'"


def plan_synchronization(
    config: DistributedConfig,
    plan: Plan,
    *,
    samples: int | None,
    task: Mapping[str, str],
    has_batchnorm: bool,
    decisions: list[Decision],
    problems: list[Problem],
) -> Plan:
    """The plan with its synchronization. `task`: the features that it needs, and how it asks for each."""
    kind = config.synchronization
    if kind == "asynchronous":
        return plan_asynchronous(
            config, plan, task=task, has_batchnorm=has_batchnorm, decisions=decisions, problems=problems
        )
    if kind == "every_step" or "local_steps" not in ENGINES.entries[plan.strategy].can:  # which is refused already
        return plan
    start = _start(config, plan, samples, problems) if kind == "post_local_sgd" else 0
    every = config.sync_every_n_steps or _EVERY[kind]
    if config.sync_every_n_steps is None:
        why = "fewer averages send less, and replicas that are longer apart learn less from each other"
        decisions.append(Decision(f"replicas meet every {every} steps", why, "sync_every_n_steps"))
    if plan.world_size == 1 and kind != "diloco":
        why = "a single rank has no replica to meet"
        decisions.append(Decision(f"{kind} has no effect while there is 1 rank", why, "num_gpus"))
    if has_batchnorm and plan.world_size > 1:
        why = (
            "replicas that step alone do not wait for each other in a forward pass; statistics are averaged as weights"
        )
        decisions.append(Decision("BatchNorm sees the samples of its rank alone", why, "synchronization"))
    problems += _refused(config, plan, task)
    meets = SynchronizationPlan(kind, every, start, config.outer_learning_rate, config.outer_momentum)
    return replace(plan, replicate=replace(plan.replicate, synchronization=meets, sync_batchnorm=False))


def _start(config: DistributedConfig, plan: Plan, samples: int | None, problems: list[Problem]) -> int:
    """After how many steps replicas begin to step alone."""
    if config.local_sgd_start is None:
        problems.append(
            Problem(
                "synchronization='post_local_sgd' without local_sgd_start",
                why="it begins as a dense run, and nothing says when replicas begin to step alone",
                do="set local_sgd_start='1 epoch', or synchronization='local_sgd'",
            )
        )
        return 0
    count, unit = parse_start(config.local_sgd_start)
    if unit == "epochs" and samples is None:
        problems.append(
            Problem(
                f"local_sgd_start={config.local_sgd_start!r}, and the training data is a stream",
                why="how many steps an epoch of a stream has is known only at its end",
                do="set local_sgd_start to a number of steps, such as 500",
            )
        )
        return 0
    start = count
    if unit == "epochs" and samples is not None:
        start = sum(plan.batch.at(epoch).steps(samples) for epoch in range(count))
    total = plan.total_steps(None if samples is None else plan.batch.steps(samples), samples)
    if total is not None and start >= total and not plan.is_dev_run:  # which may be too short for it
        problems.append(
            Problem(
                f"local_sgd_start={config.local_sgd_start!r}, and the run ends after {total} steps",
                why=f"replicas would begin to step alone after step {start}, so the setting would have no effect",
                do=f"set local_sgd_start to less than {total}, or {_DENSE} and leave local_sgd_start out",
            )
        )
    return start


def _refused(config: DistributedConfig, plan: Plan, task: Mapping[str, str]) -> list[Problem]:
    asked, compression = f"synchronization={config.synchronization!r}", plan.replicate.compression.kind
    no_ddp = "replicas that step alone reduce no gradients, so the setting would have no effect"
    uses_ddp = config.synchronization == "post_local_sgd"
    several = "every optimizer would have its own rounds, and a phase trains a part of the parameters"
    refusals = {
        "a model that is sharded over ranks": (
            not plan.is_replicated,
            "a rank that holds parts of the model cannot take a step without the others",
            f"leave the sharding out, or {_DENSE}",
        ),
        "reproducible='bitwise'": (
            plan.is_bitwise,
            "each replica trains on its own samples, so the result depends on the number of ranks",
            f"set reproducible='off', or {_DENSE}",
        ),
        f"compression={compression!r}": (
            compression != "none",
            "what is compressed are gradients, and these are not sent",
            "leave one of them out",
        ),
        task.get("several_optimizers", ""): ("several_optimizers" in task, several, _DENSE),
        task.get("manual", ""): ("manual" in task, several, f"return the loss from training_step, or {_DENSE}"),
        task.get("closure", ""): (
            "closure" in task,
            "the optimizer takes the loss of all ranks for its own",
            f"take an optimizer that steps once, such as SGD or AdamW, or {_DENSE}",
        ),
        f"bf16_parameters={config.bf16_parameters!r}": (
            bool(config.bf16_parameters),
            "what is averaged are parameters in fp32",
            "leave one of them out; mixed_precision='bf16' can be had",
        ),
        "mixed_precision='fp8'": (
            plan.precision.kind == "fp8",
            "it has not been tried with replicas that step alone",
            "set mixed_precision='bf16'",
        ),
        "capture=True": (
            config.capture is True,
            "the step after which replicas meet is another one than those before it, and a captured step is repeated",
            "leave capture out",
        ),
        "sync_batchnorm=True": (
            config.sync_batchnorm and config.given("sync_batchnorm"),
            "replicas that step alone do not wait for each other in a forward pass",
            f"leave sync_batchnorm out, or {_DENSE}",
        ),
        "slow_rank='replace'": (
            plan.slow_rank == "replace",
            "the steps that a slow rank has taken alone are held by no other",
            "leave slow_rank out: a slow rank is reported",
        ),
        **{
            f"{name}={getattr(config, name)!r}": (config.given(name) and not uses_ddp, no_ddp, f"leave {name} out")
            for name in ("find_unused_parameters", "static_graph", "bucket_cap_mb")
        },
    }
    return [Problem(f"{asked} with {other}", why=why, do=do) for other, (is_so, why, do) in refusals.items() if is_so]
