"""gradient_accumulation_steps by epoch: how many micro-batches make a step from an epoch on, where that can be."""

from __future__ import annotations

from dataclasses import replace

from distributed.core.batch_plan import BatchPlan
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem


def first_accumulation(config: DistributedConfig) -> int:
    """Micro-batches of a step in the first epoch.

    >>> first_accumulation(DistributedConfig(gradient_accumulation_steps={0: 1, 4: 2}))
    1
    """
    asked = config.gradient_accumulation_steps
    return asked if isinstance(asked, int) else asked[0]


def plan_accumulation(
    config: DistributedConfig, batch: BatchPlan, engine: str, samples: int | None, problems: list[Problem]
) -> BatchPlan:
    """The batch plan with what changes from epoch to epoch; `samples`: of an epoch, None: of a stream."""
    asked = config.gradient_accumulation_steps
    if isinstance(asked, int):
        return batch
    problems += _problems(config, engine, samples)
    planned = replace(batch, by_epoch=tuple(sorted(asked.items())))
    for epoch, count in planned.by_epoch if samples else ():
        if not planned.at(epoch).steps(samples or 0):
            problems.append(
                Problem(
                    f"{samples} samples cannot be split into batches of {planned.at(epoch).global_batch}",
                    why=f"gradient_accumulation_steps is {count} from epoch {epoch} on, and drop_last=True drops an "
                    "incomplete one: no step is left",
                    do="set drop_last=False, or accumulate fewer",
                )
            )
    return planned


def _problems(config: DistributedConfig, engine: str, samples: int | None) -> list[Problem]:
    kind = ENGINES.entries[engine]
    refused = {
        "an iterable dataset": (samples is None, "the place of a step in a stream is its number times its batch"),
        f"pipeline_parallel={config.pipeline_parallel}": (
            config.pipeline_parallel > 1,
            "a pipeline is laid out for one number of micro-batches",
        ),
        "reproducible='bitwise'": (config.reproducible == "bitwise", "a step always has the same virtual ranks"),
        f"backend={engine!r}": (
            kind.owns_state or kind.models != "torch",
            "this engine is made for one number of them",
        ),
        f"lr_scaling={config.lr_scaling!r}": (config.lr_scaling != "none", "the rule needs one size of a global batch"),
        "warmup_epochs": (bool(config.warmup_epochs), "epochs have different numbers of steps"),
        f"limit_train_batches={config.limit_train_batches}": (
            isinstance(config.limit_train_batches, float),
            "epochs have different numbers of steps, of which it is a part",
        ),
        f"overfit_batches={config.overfit_batches}": (
            config.overfit_batches is not None,
            "as many steps then take other samples",
        ),
    }
    return [
        Problem(f"gradient_accumulation_steps by epoch, with {what}", why=why, do="leave one of them out")
        for what, (is_asked, why) in refused.items()
        if is_asked
    ]
