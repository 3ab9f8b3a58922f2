"""adopt: what a DeepSpeed configuration says becomes settings of this run, or contradicts those that were given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, Problem
from distributed.engines.deepspeed.config_keys import (
    AUTO,
    Content,
    check_keys,
    find_autos,
    name_of,
    read_content,
    section,
)
from distributed.planner.parallel import STAGES

OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd"}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ANY = "zero_optimization."  # there, "auto" is also DeepSpeed's own default
FILLED = {  # where "auto" has a value here
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "bf16.enabled",
    "fp16.enabled",
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "optimizer.type",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "optimizer.params.momentum",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_type",
    "scheduler.params.total_num_steps",
    "scheduler.params.warmup_min_ratio",
    "scheduler.params.cos_min_ratio",
}


@dataclass(frozen=True)
class Adopted:
    """One thing that the configuration says, as a setting here."""

    setting: str
    value: Any  # None: that there is none
    key: str
    stands: Any  # as it stands there

    def __str__(self) -> str:
        return f"{self.key}={json.dumps(self.stands)}"


def adopt(config: DistributedConfig, problems: list[Problem], world_size: int | None = None) -> DistributedConfig:
    """The config with what its DeepSpeed configuration says, as if it had been set here.

    `world_size`, where it is known, turns a train_batch_size into the settings that it implies.
    """
    given = config.deepspeed_config
    if given is None or not _reads_it(config.backend):  # the planner refuses it then
        return config
    content = read_content(given, problems)
    if content is None:
        return config
    source = name_of(given)
    problems += check_keys(content, source)
    for path in find_autos(content):
        if path not in FILLED and ("[" in path or not path.startswith(_ANY)):
            what, why = f'{source}: {path}="auto"', "no setting here says it"
            problems.append(Problem(what, why=why, do="write its value, or leave it out"))
    problems += _of_wrong_kind(content, source)
    said = [one for one in _everything(content, config, source, problems) if one.stands != AUTO]
    values = _settle(config, said, source, problems)
    values |= _implied(config, content, values, ranks=world_size, source=source, problems=problems)
    try:
        return config.merged(values, source)
    except ConfigError as error:
        problems += error.problems
        return config


def _reads_it(backend: str) -> bool:
    return backend == "auto" or "config_file" in ENGINES.entries[backend].can


def _of_wrong_kind(content: Content, source: str) -> Iterator[Problem]:
    """What no setting here checks; DeepSpeed would take some of it for something else."""
    for path, is_right, kind in (
        ("train_batch_size", _is_count, "a whole number"),
        ("bf16.enabled", _is_switch, "true or false"),
        ("fp16.enabled", _is_switch, "true or false"),
        ("fp16.initial_scale_power", _is_power, "a whole number below 128"),
        ("scheduler.params.total_num_steps", _is_count, "a whole number"),
    ):
        above, _, key = path.rpartition(".")
        value = (section(content, above) if above else content).get(key, AUTO)
        if value not in (None, AUTO) and not is_right(value):
            yield Problem(f"{source}: {path}={json.dumps(value)}", do=f'write {kind}, or "auto"')


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_power(value: Any) -> bool:
    """Of two, as a float holds it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 128


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _settle(config: DistributedConfig, said: list[Adopted], source: str, problems: list[Problem]) -> dict[str, Any]:
    """The values to take over; everything that was said twice and differently is noted."""
    first: dict[str, Adopted] = {}
    for one in said:
        mine = getattr(config, one.setting)
        if config.given(one.setting) and not _agree(mine, one.value):
            problems.append(
                Problem(
                    f"{one.setting}={mine!r} ({config.source(one.setting)}), but {source} says {one}",
                    why="both say the same thing of this run",
                    do=f'keep one of them, or write "auto" in {source}',
                )
            )
        before = first.setdefault(one.setting, one)
        if before.value != one.value:
            what = f"{source} says both {before} and {one}"
            problems.append(Problem(what, why=f"both set {one.setting}, which has one value", do="keep one of them"))
    return {one.setting: one.value for one in first.values() if one.value is not None}


