"""check_values: the values of a DeepSpeed configuration, looked at by DeepSpeed itself before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from distributed.core.errors import PlanError, Problem
from distributed.core.plan import Plan
from distributed.engines.deepspeed.ops import import_deepspeed
from distributed.engines.deepspeed.process import deepspeed_environ

_BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}  # which it will not do without
_DO = "write a value of the type that DeepSpeed needs, or leave it out"


def check_values(plan: Plan, device_index: int = 0) -> None:
    """Raise every value that DeepSpeed would refuse when an engine is made, each with its key."""
    with deepspeed_environ(plan.device, device_index):
        import_deepspeed(plan.device)
        problems = [problem for key, value in plan.engine["config"].items() for problem in _of_section(key, value)]
    if problems:
        source = plan.engine["source"]
        raise PlanError([Problem(f"{source}: {problem.what}", problem.why, _DO) for problem in problems])


def _of_section(key: str, value: Any) -> Iterator[Problem]:
    """One section by itself: DeepSpeed stops at the first that is wrong."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(_BATCH | {key: value})
    except Exception as refused:  # noqa: BLE001 - DeepSpeed's check of a value raises any kind
        errors = getattr(refused, "errors", None)
        if errors is not None:
            yield from (_of_field(key, error) for error in errors())
        else:
            yield Problem(f"{key}={json.dumps(value)}", why=str(refused))


def _of_field(key: str, error: Mapping[str, Any]) -> Problem:
    path = ".".join((key, *map(str, error["loc"])))
    return Problem(f"{path}={json.dumps(error['input'], default=str)}", why=error["msg"])
