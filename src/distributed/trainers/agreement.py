"""Whether ranks that a launcher started have planned one and the same run: each makes its plan itself, in `fit`."""

from __future__ import annotations

import json
from dataclasses import asdict

from distributed.core.errors import PlanError, Problem
from distributed.core.plan import Plan
from distributed.runtime.session import Session

_ALIKE = (  # what all ranks of a run must plan alike; threads, folders, caches and what is shown are each rank's own
    "batch",
    "strategy",
    "mesh",
    "device",
    "collectives",
    "seed",
    "epochs",
    "max_steps",
    "on_nan",
    "detect_anomaly",
    "slow_rank",
    "slow_rank_wait_s",
    "loss_weighting",
    "iterable_split",
    "sample_check",
    "is_dev_run",
    "data",
    "precision",
    "optimizer",
    "schedule",
    "replicate",
    "shard",
    "tensor",
    "pipeline",
    "validation",
)


def check_alike(plan: Plan, session: Session) -> None:
    """Raise on every rank, and the same, where one of them has planned another run than rank 0."""
    first = session.share_text("plan", plan.to_json() if session.is_main else None)
    difference = find_difference(plan, Plan.from_json(first), session.rank)
    found_here = "" if difference is None else json.dumps(asdict(difference))
    for found in session.gather_texts("plans of the ranks", found_here):
        if found:
            raise PlanError([Problem(**json.loads(found))])


def find_difference(plan: Plan, first: Plan, rank: int) -> Problem | None:
    """What is wrong with a plan that is not rank 0's where ranks must plan alike: they would wait for each other."""
    mine, others = plan.to_plain(), first.to_plain()
    differing = [name for name in _ALIKE if mine[name] != others[name]]
    if (plan.checkpoint.every, plan.checkpoint.unit) != (first.checkpoint.every, first.checkpoint.unit):
        differing.append("checkpoint")
    if not differing:
        return None
    named = [name for name, value in mine["settings"].items() if value != others["settings"].get(name)]
    asked = ", ".join(f"{name} {mine['settings'][name]!r}, not {others['settings'].get(name)!r}" for name in named)
    return Problem(
        f"rank {rank} plans another {' and '.join(differing)} than rank 0" + (f": it has {asked}" if asked else ""),
        why="all ranks take part in each step, and would wait for each other" if asked else "their machines differ",
        do=f"give all ranks the same {', '.join(named)}" if named else "train on machines of one kind",
    )