def _agree(mine: Any, theirs: Any) -> bool:
    if theirs is None:
        return not mine
    if mine is True and theirs in ("bf16", "fp16"):  # mixed_precision=True: either
        return True
    return bool(mine == theirs and isinstance(mine, bool) == isinstance(theirs, bool))


def _everything(content: Content, config: DistributedConfig, source: str, problems: list[Problem]) -> Iterator[Adopted]:
    for key, setting in (
        ("train_micro_batch_size_per_gpu", "batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ):
        if content.get(key) is not None:
            yield Adopted(setting, content[key], key, content[key])
    if content.get("gradient_clipping") is not None:
        norm = content["gradient_clipping"]
        yield Adopted("gradient_clipping", None if norm == 0 else norm, "gradient_clipping", norm)
    yield from _precision(content, config, source, problems)
    yield from _zero(content, config)
    yield from _optimizer(content, source, problems)
    yield from _missing_decay(content, config)
    yield from _schedule(content, source, problems)


def _precision(content: Content, config: DistributedConfig, source: str, problems: list[Problem]) -> Iterator[Adopted]:
    enabled = {kind: section(content, kind).get("enabled") for kind in ("bf16", "fp16")}
    if enabled == {"bf16": True, "fp16": True}:
        what = f"{source} says both bf16.enabled=true and fp16.enabled=true"
        problems.append(Problem(what, why="a run has one precision", do="keep one of them"))
        return
    on = [kind for kind, is_on in enabled.items() if is_on is True]
    if on:
        yield Adopted("mixed_precision", on[0], f"{on[0]}.enabled", True)
    for kind, is_on in enabled.items():  # the other may still be set by the settings
        if is_on is False and not on and config.mixed_precision in (kind, kind == "bf16"):
            yield Adopted("mixed_precision", None, f"{kind}.enabled", False)
    scale = section(content, "fp16")
    if enabled["fp16"] is not True or scale.get("loss_scale") not in (None, 0, AUTO):
        return  # a loss scale that stays as it is, is DeepSpeed's own matter
    power = scale.get("initial_scale_power")
    if power is not None and _is_power(power):
        yield Adopted("scaler_init_scale", 2.0**power, "fp16.initial_scale_power", power)
    if scale.get("loss_scale_window") is not None:
        window = scale["loss_scale_window"]
        yield Adopted("scaler_growth_interval", window, "fp16.loss_scale_window", window)


def _zero(content: Content, config: DistributedConfig) -> Iterator[Adopted]:
    zero = section(content, "zero_optimization")
    stage = zero.get("stage")
    if isinstance(stage, int) and config.given("sharding"):
        yield Adopted("sharding", STAGES.get(stage, "none"), "zero_optimization.stage", stage)
    elif stage is not None:
        yield Adopted("zero_stage", stage, "zero_optimization.stage", stage)
    for name, setting in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        there = zero.get(name) or {}
        device, key = there.get("device", "none" if there else None), f"zero_optimization.{name}.device"
        if device is None:
            continue
        yield Adopted(setting, None if device == "none" else device, key, device)
        if device == "none":
            yield Adopted("cpu_offload", None, key, device)
        if there.get("nvme_path") is not None and device in ("nvme", AUTO):
            path = there["nvme_path"]
            yield Adopted("offload_dir", path, f"zero_optimization.{name}.nvme_path", path)


def _optimizer(content: Content, source: str, problems: list[Problem]) -> Iterator[Adopted]:
    asked = section(content, "optimizer")
    kind, params = asked.get("type"), section(content, "optimizer.params")
    if kind is None:
        if asked:
            why = "DeepSpeed reads nothing of it then"
            problems.append(Problem(f"{source}: optimizer has no type", why=why, do='write "type": "AdamW", say'))
        return
    name = OPTIMIZERS.get(str(kind).lower()) if kind != AUTO else AUTO
    if name is None:
        problems.append(
            Problem(
                f"{source}: optimizer.type={json.dumps(kind)} cannot be used here",
                why="only AdamW, Adam and SGD are known by name",
                do="pass the optimizer itself to the Trainer, and leave the section out",
            )
        )
        return
    if "max_grad_norm" in params:
        what = f"{source}: optimizer.params.max_grad_norm"
        problems.append(Problem(what, why="DeepSpeed refuses it there", do="set gradient_clipping"))
    if name == "adam" and params.get("adam_w_mode", True):
        name = "adamw"  # which is what DeepSpeed makes of "Adam"
    yield Adopted("optimizer", name, "optimizer.type", kind)
    for key, setting in (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("momentum", "momentum")):
        if params.get(key) is not None:
            yield Adopted(setting, params[key], f"optimizer.params.{key}", params[key])


def _missing_decay(content: Content, config: DistributedConfig) -> Iterator[Adopted]:
    """DeepSpeed's Adam decays no weights by default; torch's AdamW does."""
    is_adam = str(section(content, "optimizer").get("type")).lower() in ("adam", "adamw")
    if is_adam and "weight_decay" not in section(content, "optimizer.params") and not config.given("weight_decay"):
        yield Adopted("weight_decay", 0.0, "optimizer.params.weight_decay", 0.0)


def _schedule(content: Content, source: str, problems: list[Problem]) -> Iterator[Adopted]:
    asked, params = section(content, "scheduler"), section(content, "scheduler.params")
    kind = _SCHEDULES.get(str(asked.get("type")))
    if not asked:
        return
    least = params.get("warmup_min_lr", params.get("warmup_min_ratio", 0))
    if kind is None or params.get("warmup_type", "log") not in ("linear", AUTO) or least not in (0, AUTO):
        problems.append(
            Problem(
                f"{source}: the scheduler {json.dumps(asked.get('type'))} cannot be said in settings",
                why="of DeepSpeed's, WarmupLR, WarmupDecayLR and WarmupCosineLR can, with warmup_type='linear' from 0",
                do='write "warmup_type": "linear" there; or leave it out, and set lr_schedule and warmup_steps',
            )
        )
        return
    yield Adopted("lr_schedule", kind, "scheduler.type", asked["type"])
    for key, setting, default in (
        ("warmup_num_steps", "warmup_steps", 1000),
        ("warmup_max_lr", "learning_rate", 0.001 if kind == "linear" else None),
        ("cos_min_ratio", "min_lr_ratio", 0.0001 if kind == "cosine" else None),
    ):
        value = params.get(key, default)
        if value is not None:
            yield Adopted(setting, value, f"scheduler.params.{key}", value)


def _implied(
    config: DistributedConfig,
    content: Content,
    values: dict[str, Any],
    *,
    ranks: int | None,
    source: str,
    problems: list[Problem],
) -> dict[str, int]:
    """What a train_batch_size leaves for the settings that are not set; that it fits all of them, the plan shows."""
    whole = content.get("train_batch_size")
    if ranks is None or not isinstance(whole, int) or not _is_count(whole):
        return {}
    micro = values.get("batch_size", config.batch_size)
    steps = values.get("gradient_accumulation_steps")
    if steps is None and config.given("gradient_accumulation_steps"):
        steps = config.gradient_accumulation_steps
        if not isinstance(steps, int):
            return {}  # refused by the planner
    if not all(isinstance(number, int | None) and number != 0 for number in (micro, steps)):
        return {}  # noted elsewhere
    if micro is not None and steps is not None:
        return {}
    parts = ranks * (micro or 1) * (steps or 1)
    if whole < parts or whole % parts:
        times = "".join(f" × {number} {what}" for number, what in ((micro, "samples"), (steps, "steps")) if number)
        why = f"train_batch_size is a multiple of {ranks} ranks{times}"
        near = sorted({whole // parts * parts or parts, (whole // parts + 1) * parts})
        do = f'set it to {" or ".join(map(str, near))}, or to "auto"'
        problems.append(Problem(f"{source}: train_batch_size={whole} cannot be split", why=why, do=do))
        return {}
    return {"gradient_accumulation_steps" if micro is not None else "batch_size": whole // parts}
