"""plan_engine: the complete configuration that DeepSpeed is given for a plan, without its batches and without "auto".

What was said in a DeepSpeed configuration of the user's is in the settings by now (see deepspeed_adoption.py); what
only DeepSpeed knows is passed on from it. The strategy adds the batches, which change with the number of ranks.
"""

from __future__ import annotations

import json
import math
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan
from distributed.engines.deepspeed.config_adoption import FILLED
from distributed.engines.deepspeed.config_keys import (
    AUTO,
    ZERO_PLUS_PLUS,
    Content,
    find_autos,
    name_of,
    passthrough,
    read_content,
    section,
    zero_passthrough,
)
from distributed.engines.deepspeed.offload import Offloads, plan_offloads
from distributed.engines.deepspeed.pipeline.plan import pipeline_config, pipeline_problems
from distributed.planner.parallel import STAGES
from distributed.planner.planning import JobProfile

_STAGE_OF = {kind: stage for stage, kind in STAGES.items()}
_NEVER = 2**62  # steps between the lines that DeepSpeed prints
_LARGEST_BUFFER = 10**8  # numbers: DeepSpeed's own; it locks five of them in memory, however small the model is
_DECAYS = {"adamw": 0.01, "adam": 0.0, "sgd": 0.0}  # torch's own
_TYPES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}


