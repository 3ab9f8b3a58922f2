"""Whether slow_rank="replace" can replace a rank of a run: where it cannot, it is refused before the start. Pure."""

from __future__ import annotations

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.env import WorkerEnv
from distributed.core.errors import Problem
from distributed.core.plan import Plan

_REPORT = "leave slow_rank out: a slow rank is reported"


def slow_rank_problems(
    config: DistributedConfig, plan: Plan, *, has_batchnorm: bool, world: WorkerEnv | None
) -> list[Problem]:
    """`world` is that of another launcher, if one has started the ranks."""
    if plan.slow_rank != "replace" or ENGINES.entries[plan.strategy].models != "torch":  # others do not read it
        return []
    able = [name for name, engine in ENGINES.entries.items() if "regroup" in engine.can]
    needs_fp32 = plan.precision.kind == "fp16" or plan.speed.parameters != "fp32"
    found = [
        (
            plan.world_size == 1,
            "with one rank",
            "it has no peers to be slower than",
            _REPORT,
        ),
        (
            config.max_restarts == 0,
            "with max_restarts=0",
            "then no process is started in the place of another",
            "leave out one of them",
        ),
        (
            world is not None and not world.is_followed,
            f"under {world.launcher if world is not None else ''}",
            "the launcher that started the ranks ends all of them when one ends",
            "start them with: distributed train --script …",
        ),
        (
            plan.is_replicated and plan.strategy not in able,
            f"with backend={plan.strategy!r}",
            "its ranks cannot hand over the state that they hold in memory",
            f"set backend={' or '.join(map(repr, able))}",
        ),
        (
            not plan.is_replicated,
            "with state that is sharded over the ranks",
            "the state of the slow rank is held by no other, so that all would resume from the last checkpoint",
            _REPORT,
        ),
        (
            plan.is_replicated and plan.replicate.compression.keeps,
            f"with compression={config.compression!r}",
            "what the slow rank has not sent of its gradients is held by no other, so that all would resume from the "
            "last checkpoint",
            _REPORT,
        ),
        (
            plan.collectives == "nccl" and (plan.num_nodes > 1 or needs_fp32),
            "on NCCL over several nodes" if plan.num_nodes > 1 else "on NCCL without parameters and gradients in fp32",
            "these ranks lose their state with their world, so that all would resume from the last checkpoint",
            _REPORT,
        ),
        (
            has_batchnorm and plan.replicate.sync_batchnorm,
            "with BatchNorm over all ranks",
            "the ranks wait for each other in the forward pass, where no one of them is seen to be slow",
            _REPORT,
        ),
        (
            plan.batch.of_stream and plan.iterable_split == "dataset",
            "with iterable_split='dataset'",
            "the ranks wait for each other for every batch, where no one of them is seen to be slow",
            _REPORT,
        ),
    ]
    return [Problem(f"slow_rank='replace' {what}", why=why, do=do) for is_so, what, why, do in found if is_so]
