"""Speed settings that do not change results: each is chosen with a reason and the setting that overrides it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from distributed.core.choices import Parameters, Switch
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES, engine_of
from distributed.core.env import ALLOCATOR
from distributed.core.errors import Problem
from distributed.core.plan import Decision, MemoryPlan, Plan, SpeedPlan
from distributed.planner.hardware import Hardware

HAS_FP8 = 8.9  # the compute capability of Ada

Asked = bool | Literal["auto"]


def plan_compile(
    config: DistributedConfig, plan: Plan, has_blocks: bool, decisions: list[Decision], problems: list[Problem]
) -> MemoryPlan:
    """The choice for compile='auto': compiling takes a minute, which seldom pays off on a CPU."""
    memory, holds_whole = plan.memory, plan.is_replicated
    if config.compile == "whole" and not holds_whole:
        why = "each rank runs only shards or stages of the model, with collectives between its blocks"
        problems.append(
            Problem("compile='whole' with a model that is sharded over ranks", why=why, do="set compile=true")
        )
    if config.compile != "auto":
        return memory
    others = config.sequence_parallel or config.context_parallel > 1 or config.reproducible == "bitwise"
    reasons = {
        "this engine has kernels of its own": not ENGINES.entries[plan.strategy].is_native,
        "there is no GPU": plan.device != "cuda",
        "sequence_parallel, context_parallel or reproducible='bitwise' replaces parts of the model": others,
        "the model has no blocks": not holds_whole and not has_blocks,
        "detect_anomaly looks at each operation, which compiled code fuses": config.detect_anomaly,
    }
    why_not = next((why for why, holds in reasons.items() if holds), "")
    if why_not:
        decisions.append(Decision("nothing compiled", why_not, "compile"))
    elif holds_whole:
        reason = "operations between the blocks are fused too; the code is compiled once and kept for later runs"
        decisions.append(Decision("compiled as a whole", reason, "compile"))
    else:
        reason = "each block becomes a few kernels; equal blocks are compiled once, and kept for later runs"
        decisions.append(Decision("compiled blocks", reason, "compile"))
    return replace(memory, compile=not why_not, compile_whole=not why_not and holds_whole, compile_mode="")


def plan_speed(
    config: DistributedConfig,
    plan: Plan,
    hardware: Hardware,
    *,
    has_convolutions: bool,
    environ: Mapping[str, str],
    decisions: list[Decision],
    problems: list[Problem],
) -> SpeedPlan:
    """The speed settings of a plan that is otherwise complete."""
    on_gpu, holds_whole, precision = plan.device == "cuda", plan.is_replicated, plan.precision
    is_native = ENGINES.entries[plan.strategy].is_native
    is_low = precision.kind != "fp32"
    capability = min((gpu.compute_capability for gpu in hardware.gpus), default=0.0)
    is_bitwise = config.reproducible == "bitwise"

    def choose(name: str, asked: Asked, when: bool, what: str, why: str) -> bool:
        if asked == "auto":
            if when:
                decisions.append(Decision(what, why, name))
            return when
        return asked

    problems += _impossible(config, plan, hardware, is_bitwise)
    problems += _useless(config, on_gpu, is_native)
    could_capture = on_gpu and is_native and holds_whole and not is_bitwise
    if config.detect_anomaly and could_capture and config.capture == "auto":
        reason = "detect_anomaly looks at each operation, and a captured step repeats kernels without them"
        decisions.append(Decision("steps are not captured", reason, "detect_anomaly"))
    return SpeedPlan(
        capture=_left_open(config.capture, could_capture and not config.detect_anomaly),
        fused_optimizer=choose(
            "fused_optimizer",
            config.fused_optimizer,
            on_gpu and is_native and holds_whole,
            "fused optimizer",
            "torch's fused kernels read and write each number of the optimizer's state once",
        ),
        parameters=_plan_parameters(config, holds_whole, decisions),
        channels_last=choose(
            "channels_last",
            config.channels_last,
            on_gpu and is_native and holds_whole and is_low and has_convolutions and not is_bitwise,
            "channels last",
            "convolutions in 16 bits run on tensor cores in this memory format, without a copy into it",
        ),
        tf32=choose(
            "tf32",
            config.tf32,
            on_gpu and is_native and is_low and not is_bitwise and capability >= 8.0,
            "TF32",
            f"operations that {precision.kind} leaves in fp32 keep 10 bits of precision, more than the 7 of bf16",
        ),
        expandable_segments=choose(
            "expandable_segments",
            config.expandable_segments,
            on_gpu and is_native and not any(name in environ for name in ALLOCATOR),
            "expandable segments",
            "batches of several sizes then do not fragment the device's memory",
        ),
        keep_freed_memory=choose(
            "keep_freed_memory",
            config.keep_freed_memory,
            plan.device == "cpu" and is_native and not _why_not_kept(config) and not any(map(_is_of_malloc, environ)),
            "freed memory is kept",
            "otherwise the system reclaims the activations of each step, and clears their pages for the next one",
        ),
        data_on_device=_left_open(config.data_on_device, on_gpu and is_native and not is_bitwise),
    )


def _why_not_kept(config: DistributedConfig) -> str:
    """The reason why freed memory cannot be kept; "" if it can."""
    launcher = engine_of(config).launcher
    if launcher is not None and launcher.runs_threads:
        return (
            "ranks are threads of the engine's workers there, and malloc keeps the freed memory of a main thread only"
        )
    try:
        has_glibc = bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):
        has_glibc = False
    return "" if has_glibc else "only glibc's malloc can keep freed memory, and this system has another malloc"


def _is_of_malloc(variable: str) -> bool:
    return variable.startswith("MALLOC_") or variable in ("GLIBC_TUNABLES", "LD_PRELOAD")


def _left_open(asked: Asked, could: bool) -> Switch:
    """'auto' where the choice is made, and reported, once the run has started."""
    if asked == "auto":
        return "auto" if could else "off"
    return "on" if asked else "off"


def _plan_parameters(config: DistributedConfig, holds_whole: bool, decisions: list[Decision]) -> Parameters:
    asked = config.bf16_parameters
    if not asked:
        return "fp32"
    if asked == "stochastic":
        decisions.append(
            Decision("parameters in bf16", "stochastic rounding keeps small updates on average", "bf16_parameters")
        )
        return "stochastic"
    reason = "the optimizer keeps the digits that bf16 cannot hold, so no small update is lost"
    if not holds_whole:
        reason = "parameters are gathered and gradients reduced in bf16; shards are in fp32, so no small update is lost"
    decisions.append(Decision("parameters in bf16", reason, "bf16_parameters"))
    return "compensated"


def _impossible(config: DistributedConfig, plan: Plan, hardware: Hardware, is_bitwise: bool) -> list[Problem]:
    found: list[Problem] = []
    device, holds_whole = plan.device, plan.is_replicated
    holds_layers = plan.mesh.ranks_per_replica == 1  # a layer is whole when it runs
    slow = [gpu for gpu in hardware.gpus if 0 < gpu.compute_capability < HAS_FP8]
    if config.mixed_precision == "fp8" and device == "cuda" and slow:
        found.append(
            Problem(
                f"mixed_precision='fp8' on {slow[0].name}",
                why=f"the GPU has compute capability {slow[0].compute_capability}, and fp8 needs {HAS_FP8}",
                do="set mixed_precision='bf16', or take a GPU of Ada, Hopper or later",
            )
        )
    if config.keep_freed_memory is True and (why := _why_not_kept(config)):
        found.append(Problem("keep_freed_memory=True would have no effect", why=why, do="leave it out"))
    asked = {
        "bf16_parameters": (config.bf16_parameters, holds_whole or (holds_layers and plan.shard.is_fsdp)),
        "capture": (config.capture is True, holds_whole),
        "channels_last": (config.channels_last is True, holds_whole),
        "mixed_precision='fp8'": (config.mixed_precision == "fp8", holds_layers),
    }
    for name in [name for name, (is_asked, can) in asked.items() if is_asked and (is_bitwise or not can)]:
        other = "reproducible='bitwise'" if is_bitwise else "a model that is sharded over ranks"
        why = "bitwise adds gradients in its own fixed order" if is_bitwise else "each rank holds a part of the model"
        shards = name == "bf16_parameters" and holds_layers and not is_bitwise
        found.append(
            Problem(
                f"{name} with {other}",
                why=why,
                do="set zero_stage=2 or 3, or leave it out" if shards else "leave one of them out",
            )
        )
    if config.data_on_device is True and is_bitwise:
        found.append(
            Problem(
                "data_on_device=True with reproducible='bitwise'",
                why="bitwise reads the samples of each virtual rank separately, as on any number of ranks",
                do="leave one of them out",
            )
        )
    if config.bf16_parameters and config.mixed_precision == "fp16":
        found.append(
            Problem(
                "bf16_parameters with mixed_precision='fp16'",
                why="bf16_parameters makes the model compute in bf16, and it cannot compute in fp16 as well",
                do="set mixed_precision='bf16', or leave bf16_parameters out",
            )
        )
    return found


_OF_A_GPU = {  # settings that need a GPU, and why
    "channels_last": "gloo, which CPU ranks use, sends contiguous tensors only",
    "tf32": "TF32 is a format of GPUs",
    "expandable_segments": "it is an option of the CUDA memory allocator",
    "data_on_device": "the data is already in the CPU's memory",
}


def _useless(config: DistributedConfig, on_gpu: bool, is_native: bool) -> list[Problem]:
    """A problem for each setting that was set and would have no effect here; 'auto' is left out silently."""
    asked = [name for name in ("fused_optimizer", "keep_freed_memory", *_OF_A_GPU) if getattr(config, name) is True]
    found: list[Problem] = []
    if config.compile_cache and not config.compile:
        found.append(
            Problem("compile_cache without compile", why="nothing is compiled", do="set compile, or leave it out")
        )
    if not is_native:
        return found + [
            Problem(
                f"{name}=True with backend={config.backend!r}",
                why=f"the engine {config.backend} has kernels and memory of its own",
                do=f"leave {name} out, or train with backend='pytorch-ddp'",
            )
            for name in asked
        ]
    return found + [
        Problem(f"{name}=True on a CPU", why=_OF_A_GPU[name], do=f"leave {name} out")
        for name in asked
        if name in _OF_A_GPU and not on_gpu
    ]
