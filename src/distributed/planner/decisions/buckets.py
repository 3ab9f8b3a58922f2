"""DDP's gradient buckets: where their size can be measured in the first steps of a run."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan

BUCKET_CAP_MB = 25.0  # torch's own, from which a measurement begins
_A_NUMBER = f"set bucket_cap_mb={BUCKET_CAP_MB:g}"


def plan_buckets(
    config: DistributedConfig, plan: Plan, task: Mapping[str, str], decisions: list[Decision], problems: list[Problem]
) -> None:
    """`task`: the features that it needs, and how it asks for each."""
    if config.bucket_cap_mb != "auto":
        return
    if plan.world_size == 1:
        decisions.append(Decision("no buckets of gradients to measure", "a single rank reduces none", "num_gpus"))
        return
    engine = ENGINES.entries[plan.strategy]
    by_ddp = engine.is_native and plan.is_replicated and not engine.owns_reduction
    refusals = {
        f"backend={plan.strategy!r}": (
            not by_ddp,
            "only DDP reduces gradients in buckets of that size, for replicas of a whole model",
            "leave bucket_cap_mb out",
        ),
        "find_unused_parameters": (
            config.find_unused_parameters,
            "DDP then lays its buckets out by what its first steps have used, and measures would not be alike",
            _A_NUMBER,
        ),
        "static_graph": (
            config.static_graph,
            "DDP then lays its buckets out once, after its first step",
            _A_NUMBER,
        ),
        f"compression={config.compression!r}": (
            config.compression != "none",
            "what is sent are then not the buckets, and what a tensor has left to send is no step's own",
            _A_NUMBER,
        ),
        "synchronization='post_local_sgd'": (  # the others, in which no step is dense, refuse any size
            config.synchronization == "post_local_sgd",
            "from local_sgd_start on no gradients are reduced, and steps of that kind would be timed with the others",
            _A_NUMBER,
        ),
        task.get("manual", ""): (
            "manual" in task,
            "its steps reduce gradients after their backward passes, which hide nothing",
            "leave bucket_cap_mb out",
        ),
        task.get("several_optimizers", ""): (
            "several_optimizers" in task,
            "each of them has buckets of its own, and one size would be measured for all",
            _A_NUMBER,
        ),
        task.get("closure", ""): (
            "closure" in task,
            "the optimizer decides how many passes a step has, so that steps are not alike",
            _A_NUMBER,
        ),
    }
    problems += [
        Problem(f"bucket_cap_mb='auto' with {other}", why=why, do=do)
        for other, (is_so, why, do) in refusals.items()
        if is_so
    ]
