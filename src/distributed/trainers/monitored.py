"""What names a metric: whether the validation that is passed can measure it, before anything starts."""

from __future__ import annotations

from collections.abc import Collection

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, Problem
from distributed.core.values import parse_best, parse_frequency
from distributed.data.named_sources import prefix_of
from distributed.train.schedule import refuse_ambiguous, wants_metric
from distributed.train.task import Task


def check_monitored(config: DistributedConfig, task: Task, sets: Collection[str]) -> None:
    """`sets`: the names of the validation sets; none: nothing is validated."""
    problems: list[Problem] = []
    named = {"scheduler_metric": config.scheduler_metric or ""}
    named["keep_best"] = parse_best(config.keep_best)[1] if config.keep_best else ""
    for setting, metric in named.items():
        problems += _unknown_set(setting, metric, sets)
    problems += _idle(config, sets)
    if task.whole_set and not sets:
        problems.append(
            Problem(
                f"the metric {task.whole_set.names[0]!r} is one of a whole set, and nothing is validated",
                why="such metrics are measured over a validation set, and not over batches of the training",
                do="pass val_loader=…, or a metric that is a function of a batch",
            )
        )
    if problems:
        raise ConfigError(problems)
    if wants_metric(task.scheduler):
        refuse_ambiguous(task.scheduler, config.scheduler_metric or "", sets)


def _idle(config: DistributedConfig, sets: Collection[str]) -> list[Problem]:
    """Settings of a validation that there is not."""
    if sets:
        return []
    asked = [
        name for name in ("val_check_interval", "sanity_val_steps") if config.given(name) and getattr(config, name)
    ]
    if config.checkpoint_frequency and parse_frequency(config.checkpoint_frequency)[1] == "validations":
        asked.append("checkpoint_frequency")
    why, do = "no val_loader is passed, so nothing is validated", "pass val_loader=…, or leave {} out"
    return [
        Problem(f"{name}={getattr(config, name)!r} would have no effect", why=why, do=do.format(name)) for name in asked
    ]


def _unknown_set(setting: str, metric: str, sets: Collection[str]) -> list[Problem]:
    """Of a metric of the validation that no set can have."""
    if not metric.startswith("val_"):
        return []
    if not sets:
        why = "no val_loader is passed, so nothing is validated"
        return [Problem(f"{setting} names {metric!r}", why=why, do="pass val_loader=…, or name a metric of training")]
    if any(metric.startswith(f"val_{prefix_of(name)}") for name in sets):
        return []
    named = [f"val_{prefix_of(name)}" for name in sets]
    return [
        Problem(
            f"{setting} names {metric!r}, which no validation set has",
            why=f"there are {len(sets)} sets, whose metrics begin with {', '.join(named)}",
            do=f"set {setting}='{named[0]}{metric.removeprefix('val_')}'",
        )
    ]
