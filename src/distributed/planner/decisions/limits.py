"""How much of the data a run uses: steps of an epoch, batches of an evaluation. Both count over all ranks."""

from __future__ import annotations

from dataclasses import replace

from distributed.core.batch_plan import BatchPlan
from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import DataPlan, Decision


def plan_limits(
    config: DistributedConfig,
    batch: BatchPlan,
    samples: int | None,
    evaluations: tuple[int | None, ...],
    *,
    decisions: list[Decision],
    problems: list[Problem],
) -> tuple[BatchPlan, DataPlan]:
    """`samples` of an epoch, and of each evaluation; None: a stream, whose length is not known."""
    overfits = config.overfit_batches is not None
    name = "overfit_batches" if overfits else "limit_train_batches"
    asked = config.overfit_batches if overfits else config.limit_train_batches
    problems += _evaluation_problems(config, evaluations)
    if asked is None:
        return batch, DataPlan(config.limit_val_batches)
    if samples is None and (overfits or isinstance(asked, float)):
        problems.append(
            Problem(
                f"{name}={asked} of a stream",
                why="which of its samples come first may change from epoch to epoch"
                if overfits
                else "its length is not known, and so no part of it",
                do="pass a dataset with a length" if overfits else f"set {name} to a number of steps",
            )
        )
        return batch, DataPlan(config.limit_val_batches)
    steps = None if samples is None else batch.steps(samples)
    limit = int(asked * steps) if isinstance(asked, float) and steps is not None else int(asked)
    if not limit and steps:
        what, why = f"{name}={asked} of {steps} steps", "that part of an epoch has no whole step"
        problems.append(Problem(what, why=why, do=f"set {name}=1, or a larger part"))
    if steps is not None and 0 < limit < steps:
        decisions.append(Decision(f"{limit} of {steps} steps an epoch", "the first ones of its order", name))
    if overfits:
        reason = "the same samples in every epoch, in the dataset's order, and in evaluations too"
        decisions.append(Decision("no shuffling", reason, name))
    return replace(batch, limit=limit), DataPlan(config.limit_val_batches, overfits)


def _evaluation_problems(config: DistributedConfig, evaluations: tuple[int | None, ...]) -> list[Problem]:
    asked = config.limit_val_batches
    if asked is None:
        return []
    if not evaluations:
        why, do = "nothing is evaluated, so the setting would have no effect", "pass validation data, or leave it out"
        return [Problem(f"limit_val_batches={asked}, but no validation data", why=why, do=do)]
    if isinstance(asked, float) and None in evaluations:
        why = "its length is not known, and so no part of it"
        return [Problem(f"limit_val_batches={asked} of a stream", why=why, do="set it to a number of batches")]
    return []
