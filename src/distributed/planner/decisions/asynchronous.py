"""Ranks that do not wait for each step of a parameter server: what that cannot be had together with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan
from distributed.core.plan_parts.synchronization import SynchronizationPlan

_DENSE = "set synchronization='every_step'"


def plan_asynchronous(
    config: DistributedConfig,
    plan: Plan,
    *,
    task: Mapping[str, str],
    has_batchnorm: bool,
    decisions: list[Decision],
    problems: list[Problem],
) -> Plan:
    """The plan with its parameter server. `task`: the features that it needs, and how it asks for each."""
    if "asynchronous" not in ENGINES.entries[plan.strategy].can:  # which is refused already
        return plan
    most = config.max_staleness
    if plan.world_size == 1:
        why = "a single rank waits for no other"
        decisions.append(Decision("asynchronous has no effect while there is 1 rank", why, "num_gpus"))
    else:
        why = "it has a share of each batch as every rank, and starts again from the checkpoint should it be lost"
        decisions.append(Decision("rank 0 is the parameter server", why, "synchronization"))
    if plan.world_size > 1 and not config.given("max_staleness"):
        why = "older ones hide longer delays, and the loss falls by less with each update"
        decisions.append(Decision(f"parameters lack at most {most} updates", why, "max_staleness"))
    if has_batchnorm and plan.world_size > 1:
        why = "a forward pass waits for no other rank; evaluations and checkpoints have rank 0's statistics"
        decisions.append(Decision("BatchNorm sees the samples of its rank alone", why, "sync_batchnorm"))
    problems += _refused(config, plan, task, has_batchnorm=has_batchnorm)
    meets = SynchronizationPlan("asynchronous", max_staleness=most)
    return replace(plan, replicate=replace(plan.replicate, synchronization=meets))


def _refused(config: DistributedConfig, plan: Plan, task: Mapping[str, str], *, has_batchnorm: bool) -> list[Problem]:
    compression = plan.replicate.compression.kind
    no_ddp = "gradients go to the server, which reduces them without DDP, so the setting would have no effect"
    refusals = {
        "a model that is sharded over ranks": (
            not plan.is_replicated,
            "a rank that holds parts of the model computes no gradient without the others",
            f"leave the sharding out, or {_DENSE}",
        ),
        "reproducible='bitwise'": (
            plan.is_bitwise,
            "how old the parameters of a gradient are depends on the timing of the ranks, so no two runs are the same",
            f"set reproducible='off', or {_DENSE}",
        ),
        f"compression={compression!r}": (
            compression != "none",
            "what is compressed are the buckets of DDP, and gradients go to the server in messages of their own",
            "leave one of them out",
        ),
        task.get("several_optimizers", ""): (
            "several_optimizers" in task,
            "a step is a phase for each of them, and the server takes one gradient a step",
            _DENSE,
        ),
        task.get("manual", ""): (
            "manual" in task,
            "a step that makes gradients and steps itself would step on each rank",
            f"return the loss from training_step, or {_DENSE}",
        ),
        task.get("closure", ""): (
            "closure" in task,
            "the optimizer evaluates a step's gradient several times, and the server gets it once",
            f"take an optimizer that steps once, such as SGD or AdamW, or {_DENSE}",
        ),
        f"bf16_parameters={config.bf16_parameters!r}": (
            bool(config.bf16_parameters),
            "the server sends the parameters that the optimizer steps, in fp32",
            "leave one of them out; mixed_precision='bf16' can be had",
        ),
        f"mixed_precision={plan.precision.kind!r}": (
            plan.precision.kind in ("fp16", "fp8"),
            "the ranks would have to agree on a scale in each step, and they do not meet in it",
            "set mixed_precision='bf16'",
        ),
        "capture=True": (
            config.capture is True,
            "gradients and parameters are messages, and a CUDA graph repeats kernels",
            "leave capture out",
        ),
        "BatchNorm over all ranks": (
            has_batchnorm and plan.replicate.sync_batchnorm,
            "its forward pass waits for all ranks, and these do not wait for each other",
            "set sync_batchnorm=False: a rank normalizes by its own share, and rank 0's statistics are kept; or use "
            "GroupNorm",
        ),
        "slow_rank='replace'": (
            plan.slow_rank == "replace",
            "rank 0 alone has the optimizer's state, so the slow rank may be the one that cannot be replaced",
            "leave slow_rank out: a slow rank is reported",
        ),
        "GPUs that ranks share": (
            plan.shares_gpus,
            "it has not been tried",
            f"start as many ranks as there are GPUs, or {_DENSE}",
        ),
        **{
            f"{name}={getattr(config, name)!r}": (config.given(name), no_ddp, f"leave {name} out")
            for name in ("find_unused_parameters", "static_graph", "bucket_cap_mb")
        },
    }
    asked = "synchronization='asynchronous'"
    return [Problem(f"{asked} with {other}", why=why, do=do) for other, (is_so, why, do) in refusals.items() if is_so]
