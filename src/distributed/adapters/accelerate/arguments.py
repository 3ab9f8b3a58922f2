"""The arguments of an Accelerator as settings of a run; what a run cannot do is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, Problem
from distributed.core.plan import ENDLESS

_TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow_tracking"}
_HANDLED = {  # by the kind of a kwargs_handler: its field, and the setting
    "DistributedDataParallelKwargs": {
        "find_unused_parameters": "find_unused_parameters",
        "static_graph": "static_graph",
        "bucket_cap_mb": "bucket_cap_mb",
    },
    "GradScalerKwargs": {"init_scale": "scaler_init_scale", "growth_interval": "scaler_growth_interval"},
    "InitProcessGroupKwargs": {"timeout": "collective_timeout_s"},
}
_IDLE = ("gradient_as_bucket_view", "backend", "enabled")  # of handlers: no effect on numbers
_REFUSED = {  # by name: what to do where it is given
    "deepspeed_plugin": "Accelerator(backend='deepspeed', …) takes whole steps: use distributed.Trainer",
    "deepspeed_plugins": "use distributed.Trainer with backend='deepspeed'",
    "fsdp_plugin": "Accelerator(sharding='full')",
    "torch_tp_plugin": "Accelerator(tensor_parallel=…)",
    "megatron_lm_plugin": "Accelerator(tensor_parallel=…)",
    "parallelism_config": "Accelerator(tensor_parallel=…, sharding=…)",
    "dynamo_plugin": "Accelerator(compile=True)",
    "rng_types": "leave it out: each step is seeded, on each rank",
}


@dataclasses.dataclass(frozen=True)
class ScriptOptions:
    """What the arguments say beside settings."""

    split_batches: bool = False
    seeds_sampler: bool = False  # use_seedable_sampler
    data_seed: int | None = None
    steps_scheduler: bool = True  # step_scheduler_with_optimizer


def accumulation_of(config: DistributedConfig) -> int:
    """Micro-batches of a step, which a script asks for once."""
    steps = config.gradient_accumulation_steps
    if not isinstance(steps, int):
        raise ConfigError(
            f"gradient_accumulation_steps={steps} in a script of Accelerate",
            why="an Accelerator has one number of micro-batches for all epochs",
            do="set gradient_accumulation_steps to a number",
        )
    return steps


def read_arguments(given: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], ScriptOptions]:
    """The settings of a run and the other options; `settings` are those that the script gives itself, and win."""
    problems = [
        Problem(f"Accelerator({name}=…)", why="a run decides this by its own settings", do=do)
        for name, do in _REFUSED.items()
        if given.get(name) is not None
    ]
    data, found = given.get("dataloader_config"), dict[str, Any]()
    plugin = given.get("gradient_accumulation_plugin")
    steps = given["gradient_accumulation_steps"]
    if plugin is not None:
        steps = plugin.num_steps if plugin.num_steps is not None else steps
        if not plugin.sync_with_dataloader:
            why = "the last step of an epoch takes what is left of it"
            problems.append(Problem("sync_with_dataloader=False", why=why, do="leave it out"))
    if data is not None and data.dispatch_batches:
        why = "each rank reads its own samples"
        problems.append(Problem("dispatch_batches=True", why=why, do="leave it out"))
    problems += _read_handlers(given.get("kwargs_handlers") or (), found)
    problems += _read_trackers(given.get("log_with"), given.get("logging_dir"), found)
    precision, dynamo = str(given.get("mixed_precision") or "no"), str(given.get("dynamo_backend") or "no").lower()
    if dynamo not in ("no", "inductor", "dynamobackend.no", "dynamobackend.inductor"):
        why = "a run compiles with inductor"
        problems.append(Problem(f"dynamo_backend={dynamo!r}", why=why, do="Accelerator(compile=True)"))
    if "epochs" not in settings and settings.get("lr_schedule", "constant") != "constant":
        why = "how long the run is, the script's own loop says"
        problems.append(Problem(f"lr_schedule={settings['lr_schedule']!r}", why=why, do="a scheduler, or epochs=…"))
    if problems:
        raise ConfigError(problems)
    found |= {"gradient_accumulation_steps": steps, "epochs": ENDLESS}
    if precision != "no":
        found["mixed_precision"] = precision
    if given.get("cpu"):
        found |= {"device": "cpu", "num_gpus": 1}
    if dynamo.endswith("inductor"):
        found["compile"] = True
    options = ScriptOptions(
        split_batches=bool(given.get("split_batches") or (data is not None and data.split_batches)),
        seeds_sampler=bool(data is not None and data.use_seedable_sampler),
        data_seed=getattr(data, "data_seed", None),
        steps_scheduler=given["step_scheduler_with_optimizer"],
    )
    return found | settings, options


def _read_handlers(handlers: Sequence[Any], found: dict[str, Any]) -> Iterator[Problem]:
    for handler in handlers:
        kind = type(handler).__name__
        known = _HANDLED.get(kind, {})
        for name in _changed(handler):
            value = getattr(handler, name)
            if name in known:
                found[known[name]] = value.total_seconds() if hasattr(value, "total_seconds") else value
            elif kind not in _HANDLED or name not in _IDLE:
                do = "leave it out, or use the settings of docs/settings.md"
                yield Problem(f"{kind}({name}={value!r})", why="a run has nothing that does the same", do=do)


def _changed(handler: Any) -> list[str]:
    """The fields that are not as by default."""
    default = type(handler)()
    names = [field.name for field in dataclasses.fields(handler)]
    return [name for name in names if getattr(handler, name) != getattr(default, name)]


def _read_trackers(log_with: Any, logging_dir: str | None, found: dict[str, Any]) -> Iterator[Problem]:
    names = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    for tracker in names:
        name = str(getattr(tracker, "value", tracker)) if not hasattr(tracker, "store_init_configuration") else ""
        if name in _TRACKERS:
            found[_TRACKERS[name]] = True
        else:
            what = f"log_with={name or type(tracker).__name__!r}"
            yield Problem(what, why=f"a run writes to {' and '.join(_TRACKERS)}", do="log_with='tensorboard'")
    if names:
        found["log_every_n_steps"] = 1  # what the script logs in a step that is not read would be lost
    if "tensorboard" in found and logging_dir is not None:
        found["tensorboard_dir"] = logging_dir