def plan_engine(
    config: DistributedConfig, profile: JobProfile, plan: Plan, decisions: list[Decision], problems: list[Problem]
) -> dict[str, Any]:
    """DeepSpeed's part of the plan."""
    given = config.deepspeed_config
    content = {} if given is None else read_content(given, []) or {}
    source = "" if given is None else name_of(given)
    if profile.stages:
        problems += pipeline_problems(config, plan, content, profile.stages)
        return {"config": {"steps_per_print": _NEVER, **passthrough(content), **pipeline_config()}, "source": source}
    offloads = plan_offloads(config, plan, profile.parameters, decisions, problems)
    engine = {
        "steps_per_print": _NEVER,
        **passthrough(content),
        "zero_optimization": _zero(content, config, profile, plan, offloads),
        "bf16": _bf16(content, plan),
        "fp16": _fp16(content, config, plan, problems),
        "gradient_clipping": plan.optimizer.clip_norm or 0.0,  # which DeepSpeed would make 1.0 where it is left out
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if content.get("communication_data_type") not in (None, AUTO):
        engine["communication_data_type"] = content["communication_data_type"]
    if "optimizer" in content:
        engine["optimizer"] = _optimizer(content, plan)
    problems += _problems(content, source, config, profile, plan)
    decisions += _decisions(content, source, config, plan, engine)
    return {"config": engine, "source": source}


def _zero(content: Content, config: DistributedConfig, profile: JobProfile, plan: Plan, offloads: Offloads) -> Content:
    zero = zero_passthrough(content) | {"stage": _STAGE_OF[plan.shard.kind]}
    for name, where in (("offload_optimizer", offloads.optimizer), ("offload_param", offloads.parameters)):
        if where:
            kept = {key: value for key, value in section(content, f"zero_optimization.{name}").items() if value != AUTO}
            kept.pop("nvme_path", None)
            zero[name] = kept | {"device": where} | ({"nvme_path": config.offload_dir} if where == "nvme" else {})
    if offloads.parameters == "nvme" and profile.parameters:
        zero["offload_param"].setdefault("buffer_size", min(profile.parameters, _LARGEST_BUFFER))
    return zero


def _bf16(content: Content, plan: Plan) -> Content:
    is_on = plan.precision.kind == "bf16"
    kept = {key: value for key, value in section(content, "bf16").items() if value != AUTO} if is_on else {}
    return kept | {"enabled": is_on}


def _fp16(content: Content, config: DistributedConfig, plan: Plan, problems: list[Problem]) -> Content:
    if plan.precision.kind != "fp16":
        return {"enabled": False}
    asked = {key: value for key, value in section(content, "fp16").items() if value != AUTO}
    if asked.get("loss_scale"):
        for name in ("scaler_init_scale", "scaler_growth_interval"):
            if config.given(name):
                what = f"{name} ({config.source(name)}), but fp16.loss_scale={asked['loss_scale']} stays as it is"
                problems.append(Problem(what, do=f"leave {name} out, or set fp16.loss_scale to 0"))
        return asked | {"enabled": True}
    power = math.log2(plan.precision.scaler_init_scale)
    if power != int(power):
        what = f"scaler_init_scale={plan.precision.scaler_init_scale:g}"
        do = f"set it to {2.0 ** int(power):g} or {2.0 ** (int(power) + 1):g}"
        problems.append(Problem(what, why="DeepSpeed's first loss scale is a power of two", do=do))
    return asked | {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": int(power),
        "loss_scale_window": plan.precision.scaler_growth_interval,
    }


def _optimizer(content: Content, plan: Plan) -> Content:
    """The user's section with what the plan says, so that DeepSpeed's own Adam is used where it is asked for."""
    asked = section(content, "optimizer")
    params = {key: value for key, value in section(content, "optimizer.params").items() if value != AUTO}
    name = plan.optimizer.name
    params["lr"] = plan.optimizer.learning_rate
    decay = plan.optimizer.weight_decay
    params["weight_decay"] = _DECAYS.get(name, 0.0) if decay is None else decay
    if plan.optimizer.momentum is not None:
        params["momentum"] = plan.optimizer.momentum
    params.pop("adam_w_mode", None)
    if name == "adam":  # DeepSpeed's "Adam" is AdamW unless this says otherwise
        params["adam_w_mode"] = False
    if plan.device == "cpu" and name != "sgd":
        params.setdefault("torch_adam", True)  # the same on a CPU, without a compiler
    return {key: value for key, value in asked.items() if value != AUTO} | {
        "type": _TYPES.get(name, name),
        "params": params,
    }


def _problems(
    content: Content, source: str, config: DistributedConfig, profile: JobProfile, plan: Plan
) -> list[Problem]:
    """What only the plan shows."""
    found = _useless(config) if source else []
    whole, planned = content.get("train_batch_size"), plan.batch
    is_settled = config.given("batch_size") and config.given("gradient_accumulation_steps")  # else it was noted
    if isinstance(whole, int) and is_settled and whole != planned.global_batch:
        found.append(
            Problem(
                f"{source}: train_batch_size={whole}, but a global batch here is {planned.global_batch}",
                why=f"a global batch is {planned.per_device} samples × {planned.ranks} ranks × "
                f"{planned.accumulation} accumulated",
                do=f'set train_batch_size to {planned.global_batch} or to "auto"',
            )
        )
    total = section(content, "scheduler.params").get("total_num_steps")
    steps = plan.total_steps(None if profile.samples is None else planned.steps(profile.samples))
    if isinstance(total, int) and total != steps and not plan.is_dev_run:
        run = "a run of unknown length" if steps is None else f"a run of {steps} steps"
        found.append(
            Problem(
                f"{source}: scheduler.params.total_num_steps={total} in {run}",
                why="the schedule goes over the whole run",
                do=f'set max_steps={total}, or total_num_steps to "auto"',
            )
        )
    on_wire = content.get("communication_data_type")
    if on_wire not in (None, AUTO, "fp32", plan.precision.kind):
        why = f"gradients here are {plan.precision.kind}"
        do = "leave it out, or set it to fp32"
        found.append(Problem(f"{source}: communication_data_type={json.dumps(on_wire)}", why=why, do=do))
    if plan.device == "cpu":
        for key, neutral in ZERO_PLUS_PLUS.items():
            value = section(content, "zero_optimization").get(key, neutral)
            if value not in (neutral, AUTO):
                what = f"{source}: zero_optimization.{key}={json.dumps(value)}"
                found.append(Problem(what, why="ZeRO++ needs CUDA kernels, and the device is a CPU", do="leave it out"))
    return found


def _useless(config: DistributedConfig) -> list[Problem]:
    """Settings that a DeepSpeed configuration could have given an effect, and did not; see core/config.py."""
    found = []
    for name, useless, do in (
        ("scaler_init_scale", config.mixed_precision is False, "mixed_precision='fp16'"),
        ("scaler_growth_interval", config.mixed_precision is False, "mixed_precision='fp16'"),
        ("momentum", config.optimizer not in ("sgd", "lars"), "optimizer='sgd'"),
        ("min_lr_ratio", config.lr_schedule == "constant", "lr_schedule='cosine' or 'linear'"),
    ):
        if useless and getattr(config, name) != type(config).model_fields[name].default:
            found.append(Problem(f"{name} is set, but would have no effect", do=f"set {do}, or leave {name} out"))
    return found


def _decisions(content: Content, source: str, config: DistributedConfig, plan: Plan, engine: Content) -> list[Decision]:
    made = []
    stage = engine["zero_optimization"]["stage"]
    if not config.given("zero_stage") and not config.given("sharding"):
        what = "gradients and optimizer state are sharded by default"
        made.append(Decision(f"ZeRO-{stage}", what, "zero_stage"))
    if plan.precision.kind != "fp32":
        why = "DeepSpeed computes with these, and the optimizer steps on a copy in fp32"
        made.append(Decision(f"parameters in {plan.precision.kind}", why, "mixed_precision"))
    if source:
        taken = {name: getattr(config, name) for name in config.given_values() if config.source(name) == source}
        if taken:
            said = ", ".join(f"{name}={value}" for name, value in sorted(taken.items()))
            made.append(Decision(f"from {source}", said))
        filled = {path: _filled(path, plan, engine) for path in find_autos(content)}
        if filled:
            said = ", ".join(f"{path}={value}" for path, value in filled.items())
            made.append(Decision(f'for each "auto" of {source}', said))
        if "gradient_clipping" not in content and plan.optimizer.clip_norm is None:
            why = f"{source} says nothing of it; DeepSpeed alone would clip to a norm of 1.0"
            made.append(Decision("no gradient clipping", why, "gradient_clipping"))
        if "scheduler" in content and not plan.schedule.is_constant:
            why = "the rate rises from the first step on; DeepSpeed's own is two steps behind, and begins with 0"
            made.append(Decision(f"schedule {plan.schedule.kind} with {plan.schedule.warmup_steps} steps", why))
    return made


def _filled(path: str, plan: Plan, engine: Content) -> str:
    """What an "auto" became."""
    schedule = plan.schedule
    known = {
        "train_batch_size": plan.batch.global_batch,
        "train_micro_batch_size_per_gpu": plan.batch.per_device,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "steps_per_print": "never",
        "scheduler.params.warmup_max_lr": plan.optimizer.learning_rate,
        "scheduler.params.warmup_num_steps": schedule.warmup_steps or f"{schedule.warmup_epochs:g} epochs",
        "scheduler.params.total_num_steps": "the run's",
        "scheduler.params.warmup_type": "linear",
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_min_ratio": 0,
        "scheduler.params.cos_min_ratio": schedule.min_ratio,
    }
    if path in known:
        return str(known[path])
    found: Any = engine
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if found is not None:
        return json.dumps(found)
    return "none" if path in FILLED or ".offload_" in path else "DeepSpeed's default"
